"""Logits of listed pairs of a token and an id, over all ranks, as an autograd function.

An id's rank computes its pairs, and the ranks add up: every rank then has every pair's logit, with
the same bits. A softmax over listed ids is ordinary autograd on these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cce_dist.algorithm.call import Call, GradWeight, pad_bias
from cce_dist.algorithm.once import once_differentiable, outside_autocast
from cce_dist.algorithm.plan import Plan
from cce_dist.backends.protocol import PairsGrads, PairsRequest
from cce_dist.backends.torch.top import first_largest
from cce_dist.core.phases import in_phase
from cce_dist.core.types import Head, Pairs, Tokens, accumulate_dtype
from cce_dist.ranks.gather import all_gather, require, require_same_sizes
from cce_dist.ranks.hidden_sum import SumOverRanks
from cce_dist.ranks.transport import all_reduce, group_rank, group_size


def call_of_pairs(plan: Plan, weight: Tensor) -> Call:
    """Returns a call without targets."""
    return Call(
        plan=plan,
        rows=None,
        local_targets=torch.empty(0, dtype=torch.int64, device=weight.device),
        count=None,
        device_type=weight.device.type,
        class_weight=None,
        quantized=None,
        grad_weight_into=None,
        tail_mass=False,
        record=True,
    )


class PairLogits(torch.autograd.Function):
    """Computes hidden . weight + bias of each pair, [P] in the accumulation dtype.

    Collectives: forward: one all-reduce of [P]; on the CPU first an all-gather of sizes. Backward:
    those of `reduce_grad_hidden`. Under sequence parallel hidden is gathered first in both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [n, D]
        weight: Tensor,  # [V_local, D]
        bias: Tensor | None,  # [V_local]
        rows: Tensor,  # the fields of `Pairs`
        ids: Tensor,
        offsets: Tensor,
        order: Tensor,
        call: Call,
    ) -> Tensor:
        ctx.call, plan = call, call.plan
        ctx.save_for_backward(hidden, weight, bias, rows, ids, offsets, order)
        sizes = {
            "rows of hidden": len(hidden),
            "D of hidden": hidden.shape[1],
            "pairs": len(ids),
            "bytes an element of hidden": hidden.element_size(),
        }
        require_same_sizes(sizes, hidden.device, plan.group)
        hidden, _ = plan.gather_hidden(hidden, defer_fill=False)
        head = call.head(weight, bias)
        pairs = Pairs(rows, ids, offsets, order)
        logits = plan.backend.pair_logits(hidden, head, _request(plan, head, pairs))
        return _sum_over_ranks(logits, pairs, plan)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor | None):
        hidden, weight, bias, *pairs = ctx.saved_tensors
        (grad,), call, plan = grads, ctx.call, ctx.call.plan
        assert grad is not None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden, _ = plan.gather_hidden(hidden, defer_fill=False)
        head, target = call.head(weight, bias), GradWeight.prepare(call, weight, needs_weight)
        dtype = accumulate_dtype(hidden.dtype)
        total = SumOverRanks(
            plan.group, plan.options.sequence_parallel, hidden.shape[0], hidden.dtype
        )
        part = of_bias = None
        if needs_hidden:
            part = hidden.new_empty(hidden.shape, dtype=hidden.dtype if total.is_local else dtype)
        if needs_bias:
            of_bias = torch.empty(len(head.weight), dtype=dtype, device=hidden.device)
        out = PairsGrads(part, None if target.into is None else target.into.rows, of_bias)
        request = _request(plan, head, Pairs(*pairs))
        plan.backend.pair_gradients(hidden, head, request, grad, out)
        grad_hidden = None if part is None else total.of_tokens(part, None)
        return grad_hidden, target.returned, pad_bias(of_bias, bias), None, None, None, None, None


def _sum_over_ranks(logits: Tensor, pairs: Pairs, plan: Plan) -> Tensor:
    """Adds up the ranks' logits. One summand of a pair is its logit, the others are 0: no order
    changes the sum.

    Raises:
        ValueError: ranks list other ids; on a GPU a device-side assertion fails instead.
    """
    size = group_size(plan.group)
    if size == 1:
        return logits
    assert plan.group is not None
    digest = _digest(pairs).to(logits.dtype)
    total = torch.cat([logits, digest])
    with in_phase("merge"):
        all_reduce(total, plan.group)
    rule = "every rank of the group must list the same ids in the same order (support, candidates)"
    same = total[-1] == size * digest[0]
    require(same, lambda: f"{rule}, got others on rank {group_rank(plan.group)}", rule)
    return total[:-1]


def _digest(pairs: Pairs) -> Tensor:
    """Returns a number below 4,096 that other pairs, or another order, would change: [1]."""
    place = torch.arange(len(pairs.ids), device=pairs.ids.device)
    mixed = pairs.ids * 0x1E3779B185EBCA87 + pairs.rows * 0x165667B19E3779F9 + place
    for _ in range(2):
        # Shifts between the products: sums of products alone would not tell orders apart.
        mixed = (mixed ^ (mixed >> 29)) * 0x27D4EB2F165667C5
    return ((mixed >> 32) % 4096).sum(0, keepdim=True) % 4096


def largest_over_ranks(
    hidden: Tensor, rows: Tensor, head: Head, plan: Plan, k: int
) -> tuple[Tensor, Tensor]:
    """Returns the k largest logits of some rows of hidden over all ranks, falling, and their ids,
    [n, k] each; of equal logits the lowest id comes first. -inf and -1 where there are fewer.

    Collectives: all-gathers of [n, k] logits and int64 ids; under sequence parallel hidden is
    gathered first.
    """
    hidden, _ = plan.gather_hidden(hidden, defer_fill=False)
    nobody = torch.full_like(rows, -1)
    room = plan.room_of(len(rows), head)
    values, ids = plan.backend.top(Tokens(hidden, rows, nobody), head, room, k)
    ids = torch.where(ids < 0, ids, ids + plan.shard.start)
    if group_size(plan.group) == 1:
        return values, ids
    values, ids = (all_gather(x, plan.group).movedim(0, 1).flatten(1) for x in (values, ids))
    ids, order = torch.sort(ids, dim=1, stable=True)
    values, best = first_largest(values.gather(1, order), k)
    return values, ids.gather(1, best)


def _request(plan: Plan, head: Head, pairs: Pairs) -> PairsRequest:
    return PairsRequest(pairs, plan.shard.start, plan.room_of(len(pairs.offsets) - 1, head))
