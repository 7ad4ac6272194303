"""Everything that ranks say to each other: no other file calls a collective.

A group of one rank has no second code path: its collectives return their input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.partials import MergeKernels, Stats, logaddexp_parts, merge_parts, zero_beyond
from cce_dist.phases import in_phase
from cce_dist.streams import start_aside
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def resolve_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The process group of a ProcessGroup, a 1-D DeviceMesh, or None (one rank).

    Raises:
        ValueError: another type, a mesh of several dims, or this process is not in the group.
    """
    if group is None:
        return None
    if not dist.is_available():
        raise ValueError("group must be None: this build of torch has no torch.distributed")
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain the calling rank, got GroupMember.NON_GROUP_MEMBER")
    if not isinstance(group, dist.ProcessGroup):
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(group, DeviceMesh):
            raise ValueError(
                f"group must be a ProcessGroup, a 1-D DeviceMesh or None, got {type(group)}"
            )
        if group.ndim != 1:
            raise ValueError(
                f"group must be one dim of a DeviceMesh, got a mesh of {group.ndim} dims "
                f'{group.mesh_dim_names}: slice it, as in mesh["tp"]'
            )
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError("group must contain the calling rank, got a group of other ranks")
    return group


def group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _single(name: str, until_2_12: str) -> Callable[..., object]:
    """torch 2.13 renamed the collectives on one tensor and warns of the old names."""
    return getattr(dist, name, None) or getattr(dist, until_2_12)


