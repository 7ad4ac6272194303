"""Pretraining with real megatron-core over gloo: with the patch as without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

core = pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

import megatron_patch  # noqa: E402
from cce_dist.testing import RankPool  # noqa: E402
from cce_dist.testing.forks import run_module  # noqa: E402
from megatron_patch.__main__ import main as command  # noqa: E402
from tests.megatron.megatron_bench import measure  # noqa: E402
from tests.megatron.megatron_checks import CHECKS, run_check  # noqa: E402
from tests.megatron.megatron_distillation import CHECKS as OF_DISTILLATION  # noqa: E402
from tests.megatron.megatron_distillation import run_check as run_distillation  # noqa: E402
from tests.megatron.megatron_jobs import compare  # noqa: E402
from tests.megatron.megatron_screened import on_tensor_parallel_ranks  # noqa: E402
from tests.megatron.megatron_setup import Setup  # noqa: E402
from tests.megatron.megatron_stock import CHECKS as OF_OTHERS  # noqa: E402
from tests.megatron.megatron_stock import run_check as run_check_of_others  # noqa: E402

# A rank imports Megatron for seconds, the first time.
pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]


EXACT = {"gradient": "exact", "backend": "torch"}
PIPELINE = {"pp": 2, "layers": 4, "microbatches": 4}
JOBS = {
    "tp": Setup(tp=2),
    "sequence_parallel": Setup(tp=2, sequence_parallel=True),
    "tied": Setup(tp=2, tied=True),
    "native": Setup(tp=2, sequence_parallel=True, native=True),
    "bf16": Setup(tp=2, sequence_parallel=True, bf16=True),
    "fusion": Setup(tp=2, fusion=True),
    "fusion_tied": Setup(tp=2, fusion=True, tied=True, sequence_parallel=True),
    "mtp": Setup(tp=2, mtp=True),
    "mtp_fusion": Setup(tp=2, mtp=True, fusion=True, tied=True, sequence_parallel=True),
    "experts": Setup(tp=2, experts=True, sequence_parallel=True),
    "recompute": Setup(tp=2, recompute=True),
    # The layers below the head learn more slowly.
    "frozen_head": Setup(tp=2, frozen_head=True, steps=10),
    "per_token": Setup(tp=2, per_token=True),
    "pipeline": Setup(**PIPELINE),
    "pipeline_tied": Setup(**PIPELINE, tied=True, fusion=True),
    "interleaved": Setup(**PIPELINE, vpp=2, tied=True),
    "head_of_its_own": Setup(**PIPELINE, layout="Etttt|L"),
    "layout": Setup(**PIPELINE, layout="Et|tttL", tied=True),
    "tp_pipeline": Setup(**PIPELINE, tp=2, sequence_parallel=True, tied=True),
    "context_parallel": Setup(tp=2, cp=2, sequence_parallel=True, tied=True),
    "fsdp_root": Setup(dp=2, fsdp="root"),
    # gloo has no scaled sums: per token they are not asked for. From 0.17 on the fusion asks for
    # TransformerEngine here.
    "fsdp_megatron": Setup(dp=2, fsdp="megatron", distributed_optimizer=True, per_token=True),
    "fsdp_head": Setup(tp=2, dp=2, fsdp="head"),
    "data_parallel": Setup(tp=2, dp=2, overlap=True, distributed_optimizer=True),
    "data_parallel_fusion": Setup(
        tp=2, dp=2, overlap=True, distributed_optimizer=True, fusion=True, bf16=True
    ),
}
# Of which other jobs have each pair of settings: on a CPU, where a rank computes what it would on a
# GPU but for the kernels, they are left to these.
IN_OTHERS = {"tp", "sequence_parallel", "tied", "fusion_tied", "pipeline", "layout"}
# Megatron's own rounding: of logits to 16 bits; and its fused loss rounds d_logits so even in fp32.
ROUNDS = {"bf16": 2e-2, "data_parallel_fusion": 2e-2, "native": 1e-3}
WHEN = {
    **{"tied": "after", "interleaved": "after"},
    **dict.fromkeys(("sequence_parallel", "bf16", "fsdp_head", "fsdp_megatron"), "wrapped"),
}


@pytest.mark.multigpu
@pytest.mark.parametrize("name", JOBS)
def test_pretraining_on_gpus(gpu_pools: dict[int, RankPool], name: str) -> None:
    setup = replace(JOBS[name], device="cuda")
    if setup.world > torch.cuda.device_count():
        pytest.skip(f"needs {setup.world} GPUs")
    check_pretraining(gpu_pools[setup.world], name, setup, {"gradient": "exact"})


@pytest.mark.parametrize("name", [name for name in JOBS if name not in IN_OTHERS])
def test_pretraining_is_the_same(megatron_pools: dict[int, RankPool], name: str) -> None:
    if name == "fsdp_megatron" and core.__version__.startswith("0.14"):
        pytest.skip("0.14's Megatron-FSDP asks torch for what 2.13 has no longer")
    check_pretraining(megatron_pools[JOBS[name].world], name, JOBS[name], EXACT)


def check_pretraining(pool: RankPool, name: str, setup: Setup, patch: dict[str, str]) -> None:
    when = WHEN.get(name, "before")
    ranks = pool.run(setup.world, compare, setup, patch, when, timeout=200)
    assert sum(found["ours"]["losses_of_ours"] for found in ranks) > 0
    for found in ranks:
        ours, theirs = found["ours"], found["theirs"]
        assert ours["logits_made"] == 0 and theirs["losses_of_ours"] == 0
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=ROUNDS.get(name, 1e-5))
        assert ours["grads"].keys() == theirs["grads"].keys()
        for key, grad in theirs["grads"].items():
            if name in ROUNDS:
                off = (ours["grads"][key] - grad).norm()
                assert float(off) <= 3e-2 * float(grad.norm()), key
            else:
                torch.testing.assert_close(ours["grads"][key], grad, rtol=1e-4, atol=1e-6)
        if ours["losses"]:
            assert ours["losses"][-1] < ours["losses"][0] - 0.3


@pytest.mark.parametrize("name", CHECKS)
def test_head(megatron_pools: dict[int, RankPool], name: str) -> None:
    megatron_pools[2].run(2, run_check, name, timeout=100)


@pytest.mark.parametrize("name", OF_DISTILLATION)
def test_distillation(megatron_pools: dict[int, RankPool], name: str) -> None:
    size = max(OF_DISTILLATION[name][0].world, 2)
    megatron_pools[size].run(size, run_distillation, name, timeout=100)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_code_that_is_not_megatrons(megatron_pools: dict[int, RankPool], name: str) -> None:
    megatron_pools[2].run(2, run_check_of_others, name, timeout=100)


@pytest.mark.interpreter
def test_screened(megatron_pools: dict[int, RankPool]) -> None:
    megatron_pools[2].run(2, on_tensor_parallel_ranks, timeout=100)


@pytest.mark.parametrize("parallel", [False, True], ids=["tp", "sequence parallel, tied"])
def test_the_benchmark_measures_every_loss(
    megatron_pools: dict[int, RankPool], parallel: bool
) -> None:
    rows = megatron_pools[2].run(2, measure, parallel, timeout=100)[0]
    assert [row["loss"] for row in rows] == ["unfused", "native", "exact", "filtered", "no head"]
    means = [row["mean_loss"] for row in rows[:-1]]
    assert means == pytest.approx([means[0]] * 4, rel=2e-3)
    for row in rows:
        assert row["sequence_parallel"] == ("yes" if parallel else "") and row["tp"] == 2
        assert row["recompute"] == ("full" if parallel else "")
        tokens = row["microbatch_tokens"] * row["microbatches"]
        assert tokens == 64 and row["tokens_per_s"] == pytest.approx(64e3 / row["median_ms"])
        # A microbatch's share; of steps this short it is mostly noise.
        beyond = (row["median_ms"] - rows[-1]["median_ms"]) / row["microbatches"]
        assert row["head_ms"] == pytest.approx(beyond)


# -- the command --------------------------------------------------------------------------------

SCRIPT = """
import sys
import neighbour
import megatron_patch
print("argv", sys.argv[1:], __name__, megatron_patch.status().options.gradient)
"""


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_PATCH_")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_patch", *arguments],
        env={**inherited, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def run_forked_command(
    folder: Path, *arguments: str, path: Sequence[Path] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """As run_command, in a process that has imported torch already.

    Args:
        folder: for its output.
        path: folders in which modules are looked for first.
    """
    # As with -m, the folder that it is started in comes before all.
    first = [ROOT, *path, ROOT]
    return run_module("megatron_patch", arguments, folder, environment=environment, path=first)


def test_command_runs_a_script(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("")
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT)
    given = ("--gradient", "exact", str(script), "--gradient", "theirs", "--check")
    done = run_command(*given, MEGATRON_PATCH_BACKEND="torch")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert (
        first.startswith("megatron_patch: cce-dist ")
        and f"megatron.core {core.__version__} (" in first
    )
    assert first.endswith("gradient=exact, backend=torch")
    assert second == "argv ['--gradient', 'theirs', '--check'] __main__ exact"
    # One line of all ranks.
    done = run_forked_command(tmp_path, *given, RANK="1")
    assert done.returncode == 0 and done.stdout.splitlines() == [second], done.stderr


def test_command_checks_and_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = run_forked_command(tmp_path, "--logits", "screened", "--check").stdout
    assert found.rstrip().endswith("gradient=filtered, logits=screened, backend=auto")
    for arguments, environment, message in (
        (("--gradient", "none", "x.py"), {}, "gradient must be one of 'filtered', 'exact'"),
        (("--keep-logits", "true", "x.py"), {}, "keep_logits=True has no effect with gradient='f"),
        (
            ("--gradient", "exact", "x.py"),
            {"MEGATRON_PATCH_LOGITS": "screened"},
            "logits=\"screened\" needs a filter that leaves columns out, and gradient='exact'",
        ),
        (("--logits", "8", "x.py"), {}, "logits must be one of 'full', 'screened', got '8'"),
        (("--quantize-once", "0", "x.py"), {}, "quantize_once=False needs logits='screened'"),
        ((), {}, "name the script to run"),
        (("x.py",), {"MEGATRON_PATCH_GRADIENTS": "exact"}, "MEGATRON_PATCH_GRADIENTS is no option"),
        (("x.py",), {"MEGATRON_PATCH_SOFTCAP": "a"}, "MEGATRON_PATCH_SOFTCAP: could not convert"),
    ):
        # In this process: starting another takes seconds each.
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
            for name, value in environment.items():
                patched.setenv(name, value)
            command(list(arguments))
        assert ended.value.code == 2 and message in capsys.readouterr().err


def test_command_says_once_why_it_cannot_run(tmp_path: Path) -> None:
    other = tmp_path / "megatron"
    other.mkdir()
    (other / "__init__.py").write_text("")
    for rank, argument, lines in (("0", "x.py", 1), ("1", "x.py", 0), ("1", "--check", 1)):
        done = run_forked_command(tmp_path, argument, path=[tmp_path], RANK=rank)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == lines, done.stderr
        if lines:
            assert "megatron_patch: cannot run: megatron.core cannot be imported" in done.stderr


@pytest.mark.parametrize("name", ["gradeint", "environment"])
def test_apply_refuses_other_keywords(name: str) -> None:
    """`environment` is an argument of the function that reads the options."""
    with pytest.raises(ValueError, match=rf"options must be of gradient, .+, got \['{name}'\]"):
        megatron_patch.apply(**{name: {}})
