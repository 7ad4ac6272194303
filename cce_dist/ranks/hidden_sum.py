"""Step 4 as an object that a backend is handed: see `protocol.HiddenSum`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist.ranks.merge import reduce_grad_hidden, start_reduce_grad_hidden
from cce_dist.ranks.transport import group_size

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group


@dataclass(frozen=True)
class SumOverRanks:
    """The sum of every rank's part of the hidden gradient.

    Collectives: those of `collectives.reduce_grad_hidden`, once; none for one rank.
    """

    group: Group | None
    scatter: bool  # sequence parallel: each rank keeps its own rows
    num_rows: int  # of hidden on all ranks, tokens that are not computed included
    dtype: torch.dtype  # of a sum

    @property
    def is_local(self) -> bool:
        return group_size(self.group) == 1

    @property
    def part_dtype(self) -> torch.dtype:
        """Parts are summed in fp32; a single rank stores the result right away."""
        return self.dtype if self.is_local else torch.float32

    def start(
        self, part: Tensor, *, finish: Callable[[], object] = lambda: None
    ) -> Callable[[], Tensor]:
        assert self.group is not None
        return start_reduce_grad_hidden(
            part, self.group, scatter=self.scatter, dtype=self.dtype, finish=finish
        )

    def of_tokens(self, part: Tensor, rows: Tensor | None) -> Tensor:
        """Without `scatter` only the computed tokens travel."""
        if self.is_local:
            return self._at_rows(part, rows)
        if self.scatter:
            whole = self._at_rows(part, rows)
            return reduce_grad_hidden(whole, self.group, scatter=True, dtype=self.dtype)
        total = reduce_grad_hidden(part, self.group, scatter=False, dtype=self.dtype)
        return self._at_rows(total, rows)

    def _at_rows(self, part: Tensor, rows: Tensor | None) -> Tensor:
        if rows is None:
            return part
        return part.new_zeros(self.num_rows, part.shape[1]).index_copy_(0, rows, part)
