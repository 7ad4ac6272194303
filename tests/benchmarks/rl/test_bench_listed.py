"""`bench listed`: the prices of listed ids."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.bench_cases import invoke, read_csv, refuse


def test_listed_ids_are_timed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    tiny = ("--tokens", "64", "--vocab", "300", "--dim", "8", "--device", "cpu", "--repeats", "3")
    invoke("listed", *tiny, "--dtype", "float32", "--ids", "5", "--csv", str(path))
    rows = read_csv(path)
    kinds = ["all ids", "support", "candidates", "everything"]
    assert [row["method"] for row in rows] == [kind for kind in kinds for _ in range(2)]
    assert all(float(row["of_all_ids"]) == 1 for row in rows if row["method"] == "all ids")
    assert "ids must lie in [1, V=300], got 301" in refuse("listed", *tiny, "--ids", "301")
