"""Everything that ranks say to each other within a loss: no other file of it calls a collective.

What carries it is in `transport`. A group of one rank has no second code path: its collectives
return their input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist.core.phases import in_phase
from cce_dist.core.streams import start_aside
from cce_dist.core.tracing import is_fake, is_traced
from cce_dist.core.types import MergeKernels, Stats, logaddexp_parts, merge_parts, zero_beyond
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
    all_gather_into,
    all_reduce,
    device_of_numbers,
    group_size,
    reduce_scatter_into,
    resolve_group,
)
from cce_dist.vocab_shard import VocabShard

# Takes a function that issues a collective, and returns one that waits for it.
Begin = Callable[[Callable[[], object]], Callable[[], object]]

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group


def _all_gather(tensor: Tensor, group: Group | None) -> Tensor:
    """Gathers a tensor [...] of every rank: [W, ...] in rank order."""
    return start_all_gather(tensor, group, later=False)()


def start_all_gather(
    tensor: Tensor, group: Group | None, *, later: bool, begin: Begin | None = None
) -> Callable[[], Tensor]:
    """Returns a function that returns the result of `_all_gather`; with `later` that one waits."""
    if group is None:
        return lambda: tensor[None]
    size, tensor = group.size(), tensor.contiguous()
    out = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
    if begin is not None:
        wait = begin(lambda: all_gather_into(out, tensor, group, later=True))
    else:
        work = all_gather_into(out, tensor, group, later=later)
        wait = None if work is None else work.wait

    def finish() -> Tensor:
        if wait is not None:
            wait()
        return out.view(size, *tensor.shape)

    return finish


def all_reduce_logaddexp(
    tensor: Tensor,  # [...] fp16 | bf16 | fp32 | float64
    group: Group | DeviceMesh | None = None,
) -> Tensor:
    """Returns log sum_r exp(tensor of rank r), the same bits on every rank, [...] in tensor's
    dtype.

    -inf (an empty part) adds nothing. The sum is taken in rank order, in fp32 or float64; over MPI
    in the order that MPI takes.
    Collectives: one all-gather of `tensor` over `group`, on the CPU behind one of its sizes; over
    MPI one all-reduce of twice as many fp32 or float64 by an operator of its own; none for None.
    Not differentiable.
    Raises:
        ValueError: tensor is not floating, requires grad while grad mode is on, or, on the CPU, has
            another size on another rank.
    Source: docs/numerics.md#online-merge.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor)
        raise ValueError(f"tensor must be a floating-point Tensor, got {got}")
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
        merged = logaddexp_parts(_widened(_all_gather(tensor.reshape(-1), ranks)))
    else:
        records = Stats.record_of(_widened(tensor.reshape(-1)))
        adapter.all_reduce_logaddexp(records, ())
        merged = Stats.lse_of(records)
    return merged.to(tensor.dtype).view(tensor.shape)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def gather_bounds(bound: Tensor, group: Group | None) -> Tensor:
    """Gathers [N] of every rank: [W, N] in rank order. Collectives: one all-gather of `bound`."""
    return _all_gather(bound, group)


@in_phase("merge")
def merge_stats(
    local: Stats,
    shard: VocabShard,
    group: Group | None,
    count: Tensor | None = None,
    kernels: MergeKernels | None = None,
) -> Stats:
    """Merges every rank's statistics; all ranks get the same bits.

    Args:
        count: [1] int32: only the first tokens count, the others get 0.
        kernels: for lse and target logit alone; all ranks have them, or none.
    Collectives: one all-gather over `group` of the fields of `local` that are present, packed:
    4 (K N + 8) bytes a rank, K = 2 for the loss alone (8 (K N + 8) for float64). Over MPI one
    all-reduce of N records instead, of 4 (K + 1) bytes, where all of K merge that way.
    Raises:
        ValueError: the ranks' shards overlap or don't cover the vocabulary, they sent different
            numbers of numbers, or all of them seem to have the same rows (on the CPU; a
            device-side assertion on a GPU, where looking would stop the stream).
    """
    return start_merge_stats(local, shard, group, count, kernels, later=False)()


