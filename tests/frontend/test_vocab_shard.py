"""VocabShard: who owns which ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cce_dist import VocabShard


@pytest.mark.parametrize("split", [VocabShard.chunked, VocabShard.balanced], ids=["chunk", "bal"])
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(vocab_size=st.integers(1, 200), world_size=st.integers(1, 12))
def test_splits_tile_the_vocabulary(
    split: Callable[..., VocabShard], vocab_size: int, world_size: int
) -> None:
    shards = [split(vocab_size, rank, world_size) for rank in range(world_size)]
    assert shards[0].start == 0 and shards[-1].stop == vocab_size
    for left, right in itertools.pairwise(shards):
        assert left.stop == right.start
    assert sum(shard.num_classes for shard in shards) == vocab_size
    sizes = [shard.num_rows for shard in shards]
    if split == VocabShard.balanced:
        assert max(sizes) - min(sizes) <= 1
    else:
        chunks = [len(part) for part in torch.arange(vocab_size).chunk(world_size)]
        assert sizes == chunks + [0] * (world_size - len(chunks))


def test_even_pads_the_last_ranks() -> None:
    shards = [VocabShard.even(10, rank, 4, 25) for rank in range(4)]
    assert [(shard.start, shard.stop) for shard in shards] == [
        (0, 10),
        (10, 20),
        (20, 30),
        (30, 40),
    ]
    assert [shard.num_classes for shard in shards] == [10, 10, 5, 0]
    assert all(shard.num_rows == 10 and shard.vocab_size == 25 for shard in shards)
    assert VocabShard.even(10, 1, 2) == VocabShard(10, 20, 20)


def test_local_targets() -> None:
    targets = torch.tensor([0, 9, 10, 19, 20, 24, -100])
    assert VocabShard(10, 20, 25).local_targets(targets).tolist() == [-1, -1, 0, 9, -1, -1, -1]
    # Padded rows own no target; an empty shard none at all.
    assert VocabShard(20, 30, 22).local_targets(targets).tolist() == [-1] * 4 + [0, -1, -1]
    assert VocabShard(20, 20, 25).local_targets(targets).tolist() == [-1] * 7
    assert VocabShard(30, 40, 25).local_targets(targets).tolist() == [-1] * 7


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        pytest.param(lambda: VocabShard(-1, 5, 5), r"0 <= start <= stop.*start=-1", id="start"),
        pytest.param(lambda: VocabShard(6, 5, 5), r"0 <= start <= stop.*stop=5", id="order"),
        pytest.param(lambda: VocabShard(0, 5, 0), r"vocab_size must be >= 1, got 0", id="size"),
        pytest.param(lambda: VocabShard(0, 5.0, 5), r"VocabShard.stop must be an int", id="float"),
        pytest.param(lambda: VocabShard(0, 5, True), r"vocab_size must be an int", id="bool"),
        pytest.param(lambda: VocabShard.even(5, 2, 2), r"rank must lie in .*2.*got 2", id="rank"),
        pytest.param(lambda: VocabShard.chunked(5, -1, 2), r"rank must lie in", id="negative"),
        pytest.param(lambda: VocabShard.balanced(5, 3, 2), r"rank must lie in", id="balanced"),
        pytest.param(
            lambda: VocabShard.even(5, 0, 2, 11),
            r"vocab_size must be <= .*10, got 11",
            id="padding",
        ),
        pytest.param(lambda: VocabShard.even(5.0, 0, 2), r"num_rows must be an int", id="rows"),
        pytest.param(lambda: VocabShard.even(-1, 0, 2), r"num_rows must be >= 0", id="rows_below"),
        pytest.param(lambda: VocabShard.even(5, "0", 2), r"rank must be an int", id="rank_str"),
        pytest.param(lambda: VocabShard.chunked("9", 0, 2), r"vocab_size must be an int", id="str"),
        pytest.param(lambda: VocabShard.chunked(-9, 0, 2), r"vocab_size must be >= 1", id="below"),
        pytest.param(lambda: VocabShard.balanced(9, 0, 2.0), r"world_size must be an", id="ranks"),
        pytest.param(lambda: VocabShard.even(5, 0, 2, 0), r"vocab_size must be >= 1", id="even_0"),
    ],
)
def test_vocab_shard_refuses(make: Callable[..., Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        make()
