"""Every benchmark runs once on a tiny shape, and refuses to time what is wrong."""

from __future__ import annotations

import csv
import functools
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.loss.filter import bench_filter
from benchmarks.loss.quantize import bench_quantize
from cce_dist import (
    Filter,
    LinearCrossEntropy,
    Screen,
    linear_cross_entropy,
    quantize_weight,
)
from cce_dist.bench.golden import dense_loss, errors, golden_gradients, gradients
from cce_dist.bench.inputs import IGNORE_INDEX, Shape, make_inputs, parse_shape
from cce_dist.bench.loss import Settings, bench_loss, mean_tail_mass
from cce_dist.bench.machine import Timer, Variant, interleaved_times
from cce_dist.bench.methods import Method, choose_methods, describe_failure, time_limit
from cce_dist.bench.report import Row, percentiles_ms, show
from cce_dist.cli import app
from cce_dist.local_triton_tiles import TABLE
from cce_dist.testing import CPU_PLACES, Place, grid

TINY = ["--shape", "64x500x16", "--repeats", "3"]
OURS = ["filtered", "exact", "in_forward"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def refuse(*arguments: str) -> str:
    """The error's text, without the box that it is drawn in."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf8") as file:
        return list(csv.DictReader(file))


def named(rows: Sequence[Row]) -> dict[str, Row]:
    return {row.method: row for row in rows}


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
    found = json.loads((tmp_path / "a.json").read_text())["rows"]
    cases = [(row["inputs"], row["method"], row["part"]) for row in found]
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
    assert all(0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] for row in found)
    dense = next(row for row in found if row["part"] == "loss+grad" and row["method"] == "dense")
    gradients_mib = 4 * 16 * (64 + 500) / 2**20
    assert dense["peak_extra_mib"] == pytest.approx(dense["over_gradients_mib"] + gradients_mib)
    assert len(read_csv(tmp_path / "a.csv")) == len(found)
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
        bench_loss(inputs, [Method("exact", "ours", lambda: wrong)], Settings(repeats=3))


@pytest.mark.parametrize("compact", [False, True], ids=["ignored", "removed"])
def test_bench_loss_with_ignored_targets(compact: bool) -> None:
    seen = []

    def spy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(hidden))
        return dense_loss(hidden, weight, targets)

    inputs = make_inputs("gaussian", Shape(40, 100, 8)).ignoring(0.25)
    methods = [*choose_methods(OURS), Method("spy", "peer", lambda: spy)]
    rows = named(bench_loss(inputs, methods, Settings(repeats=3, compact=compact)))
    assert set(seen) == ({30} if compact else {40})
    assert all((rows[name].grad_weight_error or 1) < 1e-5 for name in (*OURS, "spy"))
    assert inputs.description["ignored"] == 10


def test_bench_loss_keeps_to_its_budget() -> None:
    inputs = make_inputs("gaussian", Shape(32, 100, 8))
    settings = Settings(repeats=50, budget_seconds=1e-9)
    rows = named(bench_loss(inputs, choose_methods(["dense"]), settings))
    assert rows["dense"].repeats == rows["one matmul"].repeats == 3


@pytest.mark.interpreter
def test_bench_tiles_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = ({"columns": columns, "dims": 32, "stages": 3} for columns in (128, 256))
    backward = {"pair": 1, "slice_dims": 128, "backward_dims": 32, "backward_stages": 2}
    monkeypatch.setattr("benchmarks.loss.tiles.FORWARD", {4: [small, large, {"columns": 100}]})
    monkeypatch.setattr("benchmarks.loss.tiles.FILTERED", {4: [backward]})
    before = dict(TABLE)
    path = tmp_path / "tiles.csv"
    tiny = ["--shape", "64x300x16", "--device", "cpu", "--dtype", "float32", "--repeats", "3"]
    invoke("tiles", *tiny, "--csv", str(path))
    rows = read_csv(path)
    names = [row["method"].split(":")[0] for row in rows]
    assert names == ["loss"] * 3 + ["exact"] * 3 + ["filtered"]
    assert [row["in table"] for row in rows] == ["table", "", ""] * 2 + ["table"]
    # 100 is no power of two: no kernel has such a tile.
    assert [row["failed"] != "" for row in rows] == [False, False, True] * 2 + [False]
    assert all(float(row["median_ms"]) > 0 for row in rows if not row["failed"])
    assert before == TABLE


def test_bench_tiles_needs_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    got = refuse("tiles", "--shape", "64x300x16", "--device", "cpu", "--dtype", "float64")
    assert "the Triton kernels do not run here" in got


def broken(*given: Any) -> Any:
    raise RuntimeError("no such luck")


def test_bench_profile_command(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    tiny = ["--shape", "64x300x80", "--device", "cpu", "--dtype", "float32", "--repeats", "3"]
    chosen = ["--method", "dense", "--method", "exact", "--extra", "luckless=test_bench:broken"]
    invoke("profile", *tiny, *chosen, "--most", "4", "--csv", str(path))
    rows = read_csv(path)
    of_dense = [row for row in rows if row["method"] == "dense"]
    call, total, *kernels, others = of_dense
    assert (call["kernel"], total["kernel"]) == ("a call", "all of them")
    assert len(kernels) == 4 and others["kernel"].endswith(" others")
    taken = [float(row["kernel_ms"]) for row in kernels]
    assert taken == sorted(taken, reverse=True) and float(call["kernel_ms"]) > 0
    # Rounded to a microsecond each.
    assert abs(sum(taken) + float(others["kernel_ms"]) - float(total["kernel_ms"])) < 4e-3
    # Logits, and a product for each gradient.
    products = [row for row in kernels if row["kernel"] == "aten::mm"]
    assert float(products[0]["calls"]) == 3
    (luckless,) = [row for row in rows if row["method"] == "luckless"]
    assert "no such luck" in luckless["failed"] and luckless["kernel"] == ""


def test_bench_profile_refuses_a_part_that_is_none() -> None:
    assert "part must be among" in refuse("profile", "--device", "cpu", "--part", "all")


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
def test_bench_quantize_command(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "quantize.csv"
    tiny = ["--shape", "64x300x80", "--device", "cpu", "--dtype", "float16", "--repeats", "3"]
    invoke("quantize", *tiny, "--backend", backend, "--csv", str(path))
    rows = {row["method"]: row for row in read_csv(path)}
    names = [
        "copy",
        *(f"{dtype}{more}" for dtype in ("int8", "e4m3") for more in ("", ", with hidden")),
    ]
    assert list(rows) == names
    assert all(float(row["median_ms"]) >= 0 and row["failed"] == "" for row in rows.values())
    assert float(rows["copy"]["of_copy"]) == 1
    # Of 127 steps either way half a one at most; e4m3 has three digits after the first.
    assert 1e-4 < float(rows["int8"]["error"]) < 0.01 < float(rows["e4m3"]["error"]) < 0.03


def test_bench_quantize_counts_what_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_of(variants: Mapping[str, object], *_: object) -> dict[str, list[float]]:
        return {name: [1e-3, 1e-3, 1e-3] for name in variants}

    monkeypatch.setattr("benchmarks.loss.quantize.interleaved_times", times_of)
    inputs = make_inputs("gaussian", Shape(32, 100, 16), dtype=torch.float16)
    rows = {row["method"]: row for row in bench_quantize(inputs, backend="torch")}
    # 1600 numbers: 2 bytes read and 2 or 1 written, and of each row a scale and two sums, of each
    # dim three numbers, and three sums.
    kept = quantize_weight(inputs.weight, inputs.hidden, backend="torch")
    assert rows["copy"]["gb_per_s"] == pytest.approx(6400 / 1e6)
    assert rows["int8"]["gb_per_s"] == pytest.approx((3200 + kept.num_bytes) / 1e6)
    assert 1600 < kept.num_bytes < 1600 + 12 * 100 + 16 * 16 + 16


def test_bench_quantize_says_what_a_device_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize(*given: Any, screen: Screen, **how: Any) -> Any:
        if screen.dtype == "e4m3":
            raise RuntimeError("no such type here")
        return quantize_weight(*given, screen=screen, **how)

    monkeypatch.setattr("benchmarks.loss.quantize.quantize_weight", quantize)
    inputs = make_inputs("gaussian", Shape(32, 100, 16), dtype=torch.float16)
    rows = {row["method"]: row for row in bench_quantize(inputs, repeats=3, backend="torch")}
    assert "no such type here" in rows["e4m3"]["failed"] and rows["e4m3"]["median_ms"] is None
    assert rows["int8"]["median_ms"] > 0 and rows["int8"]["failed"] == ""


def test_bench_quantize_refuses_fp32() -> None:
    got = refuse("quantize", "--shape", "64x300x16", "--device", "cpu", "--dtype", "float32")
    assert "weight is torch.float32" in got


def test_bench_first_call_command(tmp_path: Path) -> None:
    path = tmp_path / "first.csv"
    tiny = ["--shape", "64x300x16", "--device", "cpu", "--dtype", "float32"]
    invoke("first-call", *tiny, "--gradient", "exact", "--csv", str(path))
    rows = read_csv(path)
    assert [row["kernel_cache"] for row in rows] == ["empty", "filled"]
    assert all(row["method"] == "exact" for row in rows)
    assert all(0 <= float(row["seconds_to_loss"]) <= float(row["seconds"]) for row in rows)
    assert "gradient must be one of" in refuse("first-call", *tiny, "--gradient", "approximate")
    assert "dtype must name a torch dtype" in refuse(
        "first-call", "--device", "cpu", "--dtype", "float33"
    )


def test_bench_filter_command(tmp_path: Path) -> None:
    path = tmp_path / "filter.csv"
    arguments = ["--tokens", "64", "--vocab", "500", "--dim", "16"]
    invoke("filter", *arguments, "--share", "1", "--share", "0", "--csv", str(path))
    dense, one, zero = read_csv(path)
    assert dense["keep / uniform mass"] == "dense"
    assert float(one["tail mass"]) > float(zero["tail mass"]) == 0
    assert zero["kept"] == "100.0 %"
    assert all(float(row["median_ms"]) > 0 for row in (dense, one, zero))


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_bench_screen_command(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "screen.csv"
    arguments = ["--tokens", "64", "--vocab", "500", "--dim", "16", "--inputs", "zipf"]
    where = ["--device", "cpu", "--backend", place.backend, "--csv", str(path)]
    if place.interprets:
        where += ["--dtype", "float16"]
    others = ["--outliers", "varying", "--times", "2"]
    invoke("screen", *arguments, *where, "--keep", "0.05", "--max-kept", "1", *others)
    found = read_csv(path)
    kinds = ["zipf", "zipf, outliers varying", "zipf x 2"]
    assert list(dict.fromkeys(row["inputs"] for row in found)) == kinds
    rows = {row["logits"]: row for row in found if row["inputs"] == "zipf"}
    halves = ["dense float16"] if place.interprets else []
    assert list(rows) == [*halves, "dense bfloat16", "full", "int8", "e4m3"]
    assert rows["int8"]["kept"].endswith(" %") and rows["dense bfloat16"]["kept"] == ""
    assert [rows[name]["screened"] for name in ("full", "int8", "e4m3")] == ["no", "yes", "yes"]
    assert float(rows["full"]["lse rms"]) < float(rows["int8"]["lse rms"])
    for name in ("lse rms", "loss rms"):
        assert float(rows["int8"][name]) < float(rows["dense bfloat16"][name])
    assert "outliers must be one of ['alike', 'varying'], got 'all'" in refuse(
        "screen", *arguments, *where, "--outliers", "all"
    )


def test_bench_paper_command(tmp_path: Path) -> None:
    chosen = ["--method", "dense", "--method", "filtered", "--peers", "quack"]
    where = ["--device", "cpu", "--dtype", "float32", "--out", str(tmp_path)]
    invoke("paper", *TINY, "--table", "1", "--table", "A1", *chosen, *where)
    for table, ignored in (("1", "0"), ("A1", "41")):
        name = f"table-{table}-64x500x16-zipf"
        (dense,) = {
            (row["table"], row["ignored"])
            for row in read_csv(tmp_path / f"{name}.csv")
            if row["method"] == "dense"
        }
        assert dense == (table, ignored)
        text = (tmp_path / f"{name}.md").read_text()
        assert f"Table {table}: zipf, N=64 ({ignored} ignored)" in text
        assert "| quack | failed: ModuleNotFoundError" in text
        assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {11}


def test_bench_capture_command(tmp_path: Path) -> None:
    sizes = ["--vocab", "300", "--dim", "16", "--layers", "1", "--megabytes", "0.2"]
    run = ["--batch", "2", "--sequence-length", "16", "--tokens", "32", "--out", str(tmp_path)]
    # A process of its own, since training joins a process group.
    command = [sys.executable, "-m", "cce_dist", "bench", "capture", *sizes, *run]
    done = subprocess.run(
        [*command, "--step", "0", "--step", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    start, trained = (torch.load(tmp_path / f"step-{n}.pt", weights_only=True) for n in (0, 2))
    assert start["hidden"].shape == (32, 16)
    assert start["weight"].shape == (300, 16)
    assert torch.equal(start["targets"], trained["targets"])
    assert not torch.equal(start["weight"], trained["weight"])
    assert [stored["training"]["step"] for stored in (start, trained)] == [0, 2]
    counts = trained["token_counts"]
    assert counts.shape == (300,)
    assert int(counts.sum()) == trained["training"]["text_tokens"]
    made = make_inputs(str(tmp_path / "step-2.pt"), Shape(20, 0, 0), dtype=torch.bfloat16)
    assert made.description["N"] == 20
    assert made.weight.dtype == torch.bfloat16
    assert made.token_counts is not None and torch.equal(made.token_counts, counts)
    assert made.training["batch"] == 2


def test_parse_shape() -> None:
    assert parse_shape("gemma2-2b") == Shape(8192, 256000, 2304)
    assert parse_shape("llama3-8b", 128) == Shape(128, 128256, 4096)
    assert parse_shape("7x11x13") == Shape(7, 11, 13)
    for wrong in ("gemma", "7x11", "0x11x13", "7x11x13x17"):
        with pytest.raises(ValueError, match=rf"shape must be one of .*, got '{wrong}'"):
            parse_shape(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss", "--dtype", "bf17"], "dtype must name a torch dtype, got 'bf17'"),
        (["loss", "--device", "tpux"], "device must name a torch device, got 'tpux'"),
        (["loss", "--shape", "1x2"], "shape must be one of"),
        (
            ["loss", "--inputs", "nonsense"],
            "inputs must be one of ['gaussian', 'zipf',",
        ),
        (["loss", "--inputs", __file__], "inputs must be a file of `cce-dist bench capture`"),
        (["loss", "--method", "fastest"], "got ['fastest']"),
        (["loss", "--peers", "cce,fastest"], "got ['fastest']"),
        (["loss", "--extra", "x=y"], "extra must be NAME=MODULE:FUNCTION, got 'x=y'"),
        (["loss", "--passes", "both"], "passes must be among"),
        (["loss", "--backend", "cuda"], "backend must be one of"),
        (["filter", "--backend", "cuda"], "backend must be one of"),
        (["paper", "--table", "2"], "table must be among ['1', 'A1', 'A2'], got ['2']"),
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


def test_choose_methods() -> None:
    def names(*args: object, **kwargs: object) -> list[str]:
        return [method.name for method in choose_methods(*args, **kwargs)]  # pyright: ignore

    assert names() == ["dense", *OURS, "torch-chunked"]
    assert names(peers="none") == ["dense", *OURS]
    assert {"cce", "liger", "quack", "verl"} < set(names(on_gpu=True))
    assert names(["exact", "cce"]) == ["exact", "cce"]
    assert names(["exact"], "cce,fla") == ["exact", "cce", "fla"]
    assert names(["dense"], extra=["mine=a:b"]) == ["dense", "mine"]


@pytest.mark.parametrize("name", ["torchtune-8", "torchtitan-8", "torch-compile"])
def test_recipes_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    inputs = make_inputs("zipf", Shape(50, 200, 16)).ignoring(0.3)
    (method,) = choose_methods([name])
    function = method.build()
    found = errors(gradients(function, inputs), golden_gradients(inputs))
    assert max(found.values()) < 1e-5
    with torch.no_grad():
        loss = function(inputs.hidden, inputs.weight, inputs.targets)
    torch.testing.assert_close(loss, dense_loss(inputs.hidden, inputs.weight, inputs.targets))


def test_golden_gradients_are_those_of_autograd() -> None:
    inputs = make_inputs("zipf", Shape(130, 300, 8), dtype=torch.float64).ignoring(0.1)
    found = errors(gradients(dense_loss, inputs), golden_gradients(inputs, chunk=64))
    assert max(found.values()) < 1e-12


def test_golden_gradients_of_a_softcap_are_those_of_autograd() -> None:
    inputs = make_inputs("zipf", Shape(130, 300, 8), dtype=torch.float64).ignoring(0.1)
    inputs = replace(inputs, softcap=2.0)
    capped = functools.partial(dense_loss, softcap=2.0)
    found = errors(gradients(capped, inputs), golden_gradients(inputs, chunk=64))
    assert max(found.values()) < 1e-12
    plain = errors(gradients(dense_loss, inputs), golden_gradients(inputs))
    assert min(plain.values()) > 0.01


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
        found[softcap] = mean_tail_mass(inputs, function.options)
        assert found[softcap] == pytest.approx(float(out.tail_mass.mean()))
    assert found[2.0] != pytest.approx(found[None], rel=0.01)


@pytest.mark.parametrize("softcap", ["0", "-1", "inf", "nan"])
def test_bench_refuses_a_softcap(softcap: str) -> None:
    for command in ("loss", "profile"):
        got = refuse(command, "--device", "cpu", "--softcap", softcap)
        assert f"softcap must be positive and finite, got {float(softcap)}" in got


def test_zipf_falls_as_a_trained_model() -> None:
    inputs = make_inputs("zipf", Shape(256, 4096, 256))
    again = make_inputs("zipf", Shape(256, 4096, 256))
    assert torch.equal(inputs.hidden, again.hidden)
    assert torch.equal(inputs.targets, again.targets)
    p = (inputs.hidden @ inputs.weight.T).softmax(-1)
    by_rank = p.sort(descending=True).values.mean(0)
    # 10 candidates, whose probability falls with the square of the rank.
    assert by_rank[0] > 0.4
    assert float(by_rank[0] / by_rank[4]) == pytest.approx(25, rel=0.3)
    assert inputs.targets.min() >= 0
    # Targets are drawn from the softmax.
    assert float(p.gather(1, inputs.targets[:, None]).mean()) == pytest.approx(
        float(p.square().sum(1).mean()), rel=0.15
    )


def test_ignoring() -> None:
    inputs = make_inputs("gaussian", Shape(10, 20, 4))
    some = inputs.ignoring(0.3)
    assert int((some.targets == IGNORE_INDEX).sum()) == 3
    assert len(some.without_ignored().hidden) == some.num_valid == 7
    assert inputs.ignoring(0.0) is inputs
    with pytest.raises(ValueError, match=r"ignored-fraction must lie in \[0, 1\), got 1.0"):
        inputs.ignoring(1.0)


def test_stored_inputs(tmp_path: Path) -> None:
    made = make_inputs("gaussian", Shape(8, 32, 4))
    stored = {"hidden": made.hidden, "weight": made.weight, "targets": made.targets}
    torch.save(stored, tmp_path / "step-5.pt")
    loaded = make_inputs(str(tmp_path / "step-5.pt"), Shape(100, 1, 1))
    assert loaded.kind == "step-5"
    assert torch.equal(loaded.hidden, made.hidden)
    assert bench_filter(loaded, [1.0])[0]["kept"] == "100.0 %"


def test_interleaved_times_drops_what_fails() -> None:
    calls, failures = [], {}

    def fail_second(_: object) -> None:
        calls.append("b")
        if calls.count("b") == 2:
            raise RuntimeError("later")

    variants = {"a": Variant(lambda _: calls.append("a")), "b": Variant(fail_second)}
    timer = Timer(torch.device("cpu"))
    times = interleaved_times(variants, {"a": 3, "b": 3}, timer, failures.__setitem__)
    assert [len(times["a"]), len(times["b"])] == [3, 0]
    turns = "".join(calls)
    assert [sorted(turns[:2]), sorted(turns[2:4]), turns[4:]] == [["a", "b"], ["a", "b"], "aa"]
    assert describe_failure(failures["b"]) == "RuntimeError: later"


def test_interleaved_times_changes_the_order_and_repeats_it() -> None:
    def turns() -> str:
        calls: list[str] = []
        variants = {name: Variant(lambda _, name=name: calls.append(name)) for name in "abc"}
        timer = Timer(torch.device("cpu"))
        interleaved_times(variants, dict.fromkeys("abc", 9), timer, lambda *_: None)
        return "".join(calls)

    found = turns()
    assert found == turns()
    followed = {found[at : at + 2] for at in range(0, len(found), 3)}
    assert len(followed) > 2, f"one order: {found}"


def test_time_limit() -> None:
    with pytest.raises(TimeoutError, match=r"took longer than 0.01 s"), time_limit(0.01):
        while True:
            pass
    with time_limit(0):
        pass


def test_percentiles_ms() -> None:
    found = percentiles_ms([0.001 * i for i in range(1, 12)])
    assert found == pytest.approx({"median_ms": 6, "p10_ms": 2, "p90_ms": 10})
    assert percentiles_ms([0.002]) == {"median_ms": 2, "p10_ms": 2, "p90_ms": 2}


def test_show_leaves_empty_columns_out() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    row = Row(method="a", part="loss", median_ms=1.5)
    show("title", [row.cells, replace(row, method="b", tail_mass=0.1).cells], console)
    text = console.export_text()
    assert "median_ms" in text
    assert "tail_mass" in text
    assert "of_dense" not in text
