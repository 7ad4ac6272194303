"""Logits of every column that the forward keeps for `exact`'s backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.launch.tiles import tiles_for
from cce_dist.options import TOKEN_BLOCK

MOST_REGIONS = 2


@dataclass(frozen=True)
class Region:
    """Consecutive columns and the memory of their logits, then of their d_logits."""

    first_column: int
    num_columns: int
    memory: Tensor  # [rows, N_padded] in the weight's dtype, whole tiles of columns
    ref: Tensor | None = None  # [N_padded] fp32, log2: reference that is subtracted from the logits

    @property
    def last_column(self) -> int:
        return self.first_column + self.num_columns

    def as_logits(self) -> Tensor:
        """fp16 has the digits that a logit near lse needs, where bf16 has not."""
        wide = self.memory.element_size() > 2
        return self.memory if wide else self.memory.view(torch.float16)


@dataclass(frozen=True)
class KeptLogits:
    """The last columns' logits, log2, over a lower bound of each token's lse, `Region.ref`: from
    the forward to the backward, which computes the others again."""

    regions: tuple[Region, ...]  # the last columns first
    workspace: Tensor | None  # the memory of one of them, which then serves the others

    @property
    def first_column(self) -> int:
        return self.regions[-1].first_column

    @property
    def ascending(self) -> tuple[Region | None, ...]:
        """MOST_REGIONS, in the order in which the forward makes them; None: none."""
        none = (None,) * (MOST_REGIONS - len(self.regions))
        return (*self.regions[::-1], *none)

    @classmethod
    def make(
        cls, weight: Tensor, num_tokens: int, workspace_bytes: int, grad_weight: Tensor | None
    ) -> KeptLogits | None:
        """Makes room for as many as fit the workspace, and before them in the weight's gradient,
        whose own values come later; None: for none.

        Args: grad_weight: [V_local, D] contiguous, in the weight's dtype, to be written.
        """
        columns = tiles_for(weight).columns
        padded = triton.cdiv(num_tokens, TOKEN_BLOCK) * TOKEN_BLOCK
        num_tiles = triton.cdiv(weight.shape[0], columns)
        regions: list[Region] = []
        refs = weight.new_empty(MOST_REGIONS, padded, dtype=torch.float32)
        if grad_weight is not None:
            dim = weight.shape[1]
            # The first rows of the gradient, as many as the columns before these will not need.
            tiles = num_tiles * dim // (padded + dim)
            if tiles > 0:
                memory = grad_weight.view(-1)[: tiles * columns * padded].view(-1, padded)
                first = (num_tiles - tiles) * columns
                regions.append(Region(first, weight.shape[0] - first, memory, refs[0]))
                num_tiles -= tiles
        tiles = min(num_tiles, tiles_in(workspace_bytes, weight, padded))
        workspace = None
        if tiles > 0:
            workspace = weight.new_empty(tiles * columns, padded)
            first = (num_tiles - tiles) * columns
            stop = regions[0].first_column if regions else weight.shape[0]
            regions.append(Region(first, stop - first, workspace, refs[1]))
        return cls(tuple(regions), workspace) if regions else None


def tiles_in(num_bytes: int, weight: Tensor, padded: int) -> int:
    return num_bytes // (tiles_for(weight).columns * padded * weight.element_size())
