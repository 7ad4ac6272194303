"""Where `exact` finds the tokens of each block in hidden."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.local_triton_inputs import pad_tokens
from cce_dist.options import TOKEN_BLOCK


@dataclass(frozen=True)
class Layout:
    """Where the tokens of each block stand in hidden: side by side, or anywhere."""

    straight: Tensor  # [words] int64: bit n: block n's tokens are rows one after the other
    blocks: Tensor  # [num_blocks] int32: those that count, the straight ones first
    first_row: Tensor  # [num_blocks] int32: where each of them starts
    num_straight: Tensor  # [1] int32
    num_blocks: Tensor  # [1] int32

    @classmethod
    def of(cls, rows: Tensor, count: Tensor, num_blocks: int, *, use_tma: bool) -> Layout:
        """Args: rows: [num_blocks * 128] int64, ascending as far as they count."""
        block = torch.arange(num_blocks, device=rows.device)
        ends = rows.view(num_blocks, TOKEN_BLOCK)[:, :: TOKEN_BLOCK - 1]
        full = (block + 1) * TOKEN_BLOCK <= count
        # Rows ascend: 128 of them that span 128 are side by side.
        straight = full & (ends[:, 1] - ends[:, 0] == TOKEN_BLOCK - 1) & use_tma
        bits = pad_tokens(straight.long(), triton.cdiv(num_blocks, 64) * 64, 0).view(-1, 64)
        number = (count + TOKEN_BLOCK - 1) // TOKEN_BLOCK
        before = straight.cumsum(0)
        at = torch.where(straight, before - 1, before[-1] + block - before)
        blocks = torch.empty_like(block).scatter_(0, at, block)
        return cls(
            straight=(bits << torch.arange(64, device=rows.device)).sum(1),
            blocks=blocks.int(),
            first_row=ends[blocks, 0].int(),
            num_straight=before[-1:].int(),
            num_blocks=number.int(),
        )
