"""The logits that a forward keeps for a backward of every column."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.launch.arguments import padded_dim
from cce_dist.backends.triton.launch.tiles import tiles_for
from cce_dist.options import TOKEN_BLOCK

MOST_REGIONS = 2


@dataclass(frozen=True)
class Region:
    """Consecutive columns, and the memory of their logits, which their d_logits then overwrite."""

    first_column: int
    num_columns: int
    memory: Tensor  # [rows, N_padded] in the weight's dtype; rows of whole tiles of columns
    ref: Tensor | None = None  # [N_padded] fp32, log2: the reference subtracted from the logits

    @property
    def last_column(self) -> int:
        return self.first_column + self.num_columns

    def as_logits(self) -> Tensor:
        """Returns the memory, as fp16 if it is bf16: bf16 lacks the digits of a logit near lse."""
        wide = self.memory.element_size() > 2
        return self.memory if wide else self.memory.view(torch.float16)


@dataclass(frozen=True)
class KeptLogits:
    """The last columns' logits, log2, relative to a lower bound of each token's lse, `Region.ref`.
    The forward fills them; the backward computes all other columns' logits again."""

    regions: tuple[Region, ...]  # the region of the last columns first
    workspace: Tensor | None  # memory of one region, which then serves the columns not kept
    # Of a chunk of tokens, all of whose columns a single region has: memory of its hidden states as
    # the forward packs them, [N_padded, D rounded up].
    packed: Tensor | None = None

    @property
    def of_chunk(self) -> bool:
        return self.packed is not None

    @property
    def first_column(self) -> int:
        return self.regions[-1].first_column

    @property
    def by_torch(self) -> bool:
        """Tells whether torch multiplies the d_logits. Those of fp16 are divided first, by a number
        that the host would have to wait for."""
        return self.of_chunk and self.regions[0].memory.dtype != torch.float16

    @property
    def ascending(self) -> tuple[Region | None, ...]:
        """The regions as the forward fills them, in order, then None up to MOST_REGIONS."""
        none = (None,) * (MOST_REGIONS - len(self.regions))
        return (*self.regions[::-1], *none)

    @classmethod
    def make(
        cls, weight: Tensor, num_tokens: int, workspace_bytes: int, grad_weight: Tensor | None
    ) -> KeptLogits | None:
        """Allots memory for the logits of as many last columns as fit: in the weight's gradient,
        whose values are computed after them, then in a workspace. Returns None if none fit.

        Args: grad_weight: [V_local, D] contiguous, in the weight's dtype; overwritten.
        """
        columns = tiles_for(weight).columns
        padded = triton.cdiv(num_tokens, TOKEN_BLOCK) * TOKEN_BLOCK
        num_tiles = triton.cdiv(weight.shape[0], columns)
        regions: list[Region] = []
        refs = weight.new_empty(MOST_REGIONS, padded, dtype=torch.float32)
        if grad_weight is not None:
            dim = weight.shape[1]
            # The gradient's first rows: as many as are still unwritten when these logits are used.
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

    @classmethod
    def make_for_chunk(cls, weight: Tensor, num_tokens: int) -> KeptLogits:
        """Allots memory for a chunk of tokens: all logits, and hidden states."""
        columns = tiles_for(weight).columns
        padded = triton.cdiv(num_tokens, TOKEN_BLOCK) * TOKEN_BLOCK
        memory = weight.new_empty(triton.cdiv(weight.shape[0], columns) * columns, padded)
        ref = weight.new_empty(padded, dtype=torch.float32)
        packed = weight.new_empty(padded, padded_dim(weight))
        return cls((Region(0, weight.shape[0], memory, ref),), None, packed)


def tiles_in(num_bytes: int, weight: Tensor, padded: int) -> int:
    return num_bytes // (tiles_for(weight).columns * padded * weight.element_size())
