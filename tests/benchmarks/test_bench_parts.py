"""Parts of the benchmarks: methods, golden gradients, inputs and times."""

from __future__ import annotations

import functools
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.fidelity.candidates import shares_kept
from cce_dist.bench.golden import dense_loss, errors, golden_gradients, gradients
from cce_dist.bench.inputs import IGNORE_INDEX, Shape, make_inputs, parse_shape
from cce_dist.bench.machine import Timer, Variant, interleaved_times
from cce_dist.bench.methods import choose_methods, describe_failure, time_limit
from cce_dist.bench.rank_methods import Setup
from cce_dist.bench.report import percentiles_ms, show
from tests.benchmarks.bench_cases import OURS


def test_parse_shape() -> None:
    assert parse_shape("gemma2-2b") == Shape(8192, 256000, 2304)
    assert parse_shape("llama3-8b", 128) == Shape(128, 128256, 4096)
    assert parse_shape("7x11x13") == Shape(7, 11, 13)
    for wrong in ("gemma", "7x11", "0x11x13", "7x11x13x17"):
        with pytest.raises(ValueError, match=rf"shape must be one of .*, got '{wrong}'"):
            parse_shape(wrong)


def test_choose_methods() -> None:
    def names(*args: object, **kwargs: object) -> list[str]:
        return [method.name for method in choose_methods(*args, **kwargs)]  # pyright: ignore

    assert names() == ["dense", *OURS, "torch-chunked"]
    assert names(peer_names="none") == ["dense", *OURS]
    assert {"cce", "liger", "quack", "verl"} < set(names(on_gpu=True))
    assert names(["exact", "cce"]) == ["exact", "cce"]
    assert names(["exact"], "cce,fla") == ["exact", "cce", "fla"]
    assert names(["dense"], extra=["mine=a:b"]) == ["dense", "mine"]


@pytest.mark.parametrize("name", ["torchtune-8", "torchtitan-8", "torch-compile"])
def test_recipes_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    inputs = make_inputs("zipf", Shape(50, 200, 16)).ignoring(0.3)
    (method,) = choose_methods([name])
    function = method.build(Setup())
    found = errors(gradients(function, inputs), golden_gradients(inputs))
    assert max(found.values()) < 1e-5
    with torch.no_grad():
        loss = function(inputs.hidden, inputs.weight, inputs.targets)
    torch.testing.assert_close(loss, dense_loss(inputs.hidden, inputs.weight, inputs.targets))


def test_golden_gradients_are_those_of_autograd() -> None:
    inputs = make_inputs("zipf", Shape(130, 300, 8), dtype=torch.float64).ignoring(0.1)
    found = errors(gradients(dense_loss, inputs), golden_gradients(inputs, chunk=64))
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"entropy_bonus": 0.3}, {"softcap": 2.0, "entropy_bonus": 0.3}],
    ids=["softcap", "entropy", "both"],
)
def test_golden_gradients_of_options_are_those_of_autograd(options: dict[str, float]) -> None:
    inputs = make_inputs("zipf", Shape(130, 300, 8), dtype=torch.float64).ignoring(0.1)
    inputs = replace(inputs, **options)
    recipe = functools.partial(dense_loss, **options)
    found = errors(gradients(recipe, inputs), golden_gradients(inputs, chunk=64))
    assert max(found.values()) < 1e-12
    plain = errors(gradients(dense_loss, inputs), golden_gradients(inputs))
    assert min(plain.values()) > 0.01


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
    assert shares_kept(loaded, [0.0]) == [1.0]


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
    percentiles = percentiles_ms([0.001 * i for i in range(1, 12)])
    assert percentiles == pytest.approx({"median_ms": 6, "p10_ms": 2, "p90_ms": 10})
    assert percentiles_ms([0.002]) == {"median_ms": 2, "p10_ms": 2, "p90_ms": 2}


def test_show_leaves_empty_columns_out() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    row = {"method": "a", "median_ms": 1.5, "of_dense": None, "tail_mass": None, "failed": ""}
    show("title", [row, {**row, "method": "b", "tail_mass": 0.1}], console)
    text = console.export_text()
    assert "median_ms" in text
    assert "tail_mass" in text
    assert "of_dense" not in text