def _all_gather(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """[...] -> [W, ...] in rank order."""
    return start_all_gather(tensor, group, later=False)()


def start_all_gather(
    tensor: Tensor, group: ProcessGroup | None, *, later: bool
) -> Callable[[], Tensor]:
    """What returns the result of `_all_gather`; with `later` it waits no sooner than that."""
    if group is None:
        return lambda: tensor[None]
    size, tensor = dist.get_world_size(group), tensor.contiguous()
    out = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
    gather = _single("all_gather_single", "all_gather_into_tensor")
    work: Any = gather(out, tensor, group=group, async_op=later)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return out.view(size, *tensor.shape)

    return finish


def all_reduce_logaddexp(
    tensor: Tensor,  # [...] fp16 | bf16 | fp32 | float64
    group: ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """log sum_r exp(tensor of rank r), the same bits on every rank, [...] in tensor's dtype.

    -inf (an empty part) adds nothing. The sum is taken in rank order, in fp32 or float64.
    Collectives: one all-gather of `tensor` over `group`; none for None. Not differentiable.
    Raises:
        ValueError: tensor is not floating, or requires grad while grad mode is on.
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
    parts = _all_gather(tensor.reshape(-1), resolve_group(group))
    wide = parts if parts.dtype == torch.float64 else parts.float()
    return logaddexp_parts(wide).to(tensor.dtype).view(tensor.shape)


def gather_bounds(bound: Tensor, group: ProcessGroup | None) -> Tensor:
    """[N] of every rank -> [W, N] in rank order. Collectives: one all-gather of `bound`."""
    return _all_gather(bound, group)


@in_phase("merge")
def merge_stats(
    local: Stats,
    shard: VocabShard,
    group: ProcessGroup | None,
    count: Tensor | None = None,
    kernels: MergeKernels | None = None,
) -> Stats:
    """Merge every rank's statistics; all ranks get the same bits.

    Args:
        count: [1] int32: only the first tokens count, the others get 0.
        kernels: for lse and target logit alone; all ranks have them, or none.
    Collectives: one all-gather over `group` of the fields of `local` that are present, packed:
    4 (K N + 6) bytes a rank, K = 2 for the loss alone (8 (K N + 6) for float64).
    Raises:
        ValueError: the ranks' shards overlap or don't cover the vocabulary (on the CPU; a
            device-side assertion on a GPU, where looking would stop the stream).
    """
    return start_merge_stats(local, shard, group, count, kernels, later=False)()


@in_phase("merge")
def start_merge_stats(
    local: Stats,
    shard: VocabShard,
    group: ProcessGroup | None,
    count: Tensor | None = None,
    kernels: MergeKernels | None = None,
    *,
    later: bool = True,
) -> Callable[[], Stats]:
    """`merge_stats` begun. Returns: what waits for it, and returns the merged statistics; without
    `later` it need not wait."""
    if group is None:
        return lambda: local
    if kernels is not None and local.is_plain:
        payload = kernels.pack(local.lse, local.target_logit, _digits_of(shard))
        gather = start_all_gather(payload, group, later=later)

        def merge_by_kernel() -> Stats:
            parts = gather()
            merged, tiles = kernels.merge(parts, count, _DIGIT)
            _require_that(tiles, parts[:, -_NUM_DIGITS:])
            return local.unpack(merged)

        return merge_by_kernel
    packed = local.pack()
    payload = torch.cat([packed.flatten(), _encode_shard(shard, packed)])
    gather = start_all_gather(payload, group, later=later)
    return lambda: _merged(gather(), local, packed, count)


def _merged(parts: Tensor, local: Stats, packed: Tensor, count: Tensor | None) -> Stats:
    bounds = _decode_shards(parts[:, -_NUM_DIGITS:])
    _require_that(_tiles(bounds), parts[:, -_NUM_DIGITS:])
    rows = parts[:, : packed.numel()].view(len(parts), *packed.shape).transpose(0, 1)
    first = bounds[:, 0].to(packed.dtype)
    num_classes = (bounds[:, 1].minimum(bounds[:, 2]) - bounds[:, 0]).clamp_min(0)
    merged = merge_parts(local.unpack(rows), num_classes.to(packed.dtype), first)
    return merged if count is None else zero_beyond(merged, count)


# Shard bounds travel as two numbers below 2^20 each: fp32 holds integers exactly up to 2^24.
_DIGIT = 2**20
_NUM_DIGITS = 6


def _encode_shard(shard: VocabShard, like: Tensor) -> Tensor:
    """[6] as `like`."""
    digits = _digits_of(shard)
    if like.is_cuda:
        # A copy from the host would wait for all that the device has still to do.
        return torch.cat([like.new_full((1,), digit) for digit in digits])
    return like.new_tensor(digits)


def _digits_of(shard: VocabShard) -> list[int]:
    values = (shard.start, shard.stop, shard.vocab_size)
    return [digit for value in values for digit in divmod(value, _DIGIT)]


def _decode_shards(digits: Tensor) -> Tensor:
    """[W, 6] -> [W, 3] int64: start, stop, vocab_size."""
    high_low = digits.view(-1, 3, 2).long()
    return high_low[..., 0] * _DIGIT + high_low[..., 1]


def _tiles(bounds: Tensor) -> Tensor:
    """Whether [W, 3] int64 shards tile their vocabulary, []."""
    start, stop, vocab_size = bounds.unbind(1)
    stop = stop.minimum(vocab_size).maximum(start)
    overlap = torch.minimum(stop[:, None], stop) - torch.maximum(start[:, None], start)
    overlap = overlap.fill_diagonal_(0).clamp_min(0).sum()
    covered = (stop - start).sum() == vocab_size[0]
    return covered & (overlap == 0) & (vocab_size == vocab_size[0]).all()


def _require_that(tiles: Tensor, digits: Tensor) -> None:
    rule = "vocab_shard of the ranks must tile [0, vocab_size)"

    def message() -> str:
        bounds = [tuple(row) for row in _decode_shards(digits).tolist()]
        return f"{rule} without gap or overlap, got (start, stop, vocab_size) by rank: {bounds}"

    require(tiles, message, rule)


def require(condition: Tensor, message: Callable[[], str], async_message: str) -> None:
    """Raise ValueError unless `condition` [] holds; on a GPU assert without stopping the stream."""
    if condition.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(condition):
            raise ValueError(message())
    else:
        torch._assert_async(condition, async_message)


def gather_numbers(numbers: list[int], group: ProcessGroup | None) -> list[list[int]]:
    """[W] lists in rank order; the host waits. Collectives: one all-gather of int64."""
    # On a device that every rank knows, whatever tensors it was called with.
    on_cpu = group is None or "gloo" in dist.get_backend(group)
    device = torch.device("cpu" if on_cpu else "cuda")
    return _all_gather(torch.tensor(numbers, device=device), group).tolist()


def sum_over_ranks(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum in rank order, the same bits on every rank. Collectives: one all-gather of `tensor`."""
    return _all_gather(tensor, group).sum(0)


def gather_tokens(hidden: Tensor, group: ProcessGroup | None) -> Tensor:
    """[n, ...] of every rank -> [W n, ...] in rank order. Collectives: one all-gather."""
    whole, fill = gather_tokens_later(hidden, group)
    fill()
    return whole


def gather_tokens_later(
    hidden: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Callable[[], None]]:
    """The memory of `gather_tokens`, and what fills it, on the stream that it is called on.
    Collectives: one all-gather, then."""
    if group is None:
        return hidden, lambda: None
    hidden = hidden.contiguous()
    whole = hidden.new_empty(dist.get_world_size(group) * hidden.shape[0], *hidden.shape[1:])

    def fill() -> None:
        _single("all_gather_single", "all_gather_into_tensor")(whole, hidden, group=group)

    return whole, fill


@in_phase("reduce")
def reduce_grad_hidden(
    grad_hidden: Tensor,  # [N, D] this rank's part, in the accumulation dtype
    group: ProcessGroup | None,
    *,
    scatter: bool,
    dtype: torch.dtype,  # of the sum
) -> Tensor:
    """Sum the hidden gradients of all ranks; grad_hidden is overwritten.

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
    group: ProcessGroup,
    *,
    scatter: bool,
    dtype: torch.dtype,
    finish: Callable[[], object],  # completes grad_hidden, on the stream that sums it
) -> Callable[[], Tensor]:
    """`reduce_grad_hidden`, on a GPU beside what the current stream is given next.

    Returns: what makes the stream wait, and returns the sum. Until then the memory of grad_hidden,
    and of what the stream has been given, has to stay.
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
    grad: Tensor, group: ProcessGroup, scatter: bool, dtype: torch.dtype
) -> tuple[Callable[[], None], Tensor]:
    """The collectives of `reduce_grad_hidden`, and the sum, which they will write. All memory is
    the caller's stream's, whichever stream they run on."""
    size, num_tokens = dist.get_world_size(group), grad.shape[0]
    narrows = dtype.itemsize < grad.element_size()
    if not scatter and not (num_tokens % size == 0 and narrows):
        total = torch.empty_like(grad, dtype=dtype) if dtype != grad.dtype else grad

        def sum_up() -> None:
            dist.all_reduce(grad, group=group)
            if total is not grad:
                total.copy_(grad)

        return sum_up, total
    part = grad.view(size, num_tokens // size, *grad.shape[1:])[dist.get_rank(group)]
    # NCCL's sum may take the place of what it was made of, where it does not stay there.
    if not grad.is_cuda or dtype == grad.dtype:
        part = torch.empty_like(part)
    own = torch.empty_like(part, dtype=dtype) if dtype != grad.dtype else part
    whole = own if scatter else torch.empty_like(grad, dtype=dtype)

    def sum_up_rows() -> None:
        _single("reduce_scatter_single", "reduce_scatter_tensor")(part, grad, group=group)
        if own is not part:
            own.copy_(part)
        # An all-reduce is this and a gathering of sums, which would be rounded afterwards.
        if whole is not own:
            _single("all_gather_single", "all_gather_into_tensor")(whole, own, group=group)

    return sum_up_rows, whole
