"""What a pipeline rank's filter keeps when ranks know each other's frequent rows."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from cce_dist import Filter, LossOptions, VocabShard
from cce_dist.bench.inputs import Shape, make_inputs
from cce_dist.bench.rank_methods import bits_set, marks_seen
from cce_dist.core.types import Head
from cce_dist.pipeline import frequent_rows
from cce_dist.pipeline.comm.courier import Courier
from cce_dist.pipeline.frequent_rows import FrequentRows
from cce_dist.pipeline.head import PipelineHead
from cce_dist.testing import RankPool

TOKENS, CLASSES, DIM, ROWS = 256, 2048, 32, 64


def kept_and_error(group: Any, gradient: str, knows: bool) -> tuple[float, float]:
    """Of the pairs of a column and a block of tokens, those kept in the second step, after the
    first has counted targets; and how far the hidden gradient is from the dense one."""
    inputs = make_inputs("zipf", Shape(TOKENS, CLASSES, DIM))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shard = VocabShard.chunked(CLASSES, rank, size)
    rows, root = slice(shard.start, shard.stop), size - 1
    weight = inputs.weight[rows].clone().requires_grad_()
    bias = torch.linspace(-1, 1, CLASSES)
    how: dict[str, Any] = {"filter": Filter(keep=0.02)} if gradient == "filtered" else {}
    options = LossOptions(reduction="sum", backend="triton", gradient=gradient, **how)
    with patch.object(frequent_rows, "ROWS", ROWS):
        head = PipelineHead(
            weight,
            group=group,
            hidden_shape=(TOKENS, DIM),
            bias=bias[rows].clone(),
            options=options,
        )
    given = (inputs.hidden, inputs.targets) if rank == root else (None, None)
    grad, shares = inputs.hidden, []
    for index in range(2):
        if knows:
            head.start_step()
        with marks_seen() as seen:
            head.post(index, root, *given)
            head.statistics(index)
            head.gradients(index, root)
        grad = head.take(index)
        head.finish_step()
        pairs = weight.shape[0] * TOKENS // 128
        shares.append(sum(bits_set(marks.kept) for marks in seen) / pairs)
    head.close()
    if rank != root:
        return shares[-1], 0.0
    hidden = inputs.hidden.clone().requires_grad_()
    z = hidden @ inputs.weight.T + bias
    torch.nn.functional.cross_entropy(z, inputs.targets, reduction="sum").backward()
    assert hidden.grad is not None
    return shares[-1], float((grad - hidden.grad).norm() / hidden.grad.norm())


@pytest.mark.interpreter
def test_a_rank_of_rare_tokens_keeps_less(pools: dict[int, RankPool]) -> None:
    knowing = pools[2].run(2, kept_and_error, "filtered", True)
    alone = pools[2].run(2, kept_and_error, "filtered", False)
    # The first rank's classes are frequent: it needs no other.
    assert 0 < knowing[0][0] <= alone[0][0] < 1
    assert 0 < knowing[1][0] < 0.75 * alone[1][0]
    assert knowing[1][1] < 0.1 and alone[1][1] < 0.1


@pytest.mark.interpreter
def test_exact_asks_for_no_rows(pools: dict[int, RankPool]) -> None:
    for kept, error in pools[2].run(2, kept_and_error, "exact", True):
        assert kept == 0 and error < 1e-5


def rows_of_others(group: Any) -> None:
    rank = dist.get_rank(group)
    shard = VocabShard.even(6, rank, 2)
    weight = torch.arange(6.0)[:, None] + 10 * rank
    with patch.object(frequent_rows, "ROWS", 2):
        rows = FrequentRows(weight, None, shard, Courier(group, weight.device))
    other = 10 * (1 - rank)
    head = Head(weight, None, None, 12, None, 1.0)

    def known() -> list[float]:
        others = rows.elsewhere(head)
        assert others is not None
        return sorted(others.weight.flatten().tolist())

    assert rows.elsewhere(head) is None
    rows.exchange()
    # Nothing is counted yet: the first ids.
    assert known() == [other, other + 1]
    rows.count(torch.tensor([4, -1, 4, 2, 2, 4, 1], dtype=torch.int32))
    rows.exchange()
    assert known() == [other + 2, other + 4]


def test_rows_are_those_of_the_most_frequent_targets(pools: dict[int, RankPool]) -> None:
    pools[2].run(2, rows_of_others)