@in_phase("merge")
def start_merge_stats(
    local: Stats,
    shard: VocabShard,
    group: Group | None,
    count: Tensor | None = None,
    kernels: MergeKernels | None = None,
    *,
    later: bool = True,
    begin: Begin | None = None,
) -> Callable[[], Stats]:
    """Starts `merge_stats`. Returns: a function that waits for it, and returns the merged
    statistics; without `later` it need not wait."""
    if group is None:
        return lambda: local
    adapter = adapter_of(group)
    if adapter is not None and local.adds_up:
        merged = _reduced(adapter, local, shard, count)
        return lambda: merged
    if kernels is not None and local.is_plain:
        length = 2 * len(local.lse)
        payload = kernels.pack(local.lse, local.target_logit, digits_of(shard, length))
        gather = start_all_gather(payload, group, later=later, begin=begin)

        def merge_by_kernel() -> Stats:
            parts = gather()
            merged, sound = kernels.merge(parts, count)
            _require_sound(sound, parts[:, :NUM_DIGITS], _fields(parts, local, merged), count)
            return local.unpack(merged)

        return merge_by_kernel
    packed = local.pack()
    payload = torch.cat([encode(shard, packed.numel(), packed), packed.flatten()])
    gather = start_all_gather(payload, group, later=later, begin=begin)
    return lambda: _merged(gather(), local, packed, count)


def _reduced(adapter: RankGroup, local: Stats, shard: VocabShard, count: Tensor | None) -> Stats:
    records = local.to_records()
    require_records(adapter.all_reduce_logaddexp(records, record_of(shard, local, count)))
    merged = local.from_records(records)
    return merged if count is None else zero_beyond(merged, count)


def _merged(parts: Tensor, local: Stats, packed: Tensor, count: Tensor | None) -> Stats:
    headers, stats = parts[:, :NUM_DIGITS], _fields(parts, local, packed)
    _require_sound(is_sound(headers, stats, count), headers, stats, count)
    _, start, stop, vocab_size = decode(headers).unbind(1)
    num_classes = (stop.minimum(vocab_size) - start).clamp_min(0)
    merged = merge_parts(stats, num_classes.to(packed.dtype), start.to(packed.dtype))
    return merged if count is None else zero_beyond(merged, count)


def _fields(parts: Tensor, local: Stats, packed: Tensor) -> Stats:
    """Turns the numbers of all ranks, [W, 8 + K N], into fields [W, N], those of `local`."""
    rows = parts[:, NUM_DIGITS:].view(len(parts), *packed.shape)
    return local.unpack(rows.transpose(0, 1))


def _require_sound(sound: Tensor, headers: Tensor, stats: Stats, count: Tensor | None) -> None:
    require(sound, lambda: flaw(headers, stats, count), RULE)


def require(condition: Tensor, message: Callable[[], str], async_message: str) -> None:
    """Raises ValueError unless `condition` [] holds; on a GPU asserts without stopping the stream.
    A fake tensor holds nothing, nor fails to."""
    if condition.device.type == "cpu" and not is_traced() and not is_fake(condition):
        if not bool(condition):
            raise ValueError(message())
    else:
        torch._assert_async(condition, async_message)


def gather_numbers(numbers: list[int], group: Group | None) -> list[list[int]]:
    """Gathers [W] lists in rank order; the host waits. Collectives: one all-gather of int64."""
    device = device_of_numbers(group)
    return _all_gather(torch.tensor(numbers, device=device), group).tolist()


@in_phase("merge", begins=False)
def require_same_sizes(sizes: Mapping[str, int], device: torch.device, group: Group | None) -> None:
    """Checks that all ranks are about to send as much, where the process would end if they did not:
    gloo aborts when more arrives than fits. Over MPI ranks say so before each collective.

    Args: sizes: the same names on every rank.
    Raises:
        ValueError: on every rank; names what differs, and every rank's.
    Collectives: on the CPU over torch.distributed one all-gather of the sizes, int64.
    """
    if device.type != "cpu" or group_size(group) == 1 or adapter_of(group) is not None:
        return
    columns = zip(*gather_numbers(list(sizes.values()), group), strict=True)
    by_name = dict(zip(sizes, columns, strict=True))
    differ = {name: list(row) for name, row in by_name.items() if len(set(row)) > 1}
    if differ:
        raise ValueError(
            "every rank of the group must be called with tensors of the same sizes, got by rank "
            + "; ".join(f"{name} {row}" for name, row in differ.items())
        )


