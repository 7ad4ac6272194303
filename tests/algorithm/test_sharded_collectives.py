"""Collectives of a call on several ranks: their number and kinds; what is the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import Filter
from cce_dist.testing import (
    CPU_PLACES,
    DTYPES,
    TRITON_CPU,
    Case,
    CollectiveCounter,
    Place,
    check_outputs,
    gaussian_inputs,
    grid,
    join_ranks,
    run_case,
    shared_pool,
    zipf_inputs,
)
from tests.algorithm.sharded_cases import Bounds, run_ranks
from tests.support.loss_cases import MODES, generator


def count_calls(group: dist.ProcessGroup, case: Case) -> Mapping[str, list[tuple[str, int]]]:
    """Collectives of the forward and of the backward, after one call to warm up."""
    run_case(group, case)
    found = {}
    for name, backward in (("forward", False), ("both", True)):
        with CollectiveCounter() as counter:
            run_case(group, replace(case, backward=backward))
        found[name] = counter.calls
    found["backward"] = found["both"][len(found["forward"]) :]
    return found


def split_of(gradient: str, forward: list[str], backward: list[str]) -> tuple[list, list]:
    """in_forward has made the gradients, and reduced them, when the forward ends. It compares the
    sizes of chunks first."""
    if gradient != "in_forward":
        return forward, backward
    return ["all_gather", *forward, *backward], []


def kinds(calls: Sequence[tuple[str, int]]) -> list[str]:
    return [
        "all_gather"
        if "allgather" in name.replace("_", "")
        else "reduce_scatter"
        if "reducescatter" in name.replace("_", "")
        else "all_reduce"
        if "allreduce" in name.replace("_", "")
        else name
        for name, _ in calls
    ]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"label_smoothing": 0.1, "z_loss": 0.1}, id="smoothing"),
        pytest.param(
            {"stats": ("lse", "entropy", "sum_p2", "correct", "logit_moments")}, id="stats"
        ),
        pytest.param({"gradient": "exact"}, id="exact"),
        pytest.param({"gradient": "in_forward"}, id="in_forward"),
        pytest.param({"filter": Filter(keep=0.1)}, id="filter"),
        pytest.param({"softcap": 2.0}, id="softcap"),
    ],
)
def test_linear_cross_entropy_talks_once_each_way(options: dict[str, Any]) -> None:
    inputs = zipf_inputs(60, 600, 13, generator=generator())
    forward, backward = split_of(
        options.get("gradient", ""), ["all_gather", "all_gather"], ["all_reduce"]
    )
    for found in shared_pool().run(3, count_calls, Case(inputs, options)):
        assert kinds(found["forward"]) == forward
        assert kinds(found["backward"]) == backward
        # Over gloo the sizes go ahead.
        sizes, *of_chunks, merged, summed = (number for _, number in found["both"])
        assert sizes == 3 * 5 and of_chunks in ([], [3])
        # Three numbers a token and rank, a few more with statistics, and a header of eight; never a
        # logit.
        more = 7 if "stats" in options else int("label_smoothing" in options)
        assert merged == 3 * (8 + 60 * (3 + more))
        assert summed == 60 * 13


def message_of_other_chunks(group: dist.ProcessGroup, case: Case) -> str:
    """Each rank bounds its workspace in its own way, so that the ranks' chunks differ."""
    options = {**case.options, "workspace_bytes": 2 ** (16 + 14 * group.rank())}
    try:
        run_case(group, replace(case, options=options))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_ranks_with_other_chunks_are_refused(backend: str) -> None:
    inputs = zipf_inputs(600, 600, 13, generator=generator())
    options = {"gradient": "in_forward", "filter": Filter(keep=0), "backend": backend}
    for message in shared_pool().run(2, message_of_other_chunks, Case(inputs, options)):
        assert "needs one workspace_bytes on all ranks" in message
        assert " by rank: [128, " in message


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_talks_once_each_way_sequence_parallel(gradient: str) -> None:
    inputs = zipf_inputs(60, 600, 13, generator=generator())
    options = {"gradient": gradient, "sequence_parallel": True}
    for found in shared_pool().run(3, count_calls, Case(inputs, options)):
        if gradient == "in_forward":
            assert kinds(found["forward"]) == [*["all_gather"] * 4, "reduce_scatter"]
            assert kinds(found["backward"]) == []
            continue
        assert kinds(found["forward"]) == ["all_gather"] * 3
        backward = [kind for kind in kinds(found["backward"]) if kind != "all_gather"]
        assert backward == ["reduce_scatter"]  # hidden may be gathered again: it is not saved


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums_of_16_bit_gradients_are_rounded_before_they_are_gathered(dtype: str) -> None:
    for num_tokens, kind in ((60, ["reduce_scatter", "all_gather"]), (61, ["all_reduce"])):
        inputs = zipf_inputs(num_tokens, 600, 13, generator=generator(), dtype=DTYPES[dtype])
        for found in shared_pool().run(3, count_calls, Case(inputs, {"gradient": "exact"})):
            assert kinds(found["backward"]) == kind
            # Each number once in fp32, and each sum once more.
            assert [size for _, size in found["backward"]] == [num_tokens * 13] * len(kind)


