"""`cce-dist bench heads`: a sample is checked, then each cell is measured once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from subprocess import STDOUT, CompletedProcess
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor

from benchmarks.heads import heads
from benchmarks.heads.heads import HEADS, Head, Plan, bench_heads, read_rows
from benchmarks.heads.table import describe
from cce_dist.bench.golden import (
    dense_loss,
    full_reference,
    golden_gradients,
    sampled_gradients,
    sampled_reference,
)
from cce_dist.bench.inputs import MODELS, Shape, make_inputs
from cce_dist.bench.loss import Settings
from cce_dist.bench.methods import METHODS, Method
from tests.benchmarks.bench_cases import invoke, read_csv, refuse
from tests.support.torchrun import run_forked

LENIENT = Settings(repeats=3, host=False, strict=False, worst_error_ratio=3)


def peer(name: str, calls: list[str], *, exact: bool = True) -> Method:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        calls.append(name)
        if name == "broken":
            raise RuntimeError("no kernel")
        return dense_loss(hidden, weight, targets)

    return Method(name, "peer", lambda setup: loss, exact=exact)


def tiny_plan(tmp_path: Path, *kinds: str) -> Plan:
    return Plan([Head("tiny", 300, 16)], [16, 32], kinds, tmp_path, device="cpu")


def test_bench_heads_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], stdout: TextIO, **options: Any) -> CompletedProcess[str]:
        """Runs the command in a forked process, without its imports' seconds."""
        assert command[:3] == [sys.executable, "-m", "cce_dist"]
        code, output = run_forked(0, tmp_path / "out", *command[3:])
        stdout.write(output)
        return CompletedProcess(command, code)

    monkeypatch.setattr(heads, "subprocess", SimpleNamespace(run=run, STDOUT=STDOUT))
    small = ("--layers", "1", "--batch", "2", "--sequence-length", "16")
    monkeypatch.setattr(heads, "TRAINING", small)
    monkeypatch.setattr(heads, "SEQUENCE", 16)
    path = tmp_path / "heads.csv"
    sizes = ["--head", "300x16", "--tokens", "24", "--repeats", "3", "--device", "cpu"]
    files = ["--csv", str(path), "--cache", str(tmp_path), "--megabytes", "0.2"]
    kinds = ["--inputs", "flat", "--inputs", "step-0", "--inputs", "step-2"]
    ours = ["--method", "filtered", "--method", "screened"]
    output = invoke("heads", *sizes, *files, *kinds, *ours, "--peers", "torch-chunked")
    rows = read_csv(path)
    methods = ["filtered", "screened"]
    assert [row["inputs"] for row in rows if row["method"] == "screened"] == kinds[1::2]
    assert {row["method"] for row in rows} >= {*methods, "one matmul", "torch-chunked"}
    for row in rows:
        assert (row["head"], row["N"], row["V"], row["D"]) == ("300x16", "24", "300", "16")
        if row["method"] in methods:
            assert 0 < float(row["grad_weight_error"]) < 0.02 and not row["failed"]
    assert (tmp_path / "300x16" / "step-2.pt").is_file()
    assert "| 300x16 | 300, 16 | 24 |" in output
    # The same command has nothing left to measure.
    again = invoke("heads", *sizes, *files, *kinds, *ours)
    assert again == output[output.index("| head |") :]
    assert again == invoke("heads", "--csv", str(path), "--device", "cpu", "--show")
    assert len(read_csv(path)) == len(rows)


def test_a_ratio_is_to_the_fastest_exact_peer(tmp_path: Path) -> None:
    calls: list[str] = []
    path = tmp_path / "heads.csv"
    peers = [peer("dense-peer", calls), peer("drops", calls, exact=False), peer("broken", calls)]
    wrong = Method("screened", "ours", lambda setup: lambda *t: dense_loss(*t) / 2)
    said: list[str] = []
    complete = bench_heads(
        tiny_plan(tmp_path, "flat", "zipf"),
        [METHODS["filtered"], wrong, *peers],
        LENIENT,
        path,
        machine={"commit": "here"},
        failed={},
        say=said.append,
    )
    rows = read_rows(path)
    assert not complete and len(said) == 4 and {row["commit"] for row in rows} == {"here"}
    # Once for each number of tokens: it would fail with other inputs, too.
    assert calls.count("broken") == 2
    for cell in (rows[:7], rows[7:14]):
        times = {row["method"]: row for row in cell}
        assert times["broken"]["failed"] == "RuntimeError: no kernel"
        assert "grad_hidden_error is" in times["screened"]["failed"]
        assert times["screened"]["times_faster"] == times["one matmul"]["times_faster"] == ""
        ratio = float(times["dense-peer"]["median_ms"]) / float(times["filtered"]["median_ms"])
        assert float(times["filtered"]["times_faster"]) == pytest.approx(ratio, rel=1e-4)
        assert float(times["dense-peer"]["times_faster"]) == 1
    text = describe(rows)
    assert "failed |" in text and "- broken failed in 4 cells, first tiny 16 flat: Runtime" in text


