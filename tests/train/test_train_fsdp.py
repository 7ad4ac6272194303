"""parallel.fsdp: the loss curve of the same job without it, and checkpoints that both resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.torchrun import (
    read_losses,
    run_forked_training,
    run_training,
    write_config,
)

# A job starts processes that import torch; see tests/train/test_train_job.py.
pytestmark = pytest.mark.timeout(180)

STEPS = 8
MODEL = {"dim": 16, "layers": 2, "heads": 2, "tied": True}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder; cache and runs of all jobs go there."""
    return tmp_path_factory.mktemp("fsdp")


def train(
    out: Path,
    num_ranks: int,
    name: str,
    *arguments: str,
    by: Callable[..., tuple[int, str]] = run_forked_training,
    **changes: Any,
) -> list[float]:
    """Trains on 8 sequences a step, clipping each step's gradient; returns the losses.

    Neither tp nor dp divides the 301 rows of the vocabulary, nor the rows that the other leaves.

    Args:
        by: runs the job. FSDP does not depend on the launcher, so only one job has torchrun.
    """
    parallel = {"timeout_s": 30, **changes.pop("parallel", {})}
    config = {
        "model": {"tied": True},
        "parallel": parallel,
        "optimizer": {"lr": 0.01, "warmup": 3, "schedule": "constant", "clip": 0.5},
        "checkpoint": {"every": 6},
        "steps": STEPS,
        "batch": 8 * parallel.get("tp", 1) // max(1, num_ranks),
        "log_every": 5,
    }
    code, output = by(num_ranks, write_config(out, name, config, **changes), *arguments)
    assert code == 0, output
    assert "Warning" not in output
    return read_losses(out / name)


def rows_by_rank(folder: Path, name: str) -> list[int]:
    """Returns the number of a tensor's rows that each rank saved, for ranks that have rows."""
    metadata = dcp.FileSystemReader(folder / "checkpoints" / f"step_{STEPS:08d}").read_metadata()
    chunks = metadata.state_dict_metadata[name].chunks  # pyright: ignore
    return [chunk.sizes[0] for chunk in sorted(chunks, key=lambda chunk: chunk.offsets)]


def grad_norms(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["grad_norm"] for line in lines]


@pytest.fixture(scope="module")
def split(out: Path) -> list[float]:
    """Trains the tied model over two data-parallel ranks."""
    return train(out, 2, "split", by=run_training, parallel={"fsdp": True})


def test_fsdp_trains_as_replicated_data_parallel_ranks_do(out: Path, split: list[float]) -> None:
    replicated = train(out, 2, "replicated")
    assert split == pytest.approx(replicated, rel=1e-6)
    assert split[-1] < split[0] - 0.3
    norms = grad_norms(out / "split")
    assert norms == pytest.approx(grad_norms(out / "replicated"), rel=1e-5)
    assert min(norms) > 0.5, "clipping is part of what is compared"
    for kind, suffix in (("model", ""), ("optimizer", ".exp_avg"), ("optimizer", ".exp_avg_sq")):
        assert rows_by_rank(out / "replicated", f"{kind}.embedding{suffix}") == [301]
        assert rows_by_rank(out / "split", f"{kind}.embedding{suffix}") == [151, 150]
        assert rows_by_rank(out / "split", f"{kind}.blocks.1.qkv.weight{suffix}") == [24, 24]
        assert rows_by_rank(out / "split", f"{kind}.blocks.1.mlp_norm.weight{suffix}") == [8, 8]


def test_fsdp_resumes_bitwise_and_in_another_layout(out: Path, split: list[float]) -> None:
    shutil.copytree(out / "split", out / "moved")
    for name in ("split", "moved"):
        shutil.rmtree(out / name / "checkpoints" / f"step_{STEPS:08d}")
    assert train(out, 2, "split", "--resume", parallel={"fsdp": True}) == split
    alone = train(out, 0, "moved", "--resume")
    assert alone[:6] == split[:6]
    assert alone == pytest.approx(split, rel=1e-5)


# Sequence parallelism sums the body's gradients over tp as well.
def test_fsdp_beside_tensor_parallelism(out: Path, split: list[float]) -> None:
    parallel = {"tp": 2, "sequence_parallel": True, "fsdp": True}
    losses = train(out, 4, "mesh", parallel=parallel)
    # fp32 sums have another order; a few optimizer steps amplify the difference.
    assert losses == pytest.approx(split, abs=1e-5)
    # tp splits 301 rows into 151 and 150, and dp splits each of these.
    assert rows_by_rank(out / "mesh", "optimizer.embedding.exp_avg") == [76, 75, 75, 75]


def test_fsdp_untied_in_bfloat16_and_beside_dense(out: Path) -> None:
    changes: dict[str, Any] = {"dtype": "bfloat16", "model": {**MODEL, "tied": False}}
    replicated = train(out, 2, "replicated-bf16", **changes)
    losses = train(out, 2, "bf16", "--compare", "dense", parallel={"fsdp": True}, **changes)
    assert rows_by_rank(out / "bf16", "optimizer.head.exp_avg") == [151, 150]
    assert losses == pytest.approx(replicated, rel=1e-6)
    assert losses == pytest.approx(read_losses(out / "bf16" / "dense"), abs=0.05)
    report = (out / "bf16" / "report.md").read_text()
    rows = dict(line.strip("| ").split(" | ") for line in report.splitlines() if " | " in line)
    assert abs(float(rows["difference"].split()[0])) < 1e-2
    for name in ("tokens/s, median step", "peak memory of training"):
        assert float(rows[name].split()[0].replace(",", "")) > 0
        assert float(rows[f"dense {name}"].split()[0].replace(",", "")) > 0