def test_linear_cross_entropy_frozen_hidden_reduces_nothing() -> None:
    inputs = gaussian_inputs(60, 600, 13, generator=generator())
    for found in shared_pool().run(3, count_calls, Case(inputs, trainable=("weight",))):
        assert kinds(found["backward"]) == []


def test_linear_cross_entropy_group_of_one_does_not_need_the_others() -> None:
    # group=None is one rank even where torch.distributed is initialised.
    inputs = gaussian_inputs(30, 600, 13, generator=generator(), dtype=torch.float64)
    case = Case(inputs)
    for outputs in shared_pool().run(4, alone_if_first, case):
        if outputs is not None:
            check_outputs(case, outputs)


def alone_if_first(group: dist.ProcessGroup, case: Case) -> Any:
    return run_case(None, case) if dist.get_rank(group) == 0 else None


@pytest.mark.parametrize(
    **grid(
        places=CPU_PLACES,
        sequence_parallel={"": False, "sequence_parallel": True},
        gradient=MODES,
        dtype=("bf16", "fp16"),
    )
)
def test_linear_cross_entropy_on_a_group_is_deterministic(
    place: Place, sequence_parallel: bool, gradient: str, dtype: str
) -> None:
    num_classes = 800 if place.interprets else 2400
    inputs = zipf_inputs(132, num_classes, 13, generator=generator(), dtype=DTYPES[dtype])
    stats = ("lse", "entropy", "tail_mass")
    options = {"gradient": gradient, "stats": stats, "sequence_parallel": sequence_parallel}
    case = Case(inputs, options).at(place)
    first, second = run_ranks(case, 4), run_ranks(case, 4)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.interpreter
@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_talks_once_each_way_by_triton(gradient: str) -> None:
    inputs = zipf_inputs(60, 600, 13, generator=generator())
    case = Case(inputs.ignoring(generator(), 0.3), {"gradient": gradient}).at(TRITON_CPU)
    forward, backward = split_of(gradient, ["all_gather", "all_gather"], ["all_reduce"])
    for found in shared_pool().run(3, count_calls, case):
        assert kinds(found["forward"]) == forward
        assert kinds(found["backward"]) == backward


def count_kept(group: dist.ProcessGroup | None, case: Case) -> tuple[dict[str, Tensor], int]:
    """The outputs, and how many pairs of a column and a block this rank has kept."""
    from cce_dist.backends.triton import stats as triton_stats

    counts: list[int] = []
    made = triton_stats.marks_of

    def counted(*args: Any, **options: Any) -> Any:
        marks = made(*args, **options)
        counts.append(sum(word.bit_count() for word in marks.kept.flatten().tolist()))
        return marks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_stats, "marks_of", counted)
        outputs = run_case(group, case)
    return outputs, sum(counts)


def rare_tokens_on_the_second_rank(num_classes: int = 1536) -> Case:
    """A third of the vocabulary, of a thousandth of each token's mass, and no target."""
    inputs = gaussian_inputs(256, num_classes, 16, generator=generator())
    bias = torch.zeros(num_classes)
    bias[2 * num_classes // 3 :] = -6
    inputs = replace(inputs, bias=bias, targets=inputs.targets % (2 * num_classes // 3))
    return Case(inputs, {"filter": Filter(keep=0.05), "stats": ("lse", "tail_mass")})


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "bounds", [((0, 1024), (1024, 1536)), ((0, 1024), (1024, 1024), (1024, 1536))]
)
def test_a_rank_of_rare_tokens_keeps_what_one_rank_keeps_there(bounds: Bounds) -> None:
    case = rare_tokens_on_the_second_rank()
    found = shared_pool().run(len(bounds), count_kept, replace(case, bounds=bounds).at(TRITON_CPU))
    joined = join_ranks(replace(case, bounds=bounds), [outputs for outputs, _ in found])
    check_outputs(
        case.at(TRITON_CPU), joined, but=("grad_hidden", "grad_weight", "grad_bias", "tail_mass")
    )
    # By their true mass none of their 512 columns reaches the threshold in either block; by their
    # own lse all would. One tile comes before the first exchange.
    assert found[0][1] > 0
    assert found[-1][1] <= 2 * 128


@pytest.mark.interpreter
def test_ranks_that_filter_by_triton_exchange_a_bound_four_times() -> None:
    case = replace(rare_tokens_on_the_second_rank(), options={"filter": Filter(keep=0.05)})
    for found in shared_pool().run(2, count_calls, case.at(TRITON_CPU)):
        # And the sizes, and the merge.
        assert kinds(found["forward"]) == ["all_gather"] * 6
        assert [size for _, size in found["forward"][1:5]] == [2 * 256] * 4
