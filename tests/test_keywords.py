"""No function takes keywords that its signature does not name, nor a name that says nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("benchmarks", "cce_dist", "megatron_patch")
    for path in (ROOT / package).rglob("*.py")
)

# These stand in for functions of another library, whose keywords they pass on or refuse.
IN_PLACE_OF_OTHERS = {
    "benchmarks/ranks/megatron_model.py": {"__init__", "forward"},
    "cce_dist/pipeline/schedules/torch_schedules.py": {"__call__", "run"},
    "cce_dist/pipeline/schedules/vocab_1f1b.py": {
        "__init__",
        "step",
        "_step_microbatches",
        "_post",
    },
    "cce_dist/testing/interpreter/blocks.py": {"dot", "to"},
    "cce_dist/testing/interpreter/memory.py": {
        "create_masked_load",
        "create_masked_store",
        "descriptor_load",
        "load",
        "store",
    },
    "cce_dist/testing/interpreter/operators.py": {"choose"},
    "cce_dist/testing/interpreter/speed_up.py": {"launch_quietly", "call", "call_args"},
    "cce_dist/integrations/transformers/forward.py": {"forward"},
    "megatron_patch/deferred.py": {"max", "argmax"},
    "megatron_patch/frameworks/skyrl.py": {"_as_ours", "_output_processor"},
    "megatron_patch/frameworks/verl.py": {"_fused_output_processor"},
    "megatron_patch/pipeline/over_pipeline.py": {"schedule", "init"},
    "megatron_patch/quantized.py": {"_as_one_step"},
    "megatron_patch/replaced.py": {"_head_call"},
    "megatron_patch/replacements.py": {"ours"},
    "megatron_patch/pipeline/rows.py": {"sharded_state_dict"},
    "megatron_patch/pipeline/tied.py": {"__call__"},
}

# Of arguments and of local variables: the thing has a better name.
EMPTY_NAMES = {"how", "more", "made", "found", "own", "given"}


def takes_any_keyword(source: str) -> set[str]:
    """Names of functions with a parameter `**name: Any`."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.args.kwarg is not None and node.args.kwarg.annotation is not None
        if ast.unparse(node.args.kwarg.annotation) in ("Any", "typing.Any")
    }


@pytest.mark.parametrize("path", FILES, ids=str)
def test_functions_name_their_keywords(path: str) -> None:
    allowed = IN_PLACE_OF_OTHERS.get(path, set())
    assert takes_any_keyword((ROOT / path).read_text(encoding="utf-8")) == allowed


@pytest.mark.parametrize("path", FILES, ids=str)
def test_names_say_the_thing(path: str) -> None:
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    names = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert names & EMPTY_NAMES == set()


def test_exceptions_are_of_files_that_exist() -> None:
    assert set(IN_PLACE_OF_OTHERS) <= set(FILES)
