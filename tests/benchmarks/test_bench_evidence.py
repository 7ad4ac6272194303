"""`cce-dist bench fidelity`: what it measures is right, and is recorded."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.cli.converge import parse_power
from benchmarks.evidence.records import Record, read_record
from benchmarks.fidelity.candidates import (
    METHODS,
    Candidate,
    candidates_of,
    choose_names,
    default_keep,
)
from benchmarks.fidelity.fidelity import Row, bench_fidelity
from benchmarks.fidelity.tenths import compare, compare_groups, groups_of, products_by_row
from cce_dist import Filter, LinearCrossEntropy
from cce_dist.bench.golden import dense_loss, golden_gradients, gradients
from cce_dist.bench.inputs import BenchInputs, Shape, make_inputs
from cce_dist.bench.methods import METHODS as REGISTRY
from cce_dist.bench.methods import Method
from tests.benchmarks.bench_cases import invoke, refuse

V = 400


def skewed(num_tokens: int = 300) -> BenchInputs:
    """Ids whose counts fall, the last 20 of them never seen."""
    inputs = make_inputs("zipf", Shape(num_tokens, V, 16))
    counts = 4000 // torch.arange(1, V + 1)
    counts[-20:] = 0
    return replace(inputs, kind="step-7", token_counts=counts)


def capture(path: Path, inputs: BenchInputs, **training: float) -> str:
    stored = {name: getattr(inputs, name) for name in ("hidden", "weight", "targets")}
    if inputs.token_counts is not None:
        stored |= {"token_counts": inputs.token_counts, "training": training}
    torch.save(stored, path)
    return str(path)


def of(rows: list[Row], method: str, group: str = "all") -> list[Row]:
    return [row for row in rows if (row["method"], row["group"]) == (method, group)]


def test_groups_are_tenths_of_the_text() -> None:
    inputs = skewed()
    assert inputs.token_counts is not None
    of_all, *tenths = groups_of(inputs, tenths=True)
    (*tenths, never), by_ids = tenths[:-10], tenths[-10:]
    assert [of_all.name, never.name] == ["all", "never"]
    assert [group.name for group in tenths] == [str(number) for number in range(1, 11)]
    assert never.times == (0, 0) and int(never.ids.sum()) == 20
    ids = torch.stack([group.ids for group in (*tenths, never)])
    assert ids.sum(0).eq(1).all() and of_all.ids.all()
    counts = inputs.token_counts
    shares = [float(counts[group.ids].sum() / counts.sum()) for group in tenths]
    # The most frequent id alone is more than a tenth.
    assert all(0.05 < share < 0.16 for share in shares)
    for before, after in pairwise(tenths):
        assert before.times[0] >= after.times[1]
    for group in (*tenths, *by_ids):
        assert torch.equal(group.tokens, group.ids[inputs.targets])
    assert [group.name for group in by_ids] == [f"ids {number}" for number in range(1, 11)]
    ids = torch.stack([group.ids for group in by_ids])
    assert ids.sum(0).eq(1).all() and int(ids.sum(1).max() - ids.sum(1).min()) <= 1
    for before, after in pairwise(by_ids):
        assert before.times and after.times and before.times[0] >= after.times[1]
    assert [group.name for group in groups_of(inputs, tenths=False)] == ["all"]


def test_compare_groups_by_hand() -> None:
    inputs = skewed(40)
    groups = groups_of(inputs, tenths=True)
    golden = golden_gradients(inputs)
    rounded = gradients(dense_loss, replace(inputs, hidden=inputs.hidden.bfloat16().float()))
    compared = compare_groups(rounded, golden, groups)
    for group in groups:
        for name, rows in (("hidden", group.tokens), ("weight", group.ids)):
            ours, right = (getattr(x, name)[rows].double() for x in (rounded, golden))
            if not rows.any():
                assert compared[group.name][f"grad_{name}_error"] is None
                continue
            error, norm = (ours - right).norm() / right.norm(), ours.norm() / right.norm()
            cosine = torch.cosine_similarity(ours.flatten(), right.flatten(), 0)
            expected = {"error": error, "norm_ratio": norm, "cosine_distance": 1 - cosine}
            for key, value in expected.items():
                got = compared[group.name][f"grad_{name}_{key}"]
                assert got == pytest.approx(float(value), rel=1e-6, abs=1e-12)
        rows = group.ids
        by_row = (rounded.weight - golden.weight)[rows].norm(dim=1) / golden.weight[rows].norm(
            dim=1
        )
        got = compared[group.name]["grad_weight_update_error"]
        assert got == pytest.approx(float(by_row.square().mean().sqrt()), rel=1e-5)
    starved = compare(products_by_row(torch.zeros(3, 2), torch.ones(3, 2)).sum(0))
    assert starved == {"error": 1.0, "cosine_distance": None, "norm_ratio": 0.0}


def test_bench_fidelity_says_where_logits_were_screened() -> None:
    made = skewed()
    inputs = replace(made, hidden=made.hidden.bfloat16(), weight=made.weight.bfloat16())
    candidates = candidates_of(["filtered", "screened"], inputs, [1.0], "torch")
    rows = bench_fidelity(inputs, candidates, tenths=False, repeats=1)
    default, listed = of(rows, "screened")
    # A vocabulary as small keeps every column by itself.
    assert default["screened"] is False and listed["screened"] is True
    _, full = of(rows, "filtered")
    assert full["screened"] is None
    assert 0 < listed["grad_weight_error"] < 1.1 * full["grad_weight_error"]


def test_bench_fidelity_rows() -> None:
    inputs = skewed()
    keep = 128 / V
    chosen = choose_names((), with_apple=True)
    assert chosen == list(METHODS)
    candidates = candidates_of(chosen, inputs, [keep], "torch")
    rows = bench_fidelity(inputs, candidates, repeats=3)
    tenths = {name for n in range(1, 11) for name in (str(n), f"ids {n}")}
    assert {row["group"] for row in rows} == {"all", "never", *tenths}
    for method in ("dense", "exact", "in_forward"):
        (row,) = of(rows, method)
        assert row["grad_weight_error"] < 1e-5
        assert row["kept"] is None and not {"threshold", "by"} & row.keys()
    default, listed = of(rows, "filtered")
    # A vocabulary as small keeps every column.
    expected = {"threshold": 0.0, "default": True, "kept": 1.0, "tail_mass": 0.0}
    assert expected.items() <= default.items()
    assert (listed["threshold"], listed["default"], listed["by"]) == (keep, None, "mass")
    assert 0 < listed["kept"] < 1 and listed["tail_mass"] > 0 and listed["median_ms"] > 0
    (_, without) = of(rows, "no-tail")
    assert without["kept"] == listed["kept"]
    errors = [row["grad_weight_error"] for row in (without, listed, default)]
    assert errors == sorted(set(errors), reverse=True)
    # Dropped columns were pushed down by less than they should be: rare ones above all.
    (_, rare), (_, right) = of(rows, "no-tail", "10"), of(rows, "filtered", "10")
    assert rare["grad_weight_norm_ratio"] < right["grad_weight_norm_ratio"]
    # A refusal is one row for all thresholds.
    (screened,) = of(rows, "screened")
    assert 'logits="screened" cannot run here: hidden is torch.float32' in screened["failed"]
    assert not {"median_ms", "grad_hidden_error"} & screened.keys()
    # Without the peer's folder.
    for name in ("cce", "cce-kahan-full-c"):
        (absent,) = of(rows, name)
        assert absent["failed"] == "ModuleNotFoundError: No module named 'cut_cross_entropy'"
    of_all, *groups = [row for row in rows if row["method"] == "float64"]
    assert of_all["num_tokens"] == len(inputs.hidden) and of_all["num_ids"] == V
    # Tenths of the text, and of the ids.
    for each in (groups[:-10], groups[-10:]):
        assert sum(row["num_tokens"] for row in each) == of_all["num_tokens"]
        for name in ("grad_hidden_share", "grad_weight_share"):
            assert sum(row[name] for row in each) == pytest.approx(1)


def test_bench_fidelity_of_methods_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense loss stands in for Apple's; its second preset fails while times are taken."""
    calls = []

    def second(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(hidden))
        if len(calls) > 5:
            raise RuntimeError("no room")
        return dense_loss(hidden, weight, targets)

    for name, loss in (("cce", dense_loss), ("cce-kahan-full-c", second)):
        stand_in = Method(name, "peer", lambda setup, loss=loss: loss)
        monkeypatch.setitem(REGISTRY, name, stand_in)
    inputs = skewed(150)
    names = ["screened", "cce", "cce-kahan-full-c"]
    candidates = candidates_of(names, inputs, [0.25], "torch")
    lost = {each.name: "was lost" for each in candidates if each.method == "screened"}
    rows = bench_fidelity(inputs, candidates, repeats=3, tenths=False, failed=lost)
    assert [row["failed"] for row in of(rows, "screened")] == ["was lost"]
    ((apple,), (kahan,)) = (of(rows, name) for name in names[1:])
    assert apple["median_ms"] > 0 and not {"threshold", "failed"} & apple.keys()
    assert kahan["failed"] == "RuntimeError: no room" and "grad_weight_error" not in kahan


