"""Statistics over ranks: ties, moments, the tail mass that bounds the filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from cce_dist import Filter, VocabShard, linear_cross_entropy
from cce_dist.testing import (
    CPU_PLACES,
    Case,
    Place,
    check_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    shared_pool,
    zipf_inputs,
)
from tests.algorithm.sharded_cases import RANKS, WORLD_SIZES, run_ranks
from tests.support.loss_cases import generator


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


@pytest.mark.parametrize(**grid(places=CPU_PLACES, world_size=RANKS))
def test_filtered_entropy_on_a_group_comes_nearer_with_the_tail(
    place: Place, world_size: int
) -> None:
    # Each rank has the entropy of its own dropped columns, by the lse and the entropy of all ranks.
    num_classes = 1200 if place.interprets else 2400
    inputs = zipf_inputs(200, num_classes, 16, generator=generator())
    upstream = {"loss": 0.0, "entropy": torch.linspace(-1, 2, 200)}
    case = Case(inputs, {"reduction": "sum", "stats": ("entropy",)}, upstream=upstream).at(place)
    golden, found = golden_outputs(case), {}
    for tail in (True, False):
        options = {**case.options, "filter": Filter(keep=0.1, tail=tail, draw=False)}
        found[tail] = run_ranks(replace(case, options=options), world_size)
    for name, times in (("grad_hidden", 0.5), ("grad_weight", 1.0)):
        near, far = (float((found[tail][name] - golden[name]).norm()) for tail in (True, False))
        assert 0 < near < times * far, f"{name}: {near:.3e} with the tail, {far:.3e} without"
