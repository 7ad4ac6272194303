"""All collectives of the training job, except the loss's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from cce_dist import VocabShard

# torch 2.13 renamed this collective and warns at the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Buckets make fewer, larger messages; a bucket has so many bytes and at most one gradient more.
BUCKET_BYTES = 64 * 2**20


class SumPartials(torch.autograd.Function):
    """Sum over ranks; every rank goes on with the whole sum, and owns its own share's gradient.

    Collectives: forward one all-reduce of x, backward none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SumPartialsToSlices(torch.autograd.Function):
    """Sum over ranks; every rank goes on with its slice of the sum along dim 0.

    Collectives: forward one reduce-scatter of x, backward one all-gather.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        _reduce_scatter(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[0] * ctx.group.size(), *grad.shape[1:])
        _all_gather(out, grad.contiguous(), group=ctx.group)
        return out, None


class GatherRows(torch.autograd.Function):
    """The whole [V, D] weight from `VocabShard.chunked` rows, for the dense comparison only.

    Collectives: forward one all-gather of D * ceil(V / ranks) numbers a rank; backward one
    all-reduce of [V, D] if `partial_grad`, that is if ranks see different tokens, else none.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, group: dist.ProcessGroup, shard: VocabShard, partial_grad: bool
    ) -> Tensor:
        ctx.group, ctx.shard, ctx.partial_grad = group, shard, partial_grad
        # The last ranks alone have fewer rows: their padding is at the end.
        most_rows = -(-shard.vocab_size // group.size())
        gathered = weight.new_empty(group.size() * most_rows, weight.shape[1])
        padded = F.pad(weight, (0, 0, 0, most_rows - weight.shape[0]))
        _all_gather(gathered, padded, group=group)
        return gathered[: shard.vocab_size]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.contiguous()
        if ctx.partial_grad:
            dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.shard.start : ctx.shard.stop], None, None, None


def sum_gradients(grads: Sequence[Tensor], group: dist.ProcessGroup, scale: float) -> None:
    """Replaces each gradient by scale * its sum over the group. One all-reduce a bucket."""
    if group.size() == 1 and scale == 1:
        return
    for bucket in _buckets(grads):
        flat = _flatten_dense_tensors(bucket)
        if group.size() > 1:
            dist.all_reduce(flat, group=group)
        if scale != 1:
            flat.mul_(scale)
        for grad, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            grad.copy_(total)


def _buckets(grads: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    ends = accumulate(grad.numel() * grad.element_size() for grad in grads)
    by_end = groupby(zip(grads, ends, strict=True), lambda each: each[1] // BUCKET_BYTES)
    return ([grad for grad, _ in bucket] for _, bucket in by_end)


def sum_over_world(values: Sequence[Tensor | float], device: torch.device) -> list[float]:
    """Sums a few numbers over all ranks in float64: one all-reduce, the same floats everywhere.

    Values are scalars or vectors; their sums come back in one list, in the same order.
    """
    packed = torch.cat(
        [torch.as_tensor(value, dtype=torch.float64).to(device).flatten() for value in values]
    )
    dist.all_reduce(packed)
    return packed.tolist()


def wait_for_all(device: torch.device) -> None:
    """Waits for all ranks; unlike dist.barrier it does not pick a GPU by itself."""
    sum_over_world([0.0], device)
