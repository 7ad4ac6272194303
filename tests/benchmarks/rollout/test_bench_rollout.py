"""`bench rollout` and `bench listed`: log-probabilities beside a sampler's, and their prices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.rollout import bench_rollout, nucleus
from cce_dist.bench.inputs import Shape, make_inputs
from tests.benchmarks.bench_cases import invoke, read_csv, refuse


def test_a_replayed_support_is_the_samplers_softmax() -> None:
    inputs = make_inputs("zipf", Shape(96, 700, 16))
    rows = bench_rollout(inputs, top_p=0.8, temperature=1.3)
    by = {(row["method"], row["trainer"], row["support"]): row for row in rows}
    assert len(by) == len(rows) == 10
    # The same logits as the sampler's.
    same = by["dense", "bfloat16", "replayed"]
    assert same["mean_ratio"] == pytest.approx(1, abs=1e-6) and same["far_share"] == 0
    for trainer in ("float32", "bfloat16"):
        replayed = by["token_logprobs", trainer, "replayed"]
        whole = by["token_logprobs", trainer, "none"]
        assert replayed["mean_ratio"] == pytest.approx(1, abs=5e-3)
        # The nucleus has a little more than top_p of the mass.
        assert 0.79 < float(whole["mean_ratio"]) < 0.9 and float(whole["far_share"]) > 0.8
    exact = by["dense", "float32", "replayed"]
    for name in ("mean_ratio", "ratio_spread", "mean_abs_log_ratio"):
        ours = by["token_logprobs", "float32", "replayed"][name]
        assert ours == pytest.approx(exact[name], rel=1e-3, abs=1e-6)


def test_the_nucleus_has_the_fewest_ids_that_reach_top_p() -> None:
    log_q = torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.25, 0.25, 0.25, 0.25]]).log()
    kept = nucleus(log_q, 0.7)
    assert kept.tolist() == [[False, True, True, False], [True, True, True, False]]


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    tiny = ("--tokens", "32", "--vocab", "300", "--dim", "8")
    invoke("rollout", "--inputs", "gaussian", *tiny, "--csv", str(path))
    assert len(read_csv(path)) == 10
    refused = refuse("rollout", "--inputs", "gaussian", *tiny, "--top-p", "1.5")
    assert "top-p must lie in (0, 1], got 1.5" in refused
    assert "temperature must be > 0" in refuse(
        "rollout", "--inputs", "gaussian", *tiny, "--temperature", "0"
    )


def test_listed_ids_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    tiny = ("--tokens", "64", "--vocab", "300", "--dim", "8", "--device", "cpu", "--repeats", "3")
    invoke("listed", *tiny, "--dtype", "float32", "--ids", "5", "--csv", str(path))
    rows = read_csv(path)
    kinds = ["all ids", "support", "candidates", "everything"]
    assert [row["method"] for row in rows] == [kind for kind in kinds for _ in range(2)]
    assert all(float(row["of_all_ids"]) == 1 for row in rows if row["method"] == "all ids")
    assert "ids must lie in [1, V=300], got 301" in refuse("listed", *tiny, "--ids", "301")
