"""Kernels that are compiled ahead of time are those that a job launches."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("triton")

from cce_dist import Filter, LossOptions
from cce_dist.ahead.calls import HeadCalls
from cce_dist.ahead.launchers import compiler, why_no_launchers
from cce_dist.backends.triton.launch.start import can_compile_only
from cce_dist.cli.compile import calls_of_model, calls_of_training
from cce_dist.cli.main import app

# Processes of their own, which import torch and compile.
pytestmark = pytest.mark.timeout(400)

SCRIPT = Path(__file__).parent / "ahead_jobs.py"


def run_job(*arguments: str, **environment: str) -> Any:
    """Prints nothing but its JSON, on the last line."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"TRITON_INTERPRET": "0"} | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the script prints, and the cache that it filled: of one process, for torch's import."""
    if not can_compile_only():
        pytest.skip("this Triton compiles in launches")
    cache = tmp_path_factory.mktemp("cache")
    return run_job("check", str(cache)), cache


@pytest.mark.parametrize("kind", ["filtered", "statistics", "everything", "three products"])
def test_the_same_is_asked_for_ahead_and_in_a_job(
    kind: str, checked: tuple[dict[str, Any], Path]
) -> None:
    """By launches after a warm-up, of tensors with memory, on another GPU of the architecture, and
    for another number of tokens."""
    keys = dict(checked[0]["compared"][kind])
    assert keys.pop("keys") > 15
    assert len(keys) == 5 and not any(keys.values()), keys


def test_launches_compile_nothing(checked: tuple[dict[str, Any], Path]) -> None:
    late = checked[0]["late"]
    assert len(late) == 13 and not any(late.values()), late


