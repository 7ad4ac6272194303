"""The loss on eight ranks over gloo: as many as a node has GPUs, against the golden of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import VocabShard
from cce_dist.testing import (
    CPU_PLACES,
    Case,
    Place,
    RankPool,
    check_outputs,
    gaussian_inputs,
    grid,
    join_ranks,
    run_case,
)
from tests.support.loss_cases import generator

MODES = ("filtered", "exact", "in_forward")
SIZE = 8
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2")
EVERYTHING = {
    "label_smoothing": 0.1,
    "z_loss": 0.01,
    "logit_scale": 0.7,
    "shift": 1,
    "stats": EVERY_STAT,
    "workspace_bytes": 2**16,
}
# Rows as ranks own them, of how many classes.
SHARDS = {
    "even": None,
    "chunked": ([VocabShard.chunked(601, rank, SIZE) for rank in range(SIZE)], 601),
    "padded": ([VocabShard.even(80, rank, SIZE) for rank in range(SIZE)], 601),
    "five_empty": ([VocabShard.chunked(3, rank, SIZE) for rank in range(SIZE)], 3),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    made = RankPool(SIZE, timeout=100)
    yield made
    made.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(**grid(places=CPU_PLACES, shards=tuple(SHARDS), gradient=MODES))
def test_each_split_on_eight_ranks(
    pool: RankPool, place: Place, shards: str, gradient: str
) -> None:
    split = SHARDS[shards]
    num_rows = 640 if split is None else max(shard.stop for shard in split[0])
    inputs = gaussian_inputs((4, 35), num_rows, 13, generator=generator(), dtype=place.widest)
    inputs = inputs.with_options(generator(), "bias", "token_weight")
    inputs = inputs.ignoring(generator(), 0.3, -100)
    how: dict[str, Any] = {}
    if split is not None:
        owned, num_classes = split
        targets = torch.where(inputs.targets < 0, inputs.targets, inputs.targets % num_classes)
        inputs = replace(inputs, targets=targets)
        bounds = tuple((shard.start, shard.stop) for shard in owned)
        how = {"bounds": bounds, "vocab_size": num_classes}
    case = Case(inputs, {**EVERYTHING, "gradient": gradient}, **how).at(place)
    check_outputs(case, join_ranks(case, pool.run(SIZE, run_case, case)))
