"""`cce-dist bench pipeline` over gloo, and the layers of its stages."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.ranks.pipeline import HEADS
from benchmarks.ranks.pipeline_model import layout_of
from tests.support.torchrun import bench

TINY = (
    *("--model", "tiny", "--sequence", "64"),
    *("--microbatches", "4", "--repeats", "3", "--dtype", "float32", "--device", "cpu"),
)


@pytest.mark.timeout(180)
def test_every_place_of_the_head_is_measured(tmp_path: Path) -> None:
    csv_path = tmp_path / "rows.csv"
    code, output = bench(tmp_path, "pipeline", *TINY, "--last-layers", "1", "--csv", str(csv_path))
    assert code == 0, output
    with csv_path.open() as file:
        rows = list(csv.DictReader(file))
    places = [(row["head"], row["stage"], row["layers"]) for row in rows]
    assert places == [(head, *stage) for head in HEADS for stage in (("0", "4"), ("1", "1"))]
    for row in rows:
        # Four microbatches of 64 tokens.
        rate = 4 * 64 / (1e-3 * float(row["median_ms"]))
        assert float(row["tokens_per_s"]) == pytest.approx(rate, rel=0.05)


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


def test_layers_of_stages() -> None:
    assert layout_of(26, 4, None) == [7, 7, 6, 6]
    assert layout_of(26, 4, 1) == [9, 8, 8, 1]
    assert layout_of(4, 4, 1) == [1, 1, 1, 1]
    for layers, ranks, last in ((4, 1, None), (4, 1, 1), (3, 4, None), (3, 4, 1)):
        with pytest.raises(ValueError, match=f"2 ranks, .* got {ranks} ranks and {layers} layers"):
            layout_of(layers, ranks, last)