def test_a_second_compilation_finds_all_in_the_cache(checked: tuple[dict[str, Any], Path]) -> None:
    (first, second, small, wrong), cache = checked[0]["reports"], checked[1]
    names = ["count_kernel", "place_kernel", "require_in_range_kernel"]
    for report, cached in ((first, False), (second, True)):
        assert sorted(each["kernel"] for each in report["binaries"]) == names
        assert {each["cached"] for each in report["binaries"]} == {cached}
        assert not report["failed"] and report["cache"] == str(cache)
    for each in first["binaries"]:
        folder = cache / each["folder"]
        assert (folder / f"{each['kernel']}.cubin").stat().st_size
        assert each["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    # A kernel that does not fit the GPU is named.
    assert "place_kernel" in small["failed"] and "shared memory" in small["failed"]["place_kernel"]
    # So is a kernel that does not compile; the others are there.
    assert list(wrong["failed"]) == ["wrong_kernel"]
    assert "no_such_name" in wrong["failed"]["wrong_kernel"]
    assert sorted(each["kernel"] for each in wrong["binaries"]) == names
    assert bool(list(cache.rglob("__triton_launcher*"))) == (why_no_launchers() is None)
    assert bool(list(cache.rglob("cce_dist_batch*"))) == (compiler() is not None)


SPLIT = HeadCalls(50257, 64, torch.float32, 256, (LossOptions(),), num_ranks=8)


def test_shards_has_a_rank_of_each_kind() -> None:
    # 6,283 rows a rank; the last has 6,276, and the others begin at a multiple of 16 or not.
    assert [rank for rank, _ in SPLIT.shards()] == [0, 1, 7]
    assert SPLIT.shards()[-1][1].num_rows == 6276
    # Most of so many ranks are empty, and alike.
    kinds = [shard.num_rows for _, shard in replace(SPLIT, num_ranks=10**9).shards()]
    assert kinds == [1, 1, 0]


TRAINING = """
data: {vocab_size: 1000, sequence_length: 32}
model: {dim: 48, heads: 3}
loss: {softcap: 20.0}
parallel: {tp: all}
global_batch: 12
dtype: bfloat16
"""


def test_calls_of_training(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TRAINING)
    calls = calls_of_training(path, 4, {"--tokens": None})
    assert (calls.vocab_size, calls.dim, calls.num_tokens) == (1000, 48, 12 * 32)
    assert calls.dtype == torch.bfloat16 and calls.num_ranks == 4
    plain, logged = calls.trained
    assert plain.softcap == 20 and logged.stats == ("tail_mass",)
    assert calls.evaluated[0].reduction == "none" and calls.evaluated[0].gradient == "exact"


def test_calls_of_model() -> None:
    pairs = ['stats=["lse"]', 'filter={"keep": 0}', "gradient=in_forward", "bias=float32"]
    calls = calls_of_model("700x32", 64, 2, "float16", pairs)
    (options,) = calls.trained
    assert (calls.vocab_size, calls.dim, calls.num_tokens, calls.num_ranks) == (700, 32, 64, 2)
    assert options.stats == ("lse",) and options.filter == Filter(keep=0)
    assert calls.tensors == {"bias": torch.float32}
    # Rows of the head, padding included.
    assert calls_of_model("qwen2.5-7b", 64, None, "bfloat16", ()).vocab_size == 152064


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gemma2-2b", "--arch", "sm_91"), "arch must be one of"),
        (("gemma9", "--arch", "sm_90"), "model must be a config.json or one of"),
        (("64x32", "--arch", "sm_90", "--dtype", "int8"), "dtype must be one of"),
        (("64x32", "--arch", "sm_90", "--tokens", "0"), "tokens must be >= 1, got 0"),
        (("64x32", "--arch", "sm_90", "--tp", "0"), "tp must be >= 1, got 0"),
        ((f"{10**20}x32", "--arch", "sm_90"), f"vocab_size must be <= {2**30}, got {10**20}"),
        (("64x32", "--arch", "sm_90", "--cache", "/dev/null"), "--cache must be a folder, or one"),
        (("64x32", "--arch", "sm_90", "--loss", "soft=3"), "loss must be KEY=VALUE with a key of"),
        (("64x32", "--arch", "sm_90", "--loss", "gradient=no"), "gradient must be"),
        (("64x32", "--arch", "sm_90", "--loss", 'filter={"foo": 1}'), "filter must have keys of"),
        (("64x32", "--arch", "sm_90", "--loss", "bias=int8"), "dtype must be one of"),
        (("run.yaml", "--arch", "sm_90", "--tp", "2"), "--tp must be left out with run.yaml"),
        (("pipe.yaml", "--arch", "sm_90"), "parallel.vocab_over_pipeline must be false"),
        (("none.yaml", "--arch", "sm_90"), "none.yaml"),
        (("64x32", "--arch", "sm_90"), "TRITON_INTERPRET must be 0 to compile, got 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    Path("run.yaml").write_text("{}")
    Path("pipe.yaml").write_text(
        "parallel: {pp: 2, vocab_over_pipeline: true}\nmodel: {layers: 4}\nbatch: 8"
    )
    done = CliRunner().invoke(app, ["compile", *arguments])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ") and message in done.stderr


def test_no_ranks() -> None:
    done = CliRunner().invoke(app, ["compile", "64x32", "--arch", "sm_90", "--ranks", "0"])
    assert done.exit_code == 2 and "--ranks" in done.output and "equal to 1" in done.output


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 20.0, "z_loss": 1e-4, "stats": ["lse", "entropy"]},
        {"logits": "screened"},
        {"gradient": "in_forward"},
        {"gradient": "exact", "bias": "bfloat16"},
    ],
    ids=["filtered", "statistics", "screened", "in_forward", "exact"],
)
def test_a_job_compiles_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    if not can_compile_only():
        pytest.skip("this Triton compiles in launches")
    major, minor = torch.cuda.get_device_capability()
    written = {key: x if isinstance(x, str) else json.dumps(x) for key, x in options.items()}
    pairs = [word for key, text in written.items() for word in ("--loss", f"{key}={text}")]
    command = ("5000x96", "--arch", f"sm_{major}{minor}", "--tokens", "700", *pairs)
    ahead = run_job(
        "command", "compile", *command, "--cache", str(tmp_path), CUDA_VISIBLE_DEVICES=""
    )
    before = {path.name for path in tmp_path.iterdir()}
    job = run_job("train", json.dumps(options), "700", TRITON_CACHE_DIR=str(tmp_path))
    asked, lines = set(map(tuple, ahead)), []
    for name, key in set(map(tuple, job["keys"])) - asked:
        others = [other for kernel, other in asked if kernel == name]
        near = difflib.get_close_matches(key, others, n=1, cutoff=0) or [""]
        pieces = difflib.ndiff(near[0].split(", "), key.split(", "))
        lines += [f"{name}:", *(piece for piece in pieces if piece[0] in "+-")]
    assert not lines, "\n".join(lines)
    assert not job["compiled"]
    # Nor a launcher.
    assert {path.name for path in tmp_path.iterdir()} == before