def test_a_broken_capture_costs_its_cells_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    stored = make_inputs("zipf", Shape(20, 300, 16))
    tensors = {"hidden": stored.hidden, "weight": stored.weight, "targets": stored.targets}
    torch.save(tensors, tmp_path / "tiny" / "step-5.pt")
    said: list[str] = []
    complete = bench_heads(
        tiny_plan(tmp_path, "step-5"),
        [METHODS["exact"]],
        LENIENT,
        tmp_path / "heads.csv",
        machine={},
        failed={},
        say=said.append,
    )
    assert not complete
    assert "must have Shape(num_tokens=32" in said[1]
    rows = read_rows(tmp_path / "heads.csv")
    assert {row["N"] for row in rows} == {"16"}
    assert {row["times_faster"] for row in rows} == {""}


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"entropy_bonus": 0.3}], ids=["plain", "softcap", "entropy"]
)
def test_a_sample_has_the_rows_of_all(options: dict[str, float]) -> None:
    inputs = replace(make_inputs("zipf", Shape(700, 90, 32), dtype=torch.bfloat16), **options)
    golden, tokens = golden_gradients(inputs), torch.tensor([3, 0, 699])
    ids = torch.tensor([0, 5, 89])
    sample = sampled_gradients(inputs, tokens, ids, torch.float64)
    torch.testing.assert_close(sample.loss, golden.loss)
    torch.testing.assert_close(sample.hidden, golden.hidden[tokens])
    torch.testing.assert_close(sample.weight, golden.weight[ids])
    full, reference = full_reference(inputs), sampled_reference(inputs)
    assert reference.tokens is not None and len(reference.tokens) == 512
    for name, error in full.dense.items():
        if name != "loss_error":
            assert reference.dense[name] == pytest.approx(error, rel=0.25)


def test_describe_names_what_loses() -> None:
    def row(head: str, tokens: int, inputs: str, method: str, ratio: str) -> dict[str, str]:
        sizes = {"N": str(tokens), "V": "128256", "D": "2048"}
        names = {"head": head, "inputs": inputs, "method": method, "failed": ""}
        return {**names, **sizes, "times_faster": ratio}

    rows = [
        row("llama3.2-1b", 8192, "zipf", "filtered", "2.5"),
        row("llama3.2-1b", 8192, "step-10", "filtered", "0.9"),
        row("llama3.2-1b", 8192, "step-10", "screened", "0.8"),
        row("llama3.2-1b", 1024, "step-10", "filtered", "2.1"),
        row("smollm2-135m", 1024, "zipf", "filtered", ""),
    ]
    lines = describe(rows).splitlines()
    assert lines[2] == "| smollm2-135m | 128256, 2048 | 1,024 | - |  |  |  |"
    assert lines[4] == "| llama3.2-1b | 128256, 2048 | 8,192 | 2.50 |  | 0.90 | 0.80 |"
    assert lines[5] == "| least |  |  | 2.50 | - | 0.90 | 0.80 |"
    assert "- filtered, V >= 100,000, captured: median 1.50, least 0.90 of 2" in lines
    assert "- filtered, V >= 100,000, captured and zipf: median 2.10, least 0.90 of 3" in lines
    assert "- filtered below 1.00: llama3.2-1b 8,192 step-10 0.90" in lines
    assert "- screened slower than filtered: llama3.2-1b 8,192 step-10 0.89" in lines


def test_bench_heads_refuses() -> None:
    assert "head must be one of" in refuse("heads", "--device", "cpu", "--head", "gpt-5")
    assert "or step-N, got 'step-x'" in refuse("heads", "--device", "cpu", "--inputs", "step-x")
    assert "methods and peers must be among" in refuse("heads", "--device", "cpu", "--peers", "us")
    assert set(HEADS) <= set(MODELS)
