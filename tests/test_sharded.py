"""linear_cross_entropy on groups of 1 to 4 ranks, against the same golden as on one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cce_dist import Filter, LinearCrossEntropy, VocabShard, linear_cross_entropy
from cce_dist.testing import (
    CPU_PLACES,
    DTYPES,
    TRITON_CPU,
    Case,
    CollectiveCounter,
    Place,
    check_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    join_ranks,
    large_logit_inputs,
    run_case,
    shared_pool,
    zipf_inputs,
)

MODES = ("filtered", "exact", "in_forward")
WORLD_SIZES = (1, 2, 3, 4)
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments")
Bounds = tuple[tuple[int, int], ...]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def run_ranks(case: Case, world_size: int, *, first_rank: int = 0) -> dict[str, Tensor]:
    """One whole result; asserts that what all ranks return is bitwise equal on all of them."""
    results = shared_pool().run(world_size, run_case, case, first_rank=first_rank)
    return join_ranks(case, results)


def bounds_of(shards: Sequence[VocabShard]) -> Bounds:
    return tuple((shard.start, shard.stop) for shard in shards)


# -- every option on every group ----------------------------------------------------------------

OPTIONS: dict[str, tuple[tuple[str, ...], int | None, dict[str, Any]]] = {
    "plain": ((), None, {}),
    "bias": (("bias",), None, {}),
    "softcap": ((), None, {"softcap": 1.5}),
    "logit_scale": ((), None, {"logit_scale": -1.7}),
    "label_smoothing": ((), None, {"label_smoothing": 0.2}),
    "z_loss": ((), None, {"z_loss": 0.1}),
    "token_weight": (("token_weight",), None, {}),
    "class_weight": (("class_weight",), None, {}),
    "class_weight_smoothing": (("class_weight",), -100, {"label_smoothing": 0.2}),
    "ignored": ((), -100, {}),
    "ignore_index_in_vocabulary": ((), 0, {"ignore_index": 0}),
    "shift": (("token_weight",), -100, {"shift": 2}),
    "sum": ((), -100, {"reduction": "sum"}),
    "none": ((), -100, {"reduction": "none"}),
    "stats": ((), -100, {"stats": EVERY_STAT}),
    "everything": (
        ("bias", "token_weight", "class_weight"),
        -100,
        {
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "logit_scale": 0.7,
            "shift": 1,
            "stats": EVERY_STAT,
            "workspace_bytes": 2**16,
        },
    ),
}


RANKS = {f"{size}_ranks": size for size in WORLD_SIZES}


def not_refused(row: dict[str, Any]) -> bool:
    return not (row["gradient"] == "in_forward" and row["option"] == "none")


@pytest.mark.parametrize(
    **grid(
        places=CPU_PLACES,
        option=tuple(OPTIONS),
        gradient=MODES,
        world_size=RANKS,
        allowed=not_refused,
    )
)
def test_linear_cross_entropy_each_option_on_a_group(
    place: Place, option: str, gradient: str, world_size: int
) -> None:
    tensors, ignore, options = OPTIONS[option]
    # 600 rows: 1, 2, 3 and 4 ranks hold as many each; 140 tokens: a ragged second block.
    inputs = gaussian_inputs((4, 35), 600, 13, generator=generator(), dtype=place.widest)
    inputs = inputs.with_options(generator(), *tensors)
    if ignore is not None:
        inputs = inputs.ignoring(generator(), 0.3, ignore)
    case = Case(inputs, {**options, "gradient": gradient}).at(place)
    check_outputs(case, run_ranks(case, world_size))


@pytest.mark.parametrize(
    **grid(places=CPU_PLACES, gradient=MODES, dtype=("bf16", "fp16", "fp32"), world_size=RANKS)
)
def test_linear_cross_entropy_each_dtype_on_a_group(
    place: Place, gradient: str, dtype: str, world_size: int
) -> None:
    # Shards of one tile and a part: 12300 columns in all, 3075 to a rank of four. Triton's tiles
    # have 256 at most.
    num_classes = 1500 if place.interprets else 12_300
    inputs = zipf_inputs(129, num_classes, 40, generator=generator(), dtype=DTYPES[dtype])
    options = {"gradient": gradient, "stats": ("lse",)}
    if gradient == "filtered":  # the default's own error is test_loss_filter's matter
        options["filter"] = Filter(keep=1e-7)
    case = Case(inputs.with_options(generator(), "bias"), options).at(place)
    check_outputs(case, run_ranks(case, world_size))


@pytest.mark.parametrize(
    **grid(places=CPU_PLACES, frozen=("hidden", "weight", "nothing"), gradient=MODES)
)
def test_linear_cross_entropy_frozen_input_on_a_group(
    place: Place, frozen: str, gradient: str
) -> None:
    inputs = gaussian_inputs(30, 600, 13, generator=generator(), dtype=place.widest)
    trainable = tuple(name for name in ("hidden", "weight") if name != frozen)
    case = Case(inputs, {"gradient": gradient}, trainable=trainable).at(place)
    check_outputs(case, run_ranks(case, 3))


@pytest.mark.parametrize(
    **grid(places=CPU_PLACES, name=("lse", "entropy"), gradient=("filtered", "exact"))
)
def test_linear_cross_entropy_upstream_of_stats_on_a_group(
    place: Place, name: str, gradient: str
) -> None:
    inputs = gaussian_inputs(30, 600, 13, generator=generator(), dtype=place.widest)
    inputs = inputs.ignoring(generator(), 0.3)
    ramp = torch.linspace(-1, 1, 30, dtype=torch.float64)
    options = {"gradient": gradient, "stats": (name,)}
    case = Case(inputs, options, upstream={"loss": 0.4, name: ramp}).at(place)
    check_outputs(case, run_ranks(case, 3))


@pytest.mark.parametrize(**grid(places=CPU_PLACES, gradient=MODES))
def test_linear_cross_entropy_grad_weight_into_on_a_group(place: Place, gradient: str) -> None:
    inputs = gaussian_inputs(30, 600, 13, generator=generator(), dtype=place.widest)
    case = Case(inputs, {"gradient": gradient}, main_grad=True, vocab_size=597).at(place)
    inputs = replace(inputs, targets=inputs.targets % 597)
    case = replace(case, inputs=inputs)
    check_outputs(case, run_ranks(case, 4))


# -- who owns what ------------------------------------------------------------------------------

SHARDS: dict[str, tuple[Bounds, int]] = {
    # (bounds of each rank, vocab_size)
    "chunked_2": (bounds_of([VocabShard.chunked(601, r, 2) for r in range(2)]), 601),
    "chunked_3": (bounds_of([VocabShard.chunked(601, r, 3) for r in range(3)]), 601),
    "chunked_4": (bounds_of([VocabShard.chunked(601, r, 4) for r in range(4)]), 601),
    "balanced_3": (bounds_of([VocabShard.balanced(601, r, 3) for r in range(3)]), 601),
    "balanced_4": (bounds_of([VocabShard.balanced(602, r, 4) for r in range(4)]), 602),
    "last_rank_empty": (bounds_of([VocabShard.chunked(9, r, 4) for r in range(4)]), 9),
    "two_ranks_empty": (bounds_of([VocabShard.chunked(2, r, 4) for r in range(4)]), 2),
    "first_rank_empty": (((0, 0), (0, 300), (300, 601)), 601),
    "middle_rank_empty": (((0, 300), (300, 300), (300, 601)), 601),
    "all_on_one_rank": (((0, 0), (0, 601), (601, 601)), 601),
    "very_uneven": (((0, 3), (3, 4500), (4500, 4501), (4501, 4502)), 4502),
    "padded_1": (((0, 640),), 601),
    "padded_4": (bounds_of([VocabShard.even(160, r, 4) for r in range(4)]), 601),
    "rank_with_only_padding": (bounds_of([VocabShard.even(160, r, 4) for r in range(4)]), 479),
    "two_ranks_with_only_padding": (
        bounds_of([VocabShard.even(160, r, 4) for r in range(4)]),
        200,
    ),
    "reversed": (((300, 601), (0, 300)), 601),
}


@pytest.mark.parametrize(**grid(places=CPU_PLACES, shards=tuple(SHARDS), gradient=MODES))
def test_linear_cross_entropy_shards(place: Place, shards: str, gradient: str) -> None:
    bounds, vocab_size = SHARDS[shards]
    if shards == "very_uneven" and place.interprets:
        bounds, vocab_size = ((0, 3), (3, 700), (700, 701), (701, 702)), 702
    num_rows = max(stop for _, stop in bounds)
    inputs = gaussian_inputs(140, num_rows, 13, generator=generator(), dtype=place.widest)
    inputs = inputs.with_options(generator(), "bias")
    class_weight = torch.rand(vocab_size, generator=generator()) + 0.5
    # Targets on both edges of every shard, then anywhere.
    edges = sorted({edge for start, stop in bounds for edge in (start, stop - 1, stop)})
    edges = [edge for edge in edges if 0 <= edge < vocab_size]
    targets = inputs.targets % vocab_size
    targets[: len(edges)] = torch.tensor(edges)
    inputs = replace(inputs, targets=targets, class_weight=class_weight)
    options = {"gradient": gradient, "label_smoothing": 0.1, "stats": EVERY_STAT}
    case = Case(inputs, options, bounds=bounds, vocab_size=vocab_size).at(place)
    if shards == "reversed":  # rank order is not id order: join by id
        results = shared_pool().run(2, run_case, case)
        joined = join_ranks(case, results)
        for name in ("grad_weight", "grad_bias"):
            joined[name] = torch.cat([results[1][name], results[0][name]])
    else:
        joined = run_ranks(case, len(bounds))
    check_outputs(case, joined)
    assert not joined["grad_weight"][vocab_size:].any()
    assert not joined["grad_bias"][vocab_size:].any()


@pytest.mark.parametrize(**grid(places=CPU_PLACES, gradient=MODES))
def test_linear_cross_entropy_chunks_of_tokens_on_uneven_shards(
    place: Place, gradient: str
) -> None:
    # Nine blocks of tokens: ranks must agree on the chunks whose statistics they merge, though
    # one holds 100 columns and the other 1900.
    stop = 300 if place.interprets else 2000
    inputs = gaussian_inputs(1100, stop, 7, generator=generator(), dtype=place.widest)
    options = {"gradient": gradient, "stats": ("lse",), "workspace_bytes": 2**20}
    case = Case(inputs, options, bounds=((0, 100), (100, stop)), vocab_size=stop).at(place)
    check_outputs(case, run_ranks(case, 2))


@pytest.mark.parametrize(**grid(places=CPU_PLACES, owner=(0, 1, 2), gradient=MODES))
def test_linear_cross_entropy_all_targets_on_one_rank(
    place: Place, owner: int, gradient: str
) -> None:
    inputs = gaussian_inputs(140, 600, 13, generator=generator(), dtype=place.widest)
    inputs = replace(inputs, targets=inputs.targets % 200 + 200 * owner)
    case = Case(inputs, {"gradient": gradient, "stats": ("lse", "correct")}).at(place)
    check_outputs(case, run_ranks(case, 3))


@pytest.mark.parametrize(**grid(places=CPU_PLACES, masked=(0, 1, 2), gradient=MODES))
def test_linear_cross_entropy_minus_inf_bias_over_a_shard(
    place: Place, masked: int, gradient: str
) -> None:
    inputs = gaussian_inputs(140, 600, 13, generator=generator(), dtype=place.widest)
    bias = torch.zeros(600, dtype=place.widest)
    bias[200 * masked : 200 * (masked + 1)] = -torch.inf
    allowed = bias.isfinite().nonzero()[:, 0]
    inputs = replace(inputs, bias=bias, targets=allowed[inputs.targets % 400])
    case = Case(inputs, {"gradient": gradient, "stats": ("lse", "entropy", "correct")}).at(place)
    check_outputs(case, run_ranks(case, 3))


@pytest.mark.parametrize(**grid(places=CPU_PLACES, dtype=("fp32", "bf16", "fp16"), gradient=MODES))
def test_linear_cross_entropy_large_logits_on_a_group(
    place: Place, gradient: str, dtype: str
) -> None:
    inputs = large_logit_inputs(140, 600, 13, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {"gradient": gradient, "stats": ("lse",)}).at(place)
    check_outputs(case, run_ranks(case, 4))


# torch.chunk of nothing gives one chunk: no tokens under sequence parallel are all_ignored.
EMPTY = {
    "no_tokens": (0, False),
    "all_ignored": (9, False),
    "all_ignored_sequence_parallel": (9, True),
}


@pytest.mark.parametrize(**grid(places=CPU_PLACES, empty=EMPTY, gradient=MODES))
def test_linear_cross_entropy_without_targets_on_a_group(
    place: Place, empty: tuple[int, bool], gradient: str
) -> None:
    tokens, sequence_parallel = empty
    inputs = gaussian_inputs(tokens, 600, 13, generator=generator())
    inputs = replace(inputs, targets=torch.full_like(inputs.targets, -100))
    options = {"gradient": gradient, "stats": EVERY_STAT, "sequence_parallel": sequence_parallel}
    outputs = run_ranks(Case(inputs, options).at(place), 3)
    for name, output in outputs.items():
        assert not output.any(), name
    assert outputs["grad_hidden"].shape == inputs.hidden.shape
    assert outputs["grad_weight"].shape == inputs.weight.shape


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_group_that_starts_elsewhere(gradient: str) -> None:
    # Rank in the group is not rank in the world.
    inputs = gaussian_inputs(30, 600, 13, generator=generator(), dtype=torch.float64)
    for options in ({}, {"sequence_parallel": True}):
        case = Case(inputs, {**options, "gradient": gradient, "stats": ("lse",)})
        check_outputs(case, run_ranks(case, 3, first_rank=1))


# -- sequence parallel --------------------------------------------------------------------------


SEQUENCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "flat": (144, {}),
    "sequence_first": ((12, 5), {"reduction": "sum"}),
    "shift_over_the_edges_of_slices": (144, {"shift": 1, "z_loss": 0.1}),
    "batch_first_shift": ((12, 5), {"label_smoothing": 0.1, "shift": 2}),
}


@pytest.mark.parametrize(
    **grid(places=CPU_PLACES, sequence=SEQUENCES, gradient=MODES, world_size=RANKS)
)
def test_linear_cross_entropy_sequence_parallel(
    place: Place, sequence: tuple[Any, dict[str, Any]], gradient: str, world_size: int
) -> None:
    tokens, options = sequence
    inputs = gaussian_inputs(tokens, 600, 13, generator=generator(), dtype=place.widest)
    inputs = inputs.with_options(generator(), "token_weight").ignoring(generator(), 0.3)
    options = {**options, "gradient": gradient, "stats": ("lse", "entropy")}
    case = Case(inputs, {**options, "sequence_parallel": True}).at(place)
    check_outputs(case, run_ranks(case, world_size))


@pytest.mark.parametrize(**grid(places=CPU_PLACES, dtype=("bf16", "fp16", "fp32"), gradient=MODES))
def test_linear_cross_entropy_sequence_parallel_dtypes(
    place: Place, gradient: str, dtype: str
) -> None:
    inputs = gaussian_inputs(144, 600, 13, generator=generator(), dtype=DTYPES[dtype])
    options = {"gradient": gradient, "stats": ("lse",), "sequence_parallel": True}
    case = Case(inputs.ignoring(generator(), 0.3), options).at(place)
    check_outputs(case, run_ranks(case, 4))


# -- statistics ---------------------------------------------------------------------------------


def correct_of(group: dist.ProcessGroup, tied: tuple[int, ...], targets: Sequence[int]) -> list:
    shard = VocabShard.even(10, dist.get_rank(group), dist.get_world_size(group))
    weight = torch.zeros(40, 4)
    weight[list(tied)] = 1.0
    hidden = torch.ones(len(targets), 4)
    result = linear_cross_entropy(
        hidden,
        weight[shard.start : shard.stop],
        torch.tensor(targets),
        group=group,
        stats=("correct",),
    )
    return result.correct.tolist()


def test_correct_breaks_ties_over_ranks_by_the_lowest_id() -> None:
    for found in shared_pool().run(4, correct_of, (13, 17, 25), [13, 17, 25, 0]):
        assert found == [True, False, False, False]


@pytest.mark.parametrize("world_size", WORLD_SIZES, ids=lambda size: f"{size}_ranks")
@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far_from_zero"])
def test_logit_moments_over_ranks(offset: float, world_size: int) -> None:
    # Means of the shards differ: Chan's update must add the spread between them.
    inputs = gaussian_inputs(33, 600, 13, generator=generator())
    bias = offset + torch.linspace(-3, 3, 600)
    case = Case(replace(inputs, bias=bias), {"stats": ("logit_moments",)}, backward=False)
    check_outputs(case, run_ranks(case, world_size))


@pytest.mark.parametrize(
    **grid(places=CPU_PLACES, tail={"tail": True, "no_tail": False}, world_size=RANKS)
)
def test_filtered_on_a_group_is_bounded_by_its_tail_mass(
    place: Place, tail: bool, world_size: int
) -> None:
    # The filter must use the lse of all ranks: a rank of rare tokens would else keep everything.
    num_classes, rounding = (1200, 1e-4) if place.interprets else (2400, 1e-9)
    inputs = zipf_inputs(200, num_classes, 16, generator=generator(), dtype=place.widest)
    options = {"reduction": "sum", "stats": ("lse", "tail_mass")}
    filter = Filter(keep=0.1, tail=tail, draw=False)
    case = Case(inputs, {**options, "filter": filter}).at(place)
    outputs, golden = run_ranks(case, world_size), golden_outputs(case)
    p = (inputs.hidden.double() @ inputs.weight.double().T).softmax(-1)
    block = torch.arange(200) // 128
    kept = torch.stack([p[block == 0].sum(0), p[block == 1].sum(0)])[block] >= 0.1
    for index in (0, 1):
        kept[block == index] |= torch.isin(
            torch.arange(num_classes), inputs.targets[block == index]
        )
    dropped = torch.where(kept, 0, p).sum(-1)
    assert float(dropped.mean()) > 0.05
    # Recorded masses are upper bounds: never more is dropped than by the definition. Triton's
    # are those that the ranks know of when a tile is made.
    assert bool((outputs["tail_mass"] <= dropped + rounding).all())
    assert float(outputs["tail_mass"].mean()) > 0.1 * float(dropped.mean())
    mass = (2 if tail else 1) * outputs["tail_mass"].double()
    error = (outputs["grad_hidden"] - golden["grad_hidden"]).norm(dim=-1)
    longest = inputs.weight.double().norm(dim=-1).max()
    assert bool((error <= mass * longest + rounding).all())
    if tail:
        difference = (outputs["grad_weight"].sum(0) - golden["grad_weight"].sum(0)).abs().max()
        assert float(difference) < rounding * float(golden["grad_weight"].abs().sum(0).max())


# -- collectives and determinism ----------------------------------------------------------------


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
    """in_forward has made the gradients, and reduced them, when the forward ends."""
    return (forward + backward, []) if gradient == "in_forward" else (forward, backward)


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
        pytest.param({"stats": ("lse", "entropy", "correct", "logit_moments")}, id="stats"),
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
        assert found["both"][0][1] == 3 * 5
        # Two numbers a token and rank, a few more with statistics; never a logit.
        assert found["both"][1][1] <= 3 * 60 * 10
        assert found["both"][2][1] == 60 * 13


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_talks_once_each_way_sequence_parallel(gradient: str) -> None:
    inputs = zipf_inputs(60, 600, 13, generator=generator())
    options = {"gradient": gradient, "sequence_parallel": True}
    for found in shared_pool().run(3, count_calls, Case(inputs, options)):
        if gradient == "in_forward":
            assert kinds(found["forward"]) == [*["all_gather"] * 3, "reduce_scatter"]
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
    from cce_dist import local_triton

    counts: list[int] = []
    made = local_triton.marks_of

    def counted(*args: Any, **options: Any) -> Any:
        marks = made(*args, **options)
        counts.append(sum(word.bit_count() for word in marks.kept.flatten().tolist()))
        return marks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_triton, "marks_of", counted)
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


# -- kinds of groups ----------------------------------------------------------------------------


def run_on_mesh(group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    return run_case_with(DeviceMesh.from_group(group, "cpu"), group, case)


def run_on_mesh_dim(group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return run_case_with(mesh["tp"], mesh["tp"].get_group(), case)


def run_case_with(group: Any, process_group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    hidden = case.inputs.hidden.clone().requires_grad_()
    weight = case.inputs.weight.chunk(world)[rank].clone().requires_grad_()
    loss = LinearCrossEntropy(group=group)(hidden, weight, case.inputs.targets)
    loss.backward()
    return {"loss": loss.detach(), "grad_hidden": hidden.grad, "grad_weight": weight.grad}


@pytest.mark.parametrize("function", [run_on_mesh, run_on_mesh_dim], ids=["1d", "dim_of_2d"])
def test_module_takes_a_device_mesh(function: Any) -> None:
    inputs = gaussian_inputs(30, 600, 13, generator=generator(), dtype=torch.float64)
    case = Case(inputs)
    results = shared_pool().run(4, function, case)
    parts = results if function is run_on_mesh else results[:2]
    check_outputs(case, join_ranks(case, parts))


def refusal(group: dist.ProcessGroup, kind: str) -> str:
    """The message with which this rank refuses, or "" if it does not."""
    rank = dist.get_rank(group)
    hidden, weight, targets = torch.ones(4, 8), torch.ones(10, 8), torch.tensor([0, 1, 2, 3])
    arguments: dict[str, Any] = {"group": group}
    if kind == "mesh":
        arguments["group"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    elif kind == "outside":
        inner = dist.new_group([0, 1])
        if rank < 2:
            return "inside"
        arguments["group"] = inner
    elif kind == "gap":
        arguments["vocab_shard"] = VocabShard(11 * rank, 11 * rank + 10, 43)
    elif kind == "overlap":
        arguments["vocab_shard"] = VocabShard(9 * rank, 9 * rank + 10, 37)
    elif kind == "overlap_and_gap":  # as many rows as classes
        start = (0, 5, 20, 30)[rank]
        arguments["vocab_shard"] = VocabShard(start, start + 10, 40)
    elif kind == "short":
        arguments["vocab_shard"] = VocabShard(10 * rank, 10 * rank + 10, 45)
    elif kind == "twice":
        arguments["vocab_shard"] = VocabShard(10 * (rank // 2), 10 * (rank // 2) + 10, 20)
    elif kind == "vocab_size":
        arguments["vocab_shard"] = VocabShard(10 * rank, 10 * rank + 10, 40 - (rank == 2))
    elif kind == "target":
        targets = torch.tensor([0, 1, 2, 40])
    elif kind == "padded_target":
        arguments["vocab_shard"] = VocabShard(10 * rank, 10 * rank + 10, 35)
        targets = torch.tensor([0, 1, 2, 35])
    elif kind == "sequence_parallel":
        arguments["sequence_parallel"] = True
    try:
        linear_cross_entropy(hidden, weight, targets, **arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        pytest.param("mesh", r"group must .*mesh.*2 dims", id="mesh_of_two_dims"),
        pytest.param("gap", r"vocab_shard.*\(11, 21, 43\)", id="gap"),
        pytest.param("overlap", r"vocab_shard.*\(9, 19, 37\)", id="overlap"),
        pytest.param("overlap_and_gap", r"vocab_shard.*\(5, 15, 40\)", id="overlap_and_gap"),
        pytest.param("short", r"vocab_shard.*\(30, 40, 45\)", id="rows_missing_at_the_end"),
        pytest.param("twice", r"vocab_shard.*\(10, 20, 20\)", id="same_rows_twice"),
        pytest.param("vocab_size", r"vocab_shard.*39", id="vocab_sizes_differ"),
        pytest.param("target", r"targets must .*40", id="target_beyond_the_vocabulary"),
        pytest.param("padded_target", r"targets must .*35", id="target_is_padding"),
        pytest.param("sequence_parallel", r"targets must .*16", id="targets_of_one_slice"),
    ],
)
def test_linear_cross_entropy_refuses_on_every_rank(kind: str, pattern: str) -> None:
    for message in shared_pool().run(4, refusal, kind):
        assert re.search(pattern, message), message


def test_linear_cross_entropy_refuses_a_group_of_other_ranks() -> None:
    messages = shared_pool().run(4, refusal, "outside")
    assert messages[:2] == ["inside", "inside"]
    for message in messages[2:]:
        assert message.startswith("group must"), message
