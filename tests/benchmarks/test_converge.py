"""`cce-dist bench converge` at a tiny size: same start for all, resumed, shared, refusals kept."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.converge.plan import STARTS, Plan, Sizes, builders, parse_slice
from benchmarks.evidence.convergence import cases_of
from benchmarks.evidence.records import read_record
from cce_dist.cli.main import app
from cce_dist.testing import zipf_inputs
from cce_dist.train.model.head import head_loss_of
from tests.benchmarks.bench_cases import write_texts
from tests.support.torchrun import run_forked

pytestmark = pytest.mark.timeout(120)

SIZES = (
    *("--vocab", "300", "--seeds", "2", "--dim", "16", "--layers", "1", "--batch", "2"),
    *("--sequence-length", "16", "--steps", "4", "--checkpoint-steps", "2", "--evaluations", "2"),
    *("--held-out-tokens", "64", "--warmup", "1", "--dtype", "float32", "--threads", "1"),
)
CHOSEN = ("--method", "dense", "--method", "filtered", "--method", "screened", "--method", "cce")


def test_converge_command(tmp_path: Path) -> None:
    write_texts(tmp_path / "text")
    path = tmp_path / "evidence" / "tiny.json"
    folders = ("--data", str(tmp_path / "text"), "--cache", str(tmp_path / "cache"))
    command = ("bench", "converge", *SIZES, *folders, "--record", str(path))
    code, output = run_forked(1, tmp_path / "a.out", *command, *CHOSEN, "--slice", "1/2")
    assert code == 0, output
    # Of the two groups of each start, those of seed 1.
    assert {row["seed"] for row in read_record(path).rows if row["part"] == "run"} == {1}
    before = read_record(path).rows
    code, output = run_forked(1, tmp_path / "b.out", *command, *CHOSEN)
    assert code == 0 and f"written: {path}" in output, output
    record = read_record(path)
    assert record.rows[: len(before)] == before
    runs = [row for row in record.rows if row["part"] == "run"]
    assert len(runs) == 2 * 2 * 4
    assert [row["part"] for row in record.rows].count("checkpoint") == 1
    for case in cases_of(record):
        assert case.steps == (0, 2, 4)
        for seed in (0, 1):
            first = case.loss("dense", seed, 0)
            assert case.loss("filtered", seed, 0) == first != case.loss("dense", seed, 4)
            # Below 4096 ids the filter keeps all.
            last = case.loss("dense", seed, 4)
            assert case.loss("filtered", seed, 4) == pytest.approx(last, 1e-5)
        # Refused or trained, it has its rows.
        assert case.why_not("screened") or case.seeds("screened") == [0, 1]
        assert "Error" in case.why_not("cce")
        assert case.compares("filtered")
    random, checkpoint = cases_of(record)
    # One checkpoint for all seeds, which has learned something.
    assert checkpoint.loss("dense", 0, 0) == checkpoint.loss("dense", 1, 0)
    assert random.loss("dense", 0, 0) != random.loss("dense", 1, 0)
    # Nothing is left to do, and a failed run is tried again where that is asked for.
    code, output = run_forked(1, tmp_path / "c.out", *command, *CHOSEN, "--retry")
    assert output.count(" cce: ") == 4 and output.count(" dense: ") == 0, output


def test_bench_train_records_peers(tmp_path: Path) -> None:
    """Both of CPU's: one that runs, and one of which there is nothing but its version."""
    told = tmp_path / "peers" / "cut_cross_entropy-9.9.dist-info" / "METADATA"
    told.parent.mkdir(parents=True)
    told.write_text("Metadata-Version: 2.1\nName: cut-cross-entropy\nVersion: 9.9\n")
    (tmp_path / "text.txt").write_text(Path(argparse.__file__).read_text()[:9000])
    (tmp_path / "run.yaml").write_text(
        f"data: {{paths: [{tmp_path / 'text.txt'}], vocab_size: 300, sequence_length: 16, "
        f"cache: {tmp_path / 'cache'}}}\n"
        "model: {dim: 16, layers: 1, heads: 1}\nbatch: 2\n"
    )
    path = tmp_path / "evidence" / "tiny.json"
    losses = ("--loss", "cce", "--loss", "dense", "--loss", "torch-chunked", "--loss", "apple-cce")
    steps = ("--warmup-steps", "1", "--timed-steps", "2", "--out", str(tmp_path / "runs"))
    command = ("bench", "train", str(tmp_path / "run.yaml"), *losses, *steps)
    files = ("--peer-path", str(tmp_path / "peers"), "--record", str(path))
    code, output = run_forked(1, tmp_path / "a.out", *command, *files)
    assert code == 0, output
    assert read_record(path).machine["peers"] == "cut-cross-entropy 9.9"
    rows = {row["loss"]: row for row in read_record(path).rows}
    assert list(rows) == ["filtered", "dense", "torch-chunked", "cce"]
    assert "Error" in str(rows["cce"]["failed"]) and "tokens_per_s" not in rows["cce"]
    # torch's own came with 2.13.
    has_chunked = hasattr(torch.nn, "LinearCrossEntropyOptions")
    for name in ("filtered", "dense", *(("torch-chunked",) if has_chunked else ())):
        assert float(rows[name]["tokens_per_s"] or 0) > 0 and "failed" not in rows[name]
        assert rows[name]["last_loss"] == rows["dense"]["last_loss"]


def test_builders_keep_and_screen_as_told() -> None:
    inputs = zipf_inputs(
        200, 1500, 40, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16
    )
    given = (inputs.hidden, inputs.weight, inputs.targets)
    screened = []
    for sizes in (Sizes(keep=0.05, max_kept=1.0), Sizes(keep=0.05, max_kept=0.0), Sizes()):
        losses = builders(False, sizes)
        right = losses["exact"]()(*given)
        for name in ("filtered", "no-tail"):
            torch.testing.assert_close(losses[name]()(*given), right)
        found = head_loss_of(losses["screened"](), torch.bfloat16)(*given)
        torch.testing.assert_close(found.loss, right, atol=1e-4, rtol=0)
        assert found.screened is not None
        screened.append(bool(found.screened.all()))
    assert screened == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--keep", "129"], 'Filter.keep must be "auto" or a mass', id="keep"),
        pytest.param(["--keep", "half"], "keep must be a number above 0", id="no number"),
        pytest.param(["--max-kept", "2"], "Screen.max_kept must be a share", id="max kept"),
        pytest.param(["--method", "mine"], "method must be among", id="method"),
        pytest.param(["--start", "zero"], "start must be among", id="start"),
        pytest.param(["--slice", "2/2"], "slice must be K/N with 0 <= K < N", id="slice"),
        pytest.param(["--evaluations", "500"], "evaluations must be <= steps=400", id="marks"),
    ],
)
def test_converge_refuses(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "converge", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_plan() -> None:
    whole = Plan((300, 400), STARTS, ("dense",), 3)
    parts = [Plan((300, 400), STARTS, ("dense",), 3, parse_slice(f"{k}/5")) for k in range(5)]
    groups = list(whole.groups())
    assert len(groups) == len(set(groups)) == 12
    assert {group for part in parts for group in part.groups()} == set(groups)
    assert sum(len(list(part.groups())) for part in parts) == 12
    assert Sizes(steps=10, evaluations=4).marks == (0, 2, 5, 7, 10)
    for text in ("3", "2/2", "-1/2"):
        with pytest.raises(ValueError, match=f"slice must be K/N with .*, got '{text}'"):
            parse_slice(text)
