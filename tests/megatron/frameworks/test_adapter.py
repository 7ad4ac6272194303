"""Functions of stand-ins are replaced, refused when they have moved, and put back."""

from __future__ import annotations

import logging
import operator
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patch import PatchError
from megatron_patch.frameworks import nemo_rl, skyrl, verl
from megatron_patch.frameworks.verl_fsdp import FORWARDS, TORCH, TRITON
from tests.megatron.frameworks.stand_ins import (
    NEMO,
    NEMO_SETUP,
    NEMO_UTILS,
    SKYRL,
    SKYRL_UTILS,
    SOURCES,
    VERL,
    load,
    stand_ins,
)

FRAMEWORKS: dict[str, Any] = {"verl": verl, "skyrl": skyrl, "nemo_rl": nemo_rl}
SEAMS = {
    "verl": [
        (VERL, "fused_output_processor"),
        (VERL, "patch_fused_forward"),
        (TORCH, "FusedLinearForPPO.forward"),
        (TRITON, "linear_cross_entropy"),
        *(
            (module, f"forward_with_{x}_backend")
            for module in FORWARDS
            for x in ("torch", "triton")
        ),
    ],
    "skyrl": [
        (SKYRL, "_fused_lm_head_output_processor"),
        (SKYRL, "from_parallel_hidden_to_logprobs"),
        (SKYRL, "from_parallel_hidden_to_logprobs_packed_sequences"),
        (SKYRL, "_fused_vocab_parallel_entropy_from_hidden"),
        (SKYRL_UTILS, "_fused_lm_head_logprob_apply"),
        (SKYRL_UTILS, "_fused_vocab_parallel_entropy_from_hidden"),
    ],
    "nemo_rl": [
        (NEMO_UTILS, "from_parallel_hidden_states_to_logprobs"),
        (NEMO_UTILS, "patch_gpt_model_forward_for_linear_ce_fusion"),
        (NEMO_SETUP, "patch_gpt_model_forward_for_linear_ce_fusion"),
        (NEMO, "apply_temperature_scaling"),
    ],
}
each_framework = pytest.mark.parametrize("name", FRAMEWORKS)
# An argument that each has in one of its functions.
RENAMED = {"verl": "output_weight", "skyrl": "lm_head_weight", "nemo_rl": "runtime_gather_output"}


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    with stand_ins():
        yield
        for framework in FRAMEWORKS.values():
            framework.remove()


def find(module: str, name: str) -> Any:
    return operator.attrgetter(name)(load(module))


def is_ours(function: Any) -> bool:
    return hasattr(function, "__wrapped__")


@each_framework
@pytest.mark.parametrize("is_imported", [True, False], ids=["imported", "imported_later"])
def test_apply_replaces_and_remove_puts_back(name: str, is_imported: bool) -> None:
    framework = FRAMEWORKS[name]
    if is_imported:
        for module, _ in SEAMS[name]:
            load(module)
    finders = list(sys.meta_path)
    framework.apply()
    framework.apply()
    assert is_imported == (sys.meta_path == finders)
    assert all(is_ours(find(module, function)) for module, function in SEAMS[name])
    framework.remove()
    framework.remove()
    assert sys.meta_path == finders
    for module, function in SEAMS[name]:
        # What a module has imported from another stays ours there, and does what theirs does.
        left = find(module, function)
        assert not is_ours(left) or (not is_imported and module in (SKYRL, NEMO_SETUP))
    if name == "skyrl":
        entropy: Any = load(SKYRL)._fused_vocab_parallel_entropy_from_hidden
        assert entropy(None, None, None) == "theirs"


def test_apply_imports_no_framework() -> None:
    code = (
        "import sys; from megatron_patch.frameworks import nemo_rl, skyrl, verl; "
        "verl.apply(); skyrl.apply(); nemo_rl.apply(); "
        "print({'verl', 'skyrl', 'nemo_rl', 'megatron'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_verl_plugin_applies_when_verl_imports_it() -> None:
    assert not is_ours(load(VERL).fused_output_processor)
    load("megatron_patch.frameworks.verl_plugin")
    assert is_ours(load(VERL).fused_output_processor)
    del sys.modules["megatron_patch.frameworks.verl_plugin"]


@each_framework
@pytest.mark.parametrize("is_imported", [True, False], ids=["imported", "imported_later"])
def test_apply_refuses_a_moved_signature(name: str, is_imported: bool) -> None:
    renamed = RENAMED[name]
    moved = {x: text.replace(renamed, "moved") for x, text in SOURCES.items()}
    framework = FRAMEWORKS[name]
    with stand_ins(moved):
        match = rf"must take \(.*{renamed}.*\), got \(.*moved.*\) in {name} .*megatron_patch knows"
        if is_imported:
            assert all(load(x) for x, _ in SEAMS[name])
        else:
            framework.apply()
        with pytest.raises(PatchError, match=match):
            framework.apply() if is_imported else [load(x) for x, _ in SEAMS[name]]
        if is_imported:
            assert not any(is_ours(find(x, y)) for x, y in SEAMS[name])
        framework.remove()


def test_apply_refuses_what_is_not_there_or_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = load(VERL)
    monkeypatch.setattr(module, "patch_fused_forward", lambda model: None)
    with pytest.raises(PatchError, match=r"patch_fused_forward must be verl's, got .*lambda"):
        verl.apply()
    monkeypatch.delattr(module, "patch_fused_forward")
    with pytest.raises(PatchError, match=r"patch_fused_forward must take \(model\), got \(nothing"):
        verl.apply()
    assert not is_ours(module.fused_output_processor)


@pytest.mark.parametrize(
    ("name", "value"),
    [("logits", "screened"), ("check_ranks", True), ("vocab_over_pipeline", True)],
    ids=["logits", "check_ranks", "vocab_over_pipeline"],
)
def test_apply_refuses_options_without_logprobs(name: str, value: Any) -> None:
    with pytest.raises(PatchError, match=rf"{name}={value!r} has no log-probabilities in skyrl"):
        skyrl.apply(**{name: value})


def test_apply_refuses_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_PATCH_GRADIENT", "exact")
    nemo_rl.apply()
    nemo_rl.apply(gradient="exact")
    with pytest.raises(PatchError, match=r"nemo_rl has ours with .*call remove\(\) between them"):
        nemo_rl.apply(gradient="filtered")


def test_apply_logs_what_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    logger = logging.getLogger("megatron_patch.frameworks")
    monkeypatch.setattr(logger, "info", lambda text, *args: lines.append(text % args))
    load(VERL)
    verl.apply()
    assert f"ours in place of {VERL}.fused_output_processor" in lines[0]


def test_nemo_rl_refuses_a_temperature_of_logprobs() -> None:
    nemo_rl.apply()
    scaling: Any = load(NEMO).apply_temperature_scaling
    hot = SimpleNamespace(temperature=2.0)
    assert scaling(torch.ones(1, 2, 3), hot).eq(0.5).all()
    assert scaling(torch.ones(1, 2), SimpleNamespace(temperature=1.0)).eq(1).all()
    with pytest.raises(PatchError, match=r"temperature must be 1 .*got 2\.0"):
        scaling(torch.ones(1, 2), hot)
