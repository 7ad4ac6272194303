"""Modules' old names give the modules themselves, and say once what to import instead."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
import warnings
from importlib import import_module, util
from pathlib import Path

import pytest

from cce_dist.core.old_names import NEW_FUNCTIONS, NEW_NAMES

ROOT = Path(__file__).parent.parent
# Packages that have been modules, the module each has been, and a name in it.
NOW_PACKAGES = [
    ("cce_dist.cli", "cce_dist.cli.main", "app"),
    ("cce_dist.planner.orders", "cce_dist.planner.orders.vocab_1f1b", "plan_vocab_order"),
    ("cce_dist.train.config", "cce_dist.train.config.schema", "TrainConfig"),
    ("cce_dist.train.model", "cce_dist.train.model.decoder", "Decoder"),
    ("cce_dist.train.pipeline", "cce_dist.train.pipeline.step", "Pipeline"),
    ("cce_dist.train.report", "cce_dist.train.report.run", "read_metrics"),
    ("cce_dist.train.watch", "cce_dist.train.watch.watch", "Heartbeat"),
]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_old_name_is_the_module_itself() -> None:
    pytest.importorskip("mpi4py")
    for old, new in NEW_NAMES.items():
        sys.modules.pop(old, None)
        with pytest.warns(DeprecationWarning, match=f"{old} is now {new}; ") as warned:
            module = import_module(old)
        assert module is import_module(new) and len(warned) == 1
        assert module.__name__ == new and module.__spec__ is not None
        assert module.__spec__.name == new
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert import_module(old) is module
            for name, now in NEW_FUNCTIONS.get(old, {}).items():
                assert getattr(module, name) is getattr(module, now)


WAYS = """
warnings.simplefilter("ignore")
from cce_dist.adapters import pipeline_head
import cce_dist.adapters.pipeline_head as same
import cce_dist.adapters.pipelining
from cce_dist.adapters.pipelining import VocabOverPipeline
from cce_dist.pipeline import head
assert pipeline_head is same is head
assert cce_dist.adapters.pipelining.VocabOverPipeline is VocabOverPipeline
assert VocabOverPipeline.__module__ == "cce_dist.pipeline.schedules.torch_schedules"
"""


@pytest.mark.timeout(180)
def test_old_names_in_a_new_process() -> None:
    """A package has the names of the module it was, and an old name can be imported in all WAYS."""
    # One process for all: torch's import takes seconds.
    code = "import importlib, json, warnings; said = []\n"
    for old, new, name in NOW_PACKAGES:
        code += (
            "with warnings.catch_warnings(record=True) as warned:\n"
            "    warnings.simplefilter('always')\n"
            f"    from {old} import {name}\n    from {old} import {name}\n"
            f"assert {name} is importlib.import_module('{new}').{name}\n"
            "said.append([str(x.message) for x in warned if x.category is DeprecationWarning])\n"
        )
    said = json.loads(run(f"{code}{WAYS}print(json.dumps(said))"))
    for (old, new, _), (message,) in zip(NOW_PACKAGES, said, strict=True):
        assert message.startswith(f"{old} is now {new}; ")
        with pytest.raises(AttributeError, match="unheard_of"):
            _ = import_module(old).unheard_of


def test_pickles_of_old_names_load() -> None:
    from cce_dist.planner.models.model import Model

    now = pickle.dumps(Model, protocol=0)
    for old, new in (("cce_dist.train.tokens", "cce_dist.train.data.tokens"),):
        stored = f"c{old}\nload_tokens\n.".encode()
        name = next(
            node.name
            for node in ast.parse(Path(str(import_module(new).__file__)).read_text()).body
            if isinstance(node, ast.FunctionDef)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = pickle.loads(stored.replace(b"load_tokens", name.encode()))
        assert loaded is getattr(import_module(new), name)
    assert pickle.loads(now) is Model


def test_no_file_uses_an_old_name() -> None:
    assert util.find_spec("cce_dist.adapters.unheard_of") is None
    for folder in ("cce_dist", "megatron_patch", "docs/examples"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "old_names.py":
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    module = getattr(node, "module", None)
                    assert module not in NEW_NAMES, f"{path}:{node.lineno}"
