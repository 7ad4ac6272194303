"""Every benchmark runs once on a tiny shape, and refuses to time what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, LinearCrossEntropy, linear_cross_entropy
from cce_dist.bench.golden import dense_loss
from cce_dist.bench.inputs import BenchInputs, Shape, make_inputs
from cce_dist.bench.loss import VARIED, Settings, bench_loss, filter_cells, shorter_inputs
from cce_dist.bench.methods import Method, choose_methods
from tests.benchmarks.bench_cases import OURS, TINY, invoke, named, read_csv, refuse


@pytest.mark.parametrize("inputs", ["gaussian", "zipf"])
def test_bench_loss_command(inputs: str, tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    invoke("loss", *TINY, "--inputs", inputs, "--csv", str(path))
    rows = read_csv(path)
    floors = ["one matmul", "three matmuls"]
    assert [row["method"] for row in rows][:6] == [*floors, "dense", *OURS]
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert rows[2]["of_dense"] == rows[0]["of_roofline"] == "1.00"
    assert rows[2]["inputs"] == inputs
    assert rows[2]["V"] == "500"
    assert rows[2]["command"].startswith("cce-dist")
    assert {"date", "device", "torch", "triton", "commit"} <= set(rows[2])


def test_bench_loss_writes_all_files(tmp_path: Path) -> None:
    files = ["--csv", str(tmp_path / "a.csv"), "--json", str(tmp_path / "a.json")]
    all_parts = ["loss", "forward", "gradient", "loss+grad"]
    parts = [f"--passes={part}" for part in all_parts]
    both = ["--inputs", "gaussian", "--inputs", "zipf", "--method", "dense", "--method", "filtered"]
    invoke("loss", *TINY, *files, *parts, *both, "--plots", str(tmp_path))
    stored = json.loads((tmp_path / "a.json").read_text())["rows"]
    cases = [(row["inputs"], row["method"], row["part"]) for row in stored]
    assert cases == [
        (inputs, method, part)
        for inputs in ("gaussian", "zipf")
        for method, parts in (
            ("one matmul", ["loss"]),
            ("three matmuls", ["loss+grad"]),
            ("dense", all_parts),
            ("filtered", all_parts),
        )
        for part in parts
    ]
    assert all(0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] for row in stored)
    dense = next(row for row in stored if row["part"] == "loss+grad" and row["method"] == "dense")
    gradients_mib = 4 * 16 * (64 + 500) / 2**20
    assert dense["peak_extra_mib"] == pytest.approx(dense["over_gradients_mib"] + gradients_mib)
    assert len(read_csv(tmp_path / "a.csv")) == len(stored)
    for name in ("time-error.png", "time-memory.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_bench_loss_says_whether_logits_were_screened(tmp_path: Path) -> None:
    """So few columns are all kept: no."""
    path = tmp_path / "loss.csv"
    names = ["screened", "screened-e4m3", "screened-copy", "screened-in-forward"]
    chosen = [f"--method={name}" for name in ("dense", "filtered", *names)]
    invoke("loss", *TINY, "--dtype", "bfloat16", *chosen, "--csv", str(path))
    rows = {row["method"]: row for row in read_csv(path)}
    assert all(float(rows[name]["median_ms"]) > 0 for name in names)
    found = {name: row["screened"] for name, row in rows.items() if row["screened"]}
    assert found == dict.fromkeys(("screened", "screened-e4m3", "screened-in-forward"), "no")


def test_bench_loss_lists_failed_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_peers.py").write_text(
        "def wrong(hidden, weight, targets):\n"
        "    return hidden.sum() * 0 + weight.sum() * 0\n"
        "def broken(hidden, weight, targets):\n"
        "    raise RuntimeError('no kernel\\nfor this shape')\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "loss.csv"
    extra = [f"--extra={name}=odd_peers:{name}" for name in ("wrong", "broken", "absent")]
    chosen = ["--method", "dense", "--method", "exact", "--peers", "quack"]
    where = ["--peer-path", str(tmp_path), "--csv", str(path), "--failed", "quack=was lost"]
    output = invoke("loss", *TINY, *chosen, *extra, *where)
    rows = {row["method"]: row for row in read_csv(path)}
    assert rows["quack"]["failed"] == "was lost"
    assert rows["broken"]["failed"] == "RuntimeError: no kernel"
    assert rows["absent"]["failed"].startswith("AttributeError: module 'odd_peers'")
    assert rows["broken"]["median_ms"] == ""
    assert "broken failed: RuntimeError: no kernel" in output
    # A peer's errors are reported, not judged.
    assert rows["wrong"]["failed"] == ""
    assert float(rows["wrong"]["grad_weight_error"]) == 1
    assert float(rows["wrong"]["median_ms"]) > 0


def test_bench_loss_saves_after_every_method() -> None:
    saved: list[list[str]] = []
    methods = choose_methods(["dense", "exact"])
    inputs = make_inputs("gaussian", Shape(32, 100, 8))
    bench_loss(
        inputs, methods, Settings(repeats=3), save=lambda rows: saved.append(list(named(rows)))
    )
    floors = ["one matmul", "three matmuls"]
    assert saved[0] == [*floors, "dense"]
    assert saved[1] == saved[2] == [*floors, "dense", "exact"]


@pytest.mark.parametrize("factor", [0.5, float("nan")], ids=["half", "nan"])
def test_bench_loss_refuses_wrong_gradients(factor: float) -> None:
    def wrong(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return factor * dense_loss(hidden, weight, targets)

    inputs = make_inputs("gaussian", Shape(32, 100, 8))
    with pytest.raises(RuntimeError, match=r"exact: grad_hidden_error is .* nothing was timed"):
        bench_loss(inputs, [Method("exact", "ours", lambda setup: wrong)], Settings(repeats=3))


@pytest.mark.parametrize("compact", [False, True], ids=["ignored", "removed"])
def test_bench_loss_with_ignored_targets(compact: bool) -> None:
    seen = []

    def spy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(hidden))
        return dense_loss(hidden, weight, targets)

    inputs = make_inputs("gaussian", Shape(40, 100, 8)).ignoring(0.25)
    methods = [*choose_methods(OURS), Method("spy", "peer", lambda setup: spy)]
    rows = named(bench_loss(inputs, methods, Settings(repeats=3, compact=compact)))
    assert set(seen) == ({30} if compact else {40})
    assert all((rows[name]["grad_weight_error"] or 1) < 1e-5 for name in (*OURS, "spy"))
    assert inputs.description["ignored"] == 10


def test_bench_loss_keeps_to_its_budget() -> None:
    inputs = make_inputs("gaussian", Shape(32, 100, 8))
    settings = Settings(repeats=50, budget_seconds=1e-9)
    rows = named(bench_loss(inputs, choose_methods(["dense"]), settings))
    assert rows["dense"]["repeats"] == rows["one matmul"]["repeats"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss", "--dtype", "bf17"], "dtype must name a torch dtype, got 'bf17'"),
        (["loss", "--device", "tpux"], "device must name a torch device, got 'tpux'"),
        (["loss", "--shape", "1x2"], "shape must be one of"),
        (
            ["loss", "--inputs", "nonsense"],
            "inputs must be one of ['flat', 'gaussian',",
        ),
        (["loss", "--inputs", __file__], "inputs must be a file of `cce-dist bench capture`"),
        (["loss", "--method", "fastest"], "got ['fastest']"),
        (["loss", "--peers", "cce,fastest"], "got ['fastest']"),
        (["loss", "--extra", "x=y"], "extra must be NAME=MODULE:FUNCTION, got 'x=y'"),
        (["loss", "--passes", "both"], "passes must be among"),
        (["loss", "--backend", "cuda"], "backend must be one of"),
        (["capture", "--dim", "33"], "dim must be a multiple of 2 * 1 heads, got 33"),
    ],
    ids=lambda value: " ".join(value).replace(__file__, "FILE") if isinstance(value, list) else "",
)
def test_bench_refuses(arguments: list[str], message: str) -> None:
    assert message in refuse(*arguments)


def test_bench_refuses_another_file_of_torch(tmp_path: Path) -> None:
    torch.save({"hidden": torch.ones(2, 3)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"file of `cce-dist bench capture`, got '.*other.pt'"):
        make_inputs(str(tmp_path / "other.pt"), Shape(2, 0, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_refuses_a_gpu_that_is_not_there() -> None:
    got = refuse("loss", "--device", "cuda")
    assert "device must be cpu where torch finds no GPU, got 'cuda'" in got


def test_a_compiled_method_needs_a_gpu() -> None:
    (method,) = choose_methods(["filtered-compiled"], on_gpu=True)
    assert method.origin == "ours"
    with pytest.raises(ValueError, match="filtered-compiled needs a GPU"):
        choose_methods(["filtered-compiled"])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bench_loss_with_a_softcap(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    methods = [x for name in ("dense", "exact", "filtered") for x in ("--method", name)]
    chosen = (*methods, "--peers", "torch-chunked")
    where = ("--backend", backend, "--softcap", "3", "--worst-error-ratio", "9", "--csv", str(path))
    output = invoke("loss", *TINY, "--inputs", "zipf", *chosen, *where)
    rows = {row["method"]: row for row in read_csv(path)}
    assert all(row["inputs"] == "zipf softcap 3" for row in rows.values())
    assert all(float(rows[name]["grad_weight_error"]) < 1e-4 for name in ("dense", "exact"))
    assert rows["torch-chunked"]["failed"].startswith("NotImplementedError: torch-chunked takes no")
    assert "torch-chunked failed" in output


def test_bench_loss_with_an_entropy_bonus(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    methods = ("--method", "filtered", "--method", "exact", "--peers", "torch-chunked")
    where = ("--entropy-bonus", "0.5", "--worst-error-ratio", "9", "--csv", str(path))
    invoke("loss", *TINY, "--inputs", "zipf", *methods, *where)
    rows = {row["method"]: row for row in read_csv(path)}
    for name in ("filtered", "exact"):
        assert rows[name]["inputs"] == "zipf entropy bonus 0.5"
        assert float(rows[name]["grad_weight_error"]) < 1e-5
    assert "torch-chunked differentiates no entropy" in rows["torch-chunked"]["failed"]


def test_tail_mass_is_that_of_the_loss_with_its_softcap() -> None:
    inputs = make_inputs("zipf", Shape(64, 500, 16))
    options: dict[str, Any] = {"filter": Filter(keep=0.5), "backend": "torch"}
    found = {}
    for softcap in (None, 2.0):
        function = LinearCrossEntropy(softcap=softcap, **options)
        out: Any = linear_cross_entropy(
            *(inputs.hidden, inputs.weight, inputs.targets),
            softcap=softcap,
            stats=("tail_mass",),
            **options,
        )
        found[softcap] = filter_cells(inputs, function.options)["tail_mass"]
        assert found[softcap] == pytest.approx(float(out.tail_mass.mean()))
    assert found[2.0] != pytest.approx(found[None], rel=0.01)


@pytest.mark.parametrize("softcap", ["0", "-1", "inf", "nan"])
def test_bench_refuses_a_softcap(softcap: str) -> None:
    for command in ("loss", "profile"):
        got = refuse(command, "--device", "cpu", "--softcap", softcap)
        assert "softcap must be" in got and f"got {float(softcap)}" in got


@pytest.mark.parametrize("bonus", ["inf", "nan"])
def test_bench_refuses_an_entropy_bonus(bonus: str) -> None:
    got = refuse("loss", "--device", "cpu", "--entropy-bonus", bonus)
    assert f"entropy-bonus must be a finite number, got {bonus}" in got


@pytest.mark.parametrize("size", [1, 100])
def test_shorter_inputs_are_the_first_tokens(size: int) -> None:
    inputs = BenchInputs("", torch.randn(size, 4), torch.randn(9, 4), torch.arange(size) % 9)
    shorter = shorter_inputs(inputs)
    assert len(shorter) == VARIED
    for each in shorter:
        number = len(each.hidden)
        assert size / 2 < number <= size
        assert torch.equal(each.hidden, inputs.hidden[:number])
        assert torch.equal(each.targets, inputs.targets[:number])
    assert len({len(each.hidden) for each in shorter}) > size / 3
