"""linear_cross_entropy on groups of 1 to 4 ranks, against the same golden as on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, VocabShard
from cce_dist.testing import (
    CPU_PLACES,
    DTYPES,
    Case,
    Place,
    check_outputs,
    gaussian_inputs,
    grid,
    join_ranks,
    large_logit_inputs,
    run_case,
    shared_pool,
    zipf_inputs,
)
from tests.algorithm.sharded_cases import RANKS, Bounds, run_ranks
from tests.support.grids import paired_grid, value_grid
from tests.support.loss_cases import EACH_OPTION, EVERY_STAT, MODES, generator


def bounds_of(shards: Sequence[VocabShard]) -> Bounds:
    return tuple((shard.start, shard.stop) for shard in shards)


# -- every option on every group ----------------------------------------------------------------

OPTIONS: dict[str, tuple[tuple[str, ...], int | None, dict[str, Any]]] = {
    **EACH_OPTION,
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


def not_refused(row: dict[str, Any]) -> bool:
    return not (row["gradient"] == "in_forward" and row["option"] == "none")


@pytest.mark.parametrize(
    **paired_grid(
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
    **paired_grid(
        places=CPU_PLACES, gradient=MODES, dtype=("bf16", "fp16", "fp32"), world_size=RANKS
    )
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
    **value_grid(places=CPU_PLACES, frozen=("hidden", "weight", "nothing"), gradient=MODES)
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


@pytest.mark.parametrize(**value_grid(places=CPU_PLACES, shards=tuple(SHARDS), gradient=MODES))
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


@pytest.mark.parametrize(**value_grid(places=CPU_PLACES, owner=(0, 1, 2), gradient=MODES))
def test_linear_cross_entropy_all_targets_on_one_rank(
    place: Place, owner: int, gradient: str
) -> None:
    inputs = gaussian_inputs(140, 600, 13, generator=generator(), dtype=place.widest)
    inputs = replace(inputs, targets=inputs.targets % 200 + 200 * owner)
    case = Case(inputs, {"gradient": gradient, "stats": ("lse", "correct")}).at(place)
    check_outputs(case, run_ranks(case, 3))


@pytest.mark.parametrize(**value_grid(places=CPU_PLACES, masked=(0, 1, 2), gradient=MODES))
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


@pytest.mark.parametrize(
    **value_grid(places=CPU_PLACES, dtype=("fp32", "bf16", "fp16"), gradient=MODES)
)
def test_linear_cross_entropy_large_logits_on_a_group(
    place: Place, gradient: str, dtype: str
) -> None:
    inputs = large_logit_inputs(140, 600, 13, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {"gradient": gradient, "stats": ("lse",)}).at(place)
    check_outputs(case, run_ranks(case, 4))


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
    **paired_grid(places=CPU_PLACES, sequence=SEQUENCES, gradient=MODES, world_size=RANKS)
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


@pytest.mark.parametrize(
    **value_grid(places=CPU_PLACES, dtype=("bf16", "fp16", "fp32"), gradient=MODES)
)
def test_linear_cross_entropy_sequence_parallel_dtypes(
    place: Place, gradient: str, dtype: str
) -> None:
    inputs = gaussian_inputs(144, 600, 13, generator=generator(), dtype=DTYPES[dtype])
    options = {"gradient": gradient, "stats": ("lse",), "sequence_parallel": True}
    case = Case(inputs.ignoring(generator(), 0.3), options).at(place)
    check_outputs(case, run_ranks(case, 4))
