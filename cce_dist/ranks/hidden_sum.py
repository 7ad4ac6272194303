"""Step 4: the sum of the hidden gradient over the ranks, which a backend starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist.core.phases import in_phase
from cce_dist.core.streams import start_on_side_stream
from cce_dist.ranks.transport import (
    all_gather_into,
    all_reduce,
    group_size,
    reduce_scatter_into,
)

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group


@dataclass(frozen=True)
class SumOverRanks:
    """The sum of the hidden gradients of all ranks; implements `protocol.HiddenSum`.

    Collectives: those of `reduce_grad_hidden`, once; none for one rank.
    """

    group: Group | None
    scatter: bool  # sequence parallel: each rank keeps its own rows
    num_rows: int  # rows of hidden on all ranks, tokens that are not computed included
    dtype: torch.dtype  # the sum's

    @property
    def is_local(self) -> bool:
        return group_size(self.group) == 1

    @property
    def part_dtype(self) -> torch.dtype:
        """The dtype of this rank's part: ranks sum in fp32; a single rank stores the result."""
        return self.dtype if self.is_local else torch.float32

    def start(
        self, part: Tensor, *, finish: Callable[[], object] = lambda: None
    ) -> Callable[[], Tensor]:
        assert self.group is not None
        return start_reduce_grad_hidden(
            part, self.group, scatter=self.scatter, dtype=self.dtype, finish=finish
        )

    def of_tokens(self, part: Tensor, rows: Tensor | None) -> Tensor:
        """Sums the computed tokens' gradients: see `HiddenSum`. Without `scatter` only these tokens
        travel."""
        if self.is_local:
            return self._at_rows(part, rows)
        if self.scatter:
            grad = self._at_rows(part, rows)
            return reduce_grad_hidden(grad, self.group, scatter=True, dtype=self.dtype)
        total = reduce_grad_hidden(part, self.group, scatter=False, dtype=self.dtype)
        return self._at_rows(total, rows)

    def _at_rows(self, part: Tensor, rows: Tensor | None) -> Tensor:
        if rows is None:
            return part
        return part.new_zeros(self.num_rows, part.shape[1]).index_copy_(0, rows, part)


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
        [N, D] in `dtype`, or with `scatter` (sequence parallel) this rank's rows [N / W, D].
        Without a group grad_hidden itself.
    Collectives: one reduce-scatter of grad_hidden over `group`. Without `scatter` an all-gather of
        the sum in `dtype` follows it; or, if `dtype` is no narrower than grad_hidden's or N is no
        multiple of W, one all-reduce takes the place of both.
    """
    if group is None:
        return grad_hidden
    reduce, total = _reduction(grad_hidden, group, scatter, dtype)
    reduce()
    return total


@in_phase("reduce")
def start_reduce_grad_hidden(
    grad_hidden: Tensor,
    group: Group,
    *,
    scatter: bool,
    dtype: torch.dtype,
    finish: Callable[[], object],  # completes grad_hidden, on the stream of the sum
) -> Callable[[], Tensor]:
    """Starts `reduce_grad_hidden`; on a GPU it overlaps the current stream's later work.

    Returns: a function that makes the current stream wait, and returns the sum. Until then
    grad_hidden, and the tensors that `finish` uses, must not be freed.
    """
    reduce, total = _reduction(grad_hidden, group, scatter, dtype)

    def finish_and_reduce() -> None:
        finish()
        reduce()

    join = start_on_side_stream(grad_hidden.device, finish_and_reduce)

    def wait() -> Tensor:
        join()
        return total

    return wait


def _reduction(
    grad: Tensor, group: Group, scatter: bool, dtype: torch.dtype
) -> tuple[Callable[[], None], Tensor]:
    """Returns a function that calls the collectives of `reduce_grad_hidden`, and the tensor of the
    sum, which they write. The function allocates nothing, so it may run on another stream."""
    size, num_tokens = group.size(), grad.shape[0]
    narrows = dtype.itemsize < grad.element_size()
    if not scatter and not (num_tokens % size == 0 and narrows):
        total = torch.empty_like(grad, dtype=dtype) if dtype != grad.dtype else grad

        def reduce_all() -> None:
            all_reduce(grad, group)
            if total is not grad:
                total.copy_(grad)

        return reduce_all, total
    rows = grad.view(size, num_tokens // size, *grad.shape[1:])[group.rank()]
    # NCCL may store its sum in place of this rank's summand, unless that memory is the result.
    if not grad.is_cuda or dtype == grad.dtype:
        rows = torch.empty_like(rows)
    stored = torch.empty_like(rows, dtype=dtype) if dtype != grad.dtype else rows
    total = stored if scatter else torch.empty_like(grad, dtype=dtype)

    def reduce_rows() -> None:
        reduce_scatter_into(rows, grad, group)
        if stored is not rows:
            stored.copy_(rows)
        # An all-reduce gathers wide sums. Here each rank rounds its rows first, and gathers those.
        if total is not stored:
            all_gather_into(total, stored, group)

    return reduce_rows, total
