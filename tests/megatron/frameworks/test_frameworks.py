"""Log-probabilities in verl, SkyRL and NeMo-RL: with stand-ins for them, and with them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

from cce_dist.testing import RankPool
from tests.megatron.frameworks import framework_checks as checks

# A rank imports Megatron for seconds, the first time, and a framework for more.
pytestmark = pytest.mark.timeout(240)

CHECKS = {
    "verl": checks.check_verl,
    "skyrl": checks.check_skyrl,
    "nemo_rl": checks.check_nemo_rl,
    "nemo_rl_model": partial(checks.check_nemo_rl_model, is_set_up=False),
    "nemo_rl_model_before": partial(checks.check_nemo_rl_model, is_set_up=True),
}


@pytest.mark.parametrize("setup", checks.SETUPS)
@pytest.mark.parametrize("name", CHECKS)
def test_with_a_stand_in(megatron_pools: dict[int, RankPool], name: str, setup: str) -> None:
    megatron_pools[2].run(2, checks.run_check, CHECKS[name], setup, False, timeout=100)


@pytest.mark.parametrize(
    ("name", "check", "setup"),
    [
        *[pytest.param("verl", checks.check_verl, x, id=f"verl-{x}") for x in checks.SETUPS],
        pytest.param("verl", checks.check_verl_as_theirs, "sequence_parallel", id="verl-theirs"),
        pytest.param("verl", checks.check_verl_as_theirs, "tied", id="verl-theirs_tied"),
        pytest.param("skyrl", checks.check_skyrl, "alone_rows", id="skyrl-alone_rows"),
        pytest.param("skyrl", checks.check_skyrl_as_theirs, "sequence_parallel", id="skyrl-theirs"),
        pytest.param("skyrl", checks.check_skyrl_as_theirs, "tied", id="skyrl-theirs_tied"),
        pytest.param("nemo_rl", checks.check_nemo_rl, "alone_rows", id="nemo_rl-alone_rows"),
        pytest.param("nemo_rl", checks.check_nemo_rl_as_theirs, "tied", id="nemo_rl-theirs"),
        pytest.param(
            "nemo_rl", checks.check_nemo_rl_model_as_theirs, "tied", id="nemo_rl-theirs_model"
        ),
    ],
)
def test_with_the_framework(
    megatron_pools: dict[int, RankPool], name: str, check: Callable[..., None], setup: str
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    megatron_pools[2].run(2, checks.run_check, check, setup, True, timeout=200)


def test_scaling_of_nemo_rl_by_its_source() -> None:
    """Its module imports Megatron Bridge, vLLM's engine and loggers."""
    package = importlib.util.find_spec("nemo_rl")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("nemo_rl is not installed")
    source = Path(package.submodule_search_locations[0], "models/megatron/train.py").read_text()
    functions = {x.name: x for x in ast.parse(source).body if isinstance(x, ast.FunctionDef)}
    arguments = [x.arg for x in functions["apply_temperature_scaling"].args.args]
    assert arguments == ["logits", "sampling_params"]