def sum_over_ranks(tensor: Tensor, group: Group | None) -> Tensor:
    """Sums in rank order, the same bits on every rank. Collectives: one all-gather of `tensor`."""
    return _all_gather(tensor, group).sum(0)


def gather_tokens(hidden: Tensor, group: Group | None) -> Tensor:
    """Gathers [n, ...] of every rank: [W n, ...] in rank order. Collectives: one all-gather."""
    whole, fill = gather_tokens_later(hidden, group)
    fill()
    return whole


def gather_tokens_later(hidden: Tensor, group: Group | None) -> tuple[Tensor, Callable[[], None]]:
    """Returns the memory of `gather_tokens`, and a function that fills it on the stream that it is
    called on; called again it does nothing. Collectives: one all-gather, then."""
    if group is None:
        return hidden, lambda: None
    hidden = hidden.contiguous()
    whole = hidden.new_empty(group.size() * hidden.shape[0], *hidden.shape[1:])

    @functools.cache
    def fill() -> None:
        all_gather_into(whole, hidden, group)

    return whole, fill


@in_phase("reduce")
def reduce_grad_hidden(
    grad_hidden: Tensor,  # [N, D] this rank's part, in the accumulation dtype
    group: Group | None,
    *,
    scatter: bool,
    dtype: torch.dtype,  # of the sum
) -> Tensor:
    """Sums the hidden gradients of all ranks; grad_hidden is overwritten.

    Returns:
        [N, D], or with `scatter` (sequence parallel) this rank's rows [N / W, D]; in `dtype`, if
        ranks had anything to sum.
    Collectives: one reduce-scatter of grad_hidden over `group`; without `scatter` an all-gather of
        the sum in `dtype` as well, or one all-reduce where that is no narrower, or N no multiple
        of W.
    """
    if group is None:
        return grad_hidden
    run, result = _reduction(grad_hidden, group, scatter, dtype)
    run()
    return result


@in_phase("reduce")
def start_reduce_grad_hidden(
    grad_hidden: Tensor,
    group: Group,
    *,
    scatter: bool,
    dtype: torch.dtype,
    finish: Callable[[], object],  # completes grad_hidden, on the stream that sums it
) -> Callable[[], Tensor]:
    """Starts `reduce_grad_hidden`, on a GPU beside what the current stream is given next.

    Returns: a function that makes the stream wait, and returns the sum. Until then the memory of
    grad_hidden, and of all that the stream has been given, has to stay.
    """
    run, result = _reduction(grad_hidden, group, scatter, dtype)

    def finish_and_sum() -> None:
        finish()
        run()

    wait_for_it = start_aside(grad_hidden.device, finish_and_sum)

    def wait() -> Tensor:
        wait_for_it()
        return result

    return wait


def _reduction(
    grad: Tensor, group: Group, scatter: bool, dtype: torch.dtype
) -> tuple[Callable[[], None], Tensor]:
    """Returns a function that calls the collectives of `reduce_grad_hidden`, and the sum, which
    they will write. All memory is the caller's stream's, whichever stream they run on."""
    size, num_tokens = group.size(), grad.shape[0]
    narrows = dtype.itemsize < grad.element_size()
    if not scatter and not (num_tokens % size == 0 and narrows):
        total = torch.empty_like(grad, dtype=dtype) if dtype != grad.dtype else grad

        def sum_up() -> None:
            all_reduce(grad, group)
            if total is not grad:
                total.copy_(grad)

        return sum_up, total
    part = grad.view(size, num_tokens // size, *grad.shape[1:])[group.rank()]
    # NCCL's sum may take the place of what it was made of, where it does not stay there.
    if not grad.is_cuda or dtype == grad.dtype:
        part = torch.empty_like(part)
    stored = torch.empty_like(part, dtype=dtype) if dtype != grad.dtype else part
    whole = stored if scatter else torch.empty_like(grad, dtype=dtype)

    def sum_up_rows() -> None:
        reduce_scatter_into(part, grad, group)
        if stored is not part:
            stored.copy_(part)
        # An all-reduce is this and a gathering of sums, which would be rounded afterwards.
        if whole is not stored:
            all_gather_into(whole, stored, group)

    return sum_up_rows, whole
