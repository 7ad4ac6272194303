"""All-gathers of a loss: bounds, tokens, numbers, and checks that ranks agree on sizes.

A group of one rank has no second code path: its collectives return their input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist.core.observer import observed
from cce_dist.core.phases import in_phase
from cce_dist.core.tracing import is_fake, is_traced
from cce_dist.ranks.transport import (
    adapter_of,
    all_gather_into,
    device_of_numbers,
    group_size,
)

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group

# Issues a collective: calls the function that it gets, now or later, and returns a function that
# waits for the collective. See `Courier.issue`.
Issue = Callable[[Callable[[], object]], Callable[[], object]]


def all_gather(tensor: Tensor, group: Group | None, *, begins: bool = False) -> Tensor:
    """Gathers a tensor [...] of every rank in the phase `merge`: [W, ...] in rank order.

    Args: begins: see `in_phase`.
    """
    if group is None:
        return tensor[None]
    with in_phase("merge", begins=begins):
        return start_all_gather(tensor, group)()


def start_all_gather(
    tensor: Tensor, group: Group | None, issue: Issue | None = None
) -> Callable[[], Tensor]:
    """Starts `all_gather` by `issue`, without waiting; without `issue` waits for it at once.

    Returns: a function that waits, and returns the gathered tensor.
    """
    if group is None:
        return lambda: tensor[None]
    size, tensor = group.size(), tensor.contiguous()
    out = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
    wait = None
    if issue is None:
        all_gather_into(out, tensor, group)
    else:
        wait = issue(lambda: all_gather_into(out, tensor, group, async_op=True))

    def finish() -> Tensor:
        if wait is not None:
            wait()
        return out.view(size, *tensor.shape)

    return finish


def gather_bounds(bound: Tensor, group: Group | None) -> Tensor:
    """Gathers [N] of every rank: [W, N] in rank order. Collectives: one all-gather of `bound`."""
    return all_gather(bound, group)


def require(
    condition: Tensor, message: Callable[..., str], async_message: str, *about: object
) -> None:
    """Raises ValueError with message(*about) unless `condition` [] is True.

    On a GPU, and under a tracer, a device-side assertion with `async_message` takes its place: the
    host does not wait.

    Args: about: the tensors of the message, or records of tensors. A recording knows these alone.
    """
    if condition.device.type == "cpu" and not is_traced() and not is_fake(condition):
        _require_now(condition, message, about)
    else:
        torch._assert_async(condition, async_message)


@observed
def _require_now(condition: Tensor, message: Callable[..., str], about: tuple[object, ...]) -> None:
    if not bool(condition):
        raise ValueError(message(*about))


def gather_numbers(numbers: list[int], group: Group | None) -> list[list[int]]:
    """Gathers [W] lists in rank order; the host waits. Collectives: one all-gather of int64."""
    device = device_of_numbers(group)
    return all_gather(torch.tensor(numbers, device=device), group).tolist()


@observed
def require_same_sizes(sizes: Mapping[str, int], device: torch.device, group: Group | None) -> None:
    """Checks that all ranks are about to send tensors of the same sizes.

    gloo ends the process if more bytes arrive than fit. On a GPU, and over MPI, where the ranks
    compare sizes before each collective, this function does nothing.

    Args: sizes: sizes by the names that an error gives them; the same names on every rank.
    Raises:
        ValueError: on every rank; names the sizes that differ, and gives each rank's.
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
    return all_gather(tensor, group).sum(0)


def gather_tokens(hidden: Tensor, group: Group | None) -> Tensor:
    """Gathers [n, ...] of every rank: [W n, ...] in rank order. Collectives: one all-gather."""
    gathered, fill = defer_gather_tokens(hidden, group)
    fill()
    return gathered


def defer_gather_tokens(hidden: Tensor, group: Group | None) -> tuple[Tensor, Callable[[], None]]:
    """Allocates the result of `gather_tokens`, and leaves the collective to the caller.

    Returns: the memory [W n, ...]; and a function that fills it, on the stream on which it is
    called. Collectives: one all-gather, in that function.
    """
    if group is None:
        return hidden, lambda: None
    hidden = hidden.contiguous()
    gathered = hidden.new_empty(group.size() * hidden.shape[0], *hidden.shape[1:])
    return gathered, functools.partial(all_gather_into, gathered, hidden, group)
