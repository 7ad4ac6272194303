"""`cce-dist bench pipeline` over gloo, and how it moves layers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.ranks.pipeline import HEADS
from benchmarks.ranks.pipeline_model import even_layout, relayout
from tests.support.torchrun import bench

TINY = (
    *("--layers", "5", "--vocab", "1031", "--dim", "32", "--sequence", "64"),
    *("--microbatches", "4", "--repeats", "3", "--dtype", "float32", "--device", "cpu"),
)


@pytest.mark.timeout(180)
def test_every_place_of_the_head_is_measured(tmp_path: Path) -> None:
    csv_path, png = tmp_path / "rows.csv", tmp_path / "lanes.png"
    code, output = bench(tmp_path, "pipeline", *TINY, "--csv", str(csv_path), "--plot", str(png))
    assert code == 0, output
    with csv_path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["head"], row["stage"]) for row in rows] == [(x, y) for x in HEADS for y in "01"]
    for row in rows:
        # Of the last step's passes, four microbatches; each step may take another time.
        assert float(row["median_ms"]) > 0 and float(row["f_ms"]) > 0 and float(row["b_ms"]) > 0
        assert float(row["busy_ms"]) > 2 * (float(row["f_ms"]) + float(row["b_ms"]))
        over_ranks = row["head"] in HEADS[4:]
        assert (float(row["s_ms"]) > 0) == (float(row["t_ms"]) > 0) == over_ranks
        assert (float(row["loss_ms"]) > 0) == (row["stage"] == "1" and not over_ranks)
    layers = {row["head"]: [] for row in rows}
    for row in rows:
        layers[row["head"]].append(int(row["layers"]))
    assert layers["dense"] == layers["vocab-1f1b"] == [3, 2]
    assert all(sum(each) == 5 for each in layers.values())
    assert png.stat().st_size > 10_000


@pytest.mark.timeout(120)
def test_screened_logits_are_measured(tmp_path: Path) -> None:
    csv_path = tmp_path / "rows.csv"
    heads = ("dense", "fused", "vocab-1f1b")
    options = [*TINY, "--dtype", "bfloat16", "--logits", "screened", "--csv", str(csv_path)]
    options += [option for head in heads for option in ("--head", head)]
    code, output = bench(tmp_path, "pipeline", *options)
    assert code == 0, output
    with csv_path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["head"] for row in rows] == [head for head in heads for _ in "01"]
    assert {row["logits"] for row in rows} == {"screened"}
    # Close, and of other arithmetic.
    losses = {row["head"]: float(row["mean_loss"]) for row in rows}
    assert losses["fused"] == pytest.approx(losses["dense"], rel=1e-3)
    assert losses["vocab-1f1b"] == pytest.approx(losses["dense"], rel=1e-3)
    assert losses["dense"] not in (losses["fused"], losses["vocab-1f1b"])


def test_layers_move_away_from_the_head() -> None:
    assert even_layout(26, 4) == [7, 7, 6, 6]
    assert relayout(26, 4, 1.0, 0.0) == [7, 7, 6, 6]
    assert relayout(26, 4, 1.0, 10.0) == [9, 8, 8, 1]
    assert relayout(26, 2, 1.0, 4.0) == [15, 11]
    assert relayout(4, 4, 1.0, 9.0) == [1, 1, 1, 1]