def test_a_failure_of_ours_is_raised() -> None:
    def broken(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"):
        bench_fidelity(skewed(20), [Candidate("exact", lambda: broken)], tenths=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_keep_is_what_the_loss_takes(dtype: torch.dtype) -> None:
    inputs = make_inputs("gaussian", Shape(200, 5000, 8), dtype=dtype)
    keep = default_keep(inputs, "torch")
    grads = []
    for filter in (Filter(), Filter(keep=keep)):
        loss = LinearCrossEntropy(filter=filter, backend="torch")
        grads.append(gradients(loss, inputs).weight)
    assert torch.equal(*grads)


def test_bench_fidelity_command(tmp_path: Path) -> None:
    inputs = skewed(140)
    training = {"seed": 3, "layers": 2, "lr": 0.5}
    files = []
    for step in (0, 7):
        path = tmp_path / f"step-{step}.pt"
        files += ["--inputs", capture(path, inputs, step=step, **training)]
    path = tmp_path / "records" / "fidelity-tiny.json"
    some = ["--method", "dense", "--method", "filtered", "--keep", "2^-1.5", "--repeats", "3"]
    output = invoke("fidelity", *files, *some, "--dtype", "float32", "--record", str(path))
    assert "filtered at 0.353553: grad_hidden" in output
    record = read_record(path)
    assert (record.kind, record.seeds, record.settings["layers"]) == ("fidelity", (3,), 2)
    assert (record.settings["V"], record.settings["D"], record.settings["N"]) == (V, 16, 140)
    assert record.command.startswith("cce-dist")
    assert columns(record, "step", "inputs") == {(0, "step-0"), (7, "step-7")}
    assert columns(record, "method", "threshold") == {
        ("float64", None),
        ("dense", None),
        ("filtered", 0.0),
        ("filtered", 0.353553),
    }


def columns(record: Record, *names: str) -> set[tuple[object, ...]]:
    return {tuple(row.get(name) for name in names) for row in record.rows}


def test_bench_fidelity_refuses(tmp_path: Path) -> None:
    inputs = skewed(40)
    new = capture(tmp_path / "step-7.pt", inputs, step=7, seed=0)
    other = capture(tmp_path / "step-8.pt", inputs, step=8, seed=0, layers=3)
    old = capture(tmp_path / "step-9.pt", replace(inputs, token_counts=None))
    few = ["--method", "dense", "--dtype", "float32", "--repeats", "3"]
    got = refuse("fidelity", "--inputs", old, *few)
    assert "inputs step-9 must have token_counts for the tenths by frequency, found none" in got
    assert "dense" in invoke("fidelity", "--inputs", old, *few, "--no-tenths")
    path = str(tmp_path / "two.json")
    got = refuse("fidelity", "--inputs", new, "--inputs", other, *few, "--record", path)
    assert "rows added to two must be of the same machine, commit and settings" in got
    for arguments, message in (
        (["fidelity", "--inputs", new, "--method", "fastest"], "method must be among ['dense',"),
        (["fidelity", "--inputs", new, "--keep", "2^x"], "keep must be a number above 0 such as"),
        (["fidelity", "--inputs", new, "--record", "x.csv"], "record must be the path of a .json"),
        (["fidelity", "--inputs", new, "--record", "a b.json"], "with a name of lower-case words"),
        (["fidelity", "--inputs", "zip"], "inputs must be one of"),
        (["fidelity", "--inputs", "zipf"], "inputs must be a file of"),
    ):
        assert message in refuse(*arguments)
    wrong = replace(inputs, token_counts=torch.ones(3))
    with pytest.raises(ValueError, match=r"token_counts of inputs step-7 must have shape \[V\]"):
        groups_of(wrong, tenths=True)


def test_parse_power() -> None:
    assert parse_power("keep", "2^-9.5") == 2**-9.5
    assert parse_power("eps", "1e-3") == 1e-3
    for text in ("0", "-1", "nan", "2^", "2^9999", "x"):
        with pytest.raises(ValueError, match="eps must be a number above 0"):
            parse_power("eps", text)
