"""Step 2: log-add-exp over the ranks, and the same operator as a public function.

This file, gather.py and hidden_sum.py call all collectives of a loss. A group of one rank has no
second code path: its collectives return their input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist.core.phases import in_phase
from cce_dist.core.stats import MergeKernels, Stats, logaddexp_parts, merge_parts, zero_beyond
from cce_dist.ranks.gather import (
    Issue,
    all_gather,
    require,
    require_same_sizes,
    start_all_gather,
)
from cce_dist.ranks.merge_header import (
    NUM_DIGITS,
    RULE,
    decode,
    digits_of,
    encode,
    flaw,
    is_sound,
    record_of,
    require_records,
)
from cce_dist.ranks.transport import (
    RankGroup,
    adapter_of,
    resolve_group,
)
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group


def all_reduce_logaddexp(
    tensor: Tensor,  # [...] fp16 | bf16 | fp32 | float64
    group: Group | DeviceMesh | None = None,
) -> Tensor:
    """Returns log sum_r exp(tensor of rank r), the same bits on every rank, [...] in tensor's
    dtype.

    -inf (a rank without columns) adds nothing. The sum is taken in rank order, in fp32 or float64;
    over MPI in MPI's order.
    Collectives: one all-gather of `tensor` over `group`, on the CPU after one of its sizes. Over
    MPI one all-reduce of twice as many fp32 or float64 numbers. None without a group.
    Not differentiable.
    Raises:
        ValueError: tensor is not floating, not dense, requires grad while grad mode is on, or, on
            the CPU, has another size on another rank.
    Source: docs/design/loss.md#online-merge.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor)
        raise ValueError(f"tensor must be a floating-point Tensor, got {got}")
    if tensor.layout != torch.strided:
        raise ValueError(f"tensor must be dense, got layout {tensor.layout}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "tensor must not require grad: all_reduce_logaddexp is not differentiable, and the "
            "gradient would be lost; pass tensor.detach()"
        )
    ranks = resolve_group(group)
    adapter = adapter_of(ranks)
    sizes = {"elements": tensor.numel(), "bytes an element": tensor.element_size()}
    require_same_sizes(sizes, tensor.device, ranks)
    if adapter is None:
        parts = all_gather(tensor.reshape(-1), ranks, begins=True)
        merged = logaddexp_parts(_widened(parts))
    else:
        records = Stats.record_of(_widened(tensor.reshape(-1)))
        with in_phase("merge"):
            adapter.all_reduce_logaddexp(records, ())
        merged = Stats.lse_of(records)
    return merged.to(tensor.dtype).view(tensor.shape)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def merge_stats(
    local: Stats,
    shard: VocabShard,
    group: Group | None,
    count: Tensor | None = None,
    kernels: MergeKernels | None = None,
) -> Stats:
    """Merges every rank's statistics; all ranks get the same bits.

    Args:
        count: [1] int32: only the first `count` tokens count, the others get 0; None: all count.
        kernels: merge lse and target logit, if `local` has no other field; on all ranks, or on
            none.
    Collectives: one all-gather over `group` of the K fields of `local`, packed: 4 (K N + 8) bytes a
    rank, K = 2 for the loss alone (8 (K N + 8) for float64). Over MPI one all-reduce of N records
    of 4 (K + 1) bytes instead, if all K fields merge by adding.
    Raises:
        ValueError: the ranks' shards overlap or don't cover the vocabulary; the ranks sent
            different amounts of numbers; or all ranks seem to have the same rows. On a GPU a
            device-side assertion takes its place: the host does not wait.
    """
    return start_merge_stats(local, shard, group, count, kernels)()


# A group of one rank tells of no phase: it waits for nobody.
_start_gather = in_phase("merge")(start_all_gather)


def start_merge_stats(
    local: Stats,
    shard: VocabShard,
    group: Group | None,
    count: Tensor | None,
    kernels: MergeKernels | None,
    issue: Issue | None = None,
) -> Callable[[], Stats]:
    """Starts `merge_stats` by `issue`, without waiting; without `issue` waits for it at once.

    Returns: a function that waits, and returns the merged statistics.
    """
    if group is None:
        return lambda: local
    adapter = adapter_of(group)
    if adapter is not None and local.adds_up:
        merged = _reduced(adapter, local, shard, count)
        return lambda: merged
    if kernels is not None and local.is_plain:
        length = 2 * len(local.lse)
        payload = kernels.pack(local.lse, local.target_logit, digits_of(shard, length))
        gather = _start_gather(payload, group, issue)

        def merge_by_kernel() -> Stats:
            parts = gather()
            merged, sound = kernels.merge(parts, count)
            require(sound, flaw, RULE, parts[:, :NUM_DIGITS])
            return local.unpack(merged)

        return merge_by_kernel
    packed = local.pack()
    payload = torch.cat([encode(shard, packed.numel(), packed), packed.flatten()])
    gather = _start_gather(payload, group, issue)
    return lambda: _merged(gather(), local, packed, count)


def _reduced(adapter: RankGroup, local: Stats, shard: VocabShard, count: Tensor | None) -> Stats:
    records = local.to_records()
    with in_phase("merge"):
        sound = adapter.all_reduce_logaddexp(records, record_of(shard, local, count))
    require_records(sound)
    merged = local.from_records(records)
    return merged if count is None else zero_beyond(merged, count)


def _merged(parts: Tensor, local: Stats, packed: Tensor, count: Tensor | None) -> Stats:
    headers, stats = parts[:, :NUM_DIGITS], _fields(parts, local, packed)
    require(is_sound(headers, stats, count), flaw, RULE, headers)
    _, start, stop, vocab_size = decode(headers).unbind(1)
    num_classes = (stop.minimum(vocab_size) - start).clamp_min(0)
    merged = merge_parts(stats, num_classes.to(packed.dtype), start.to(packed.dtype))
    return merged if count is None else zero_beyond(merged, count)


def _fields(parts: Tensor, local: Stats, packed: Tensor) -> Stats:
    """Turns the messages of all ranks, [W, 8 + K N], into the fields that `local` has, [W, N]."""
    rows = parts[:, NUM_DIGITS:].view(len(parts), *packed.shape)
    return local.unpack(rows.transpose(0, 1))
