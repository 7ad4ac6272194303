"""Marks: the columns that each block of tokens keeps, and the shares of the others."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import ColumnFilter, Room, Scores
from cce_dist.backends.triton.filter.tail import TAIL_GROUPS
from cce_dist.backends.triton.kernels.filter.column_lists import (
    marks_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.core.types import Head, Tokens
from cce_dist.options import DRAW_FACTOR, DRAW_FACTOR_OF_FORWARD_KL, TOKEN_BLOCK

# Of `marks_kernel`: columns a program, blocks whose masses are loaded at once, warps. A thread has
# two columns, and there are enough threads that their loads hide the memory's latency.
MARKS = (256, 16, 4)


@dataclass(frozen=True)
class MassFactors:
    """Factors of the masses of each token block, one for each of the forward's launches."""

    of_blocks: Tensor  # [num_blocks, launches] fp32
    shape: Tensor  # [3] int32, of the forward
    width: int  # columns of a tile
    groups: int  # splits that a program makes side by side

    @property
    def launches(self) -> int:
        return self.of_blocks.shape[1]


@dataclass(frozen=True)
class Marks:
    """The forward's choice of columns, for the backward: 48 bytes a column at 8,192 tokens."""

    kept: Tensor  # [V_local, ceil(num_blocks / 64)] int64: bit n: block n keeps the column
    drawn: Tensor  # the same bits: the column stands in for others in block n's hidden gradient
    # [groups, V_local] mass of the column in the group's blocks that drop it; the teacher's follow,
    # or, of reverse KL and Jensen-Shannon, the sum of the probabilities times their log ratios
    share: Tensor
    # [N], in the caller's order: log of the sum over columns not kept of exp(z) softcap'(z).
    log_dropped: Tensor
    # [N] int16 or int32: token i of the blocks is the caller's token order[i]; None: token i.
    order: Tensor | None
    seed: Tensor  # [1] int32, from the data: repeatable, but new in the next step
    blocks_per_group: int
    blocks_padded: int  # a power of two above num_blocks
    # [N] `log_dropped` of a teacher's logits; of reverse KL, how far the student's logits are above
    # them in the mean over the columns not kept, weighed by exp(z) softcap'(z), in nats; of
    # Jensen-Shannon such a mean of the log ratios to the mixture, plus the student's lse less the
    # teacher's
    of_dropped: Tensor | None = None

    def room(self, workspace_bytes: int, num_blocks: int) -> int:
        """Returns the workspace's bytes that are left for chunks after the marks, vectors of tokens
        and the tail's sums."""
        return workspace_bytes - 160 * num_blocks * TOKEN_BLOCK - self.num_bytes

    @property
    def num_bytes(self) -> int:
        tensors = (self.kept, self.drawn, self.share, self.log_dropped, self.order)
        tensors += (self.of_dropped,)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    @classmethod
    def like(
        cls, num_tokens: int, num_columns: int, weight: Tensor, *, has_teacher: bool = False
    ) -> Marks:
        """Makes uninitialised marks of the same shapes as a forward's, on the weight's device.

        Args: has_teacher: the forward is that of two heads.
        """
        num_blocks = triton.cdiv(num_tokens, TOKEN_BLOCK)
        per_group = triton.cdiv(num_blocks, TAIL_GROUPS)
        bits = (num_columns, triton.cdiv(num_blocks, 64))
        share = ((1 + has_teacher) * triton.cdiv(num_blocks, per_group), num_columns)
        share_dtype = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
        order = None
        if num_tokens > TOKEN_BLOCK:
            order = weight.new_empty(num_tokens, dtype=order_dtype(num_tokens))
        return cls(
            weight.new_empty(bits, dtype=torch.int64),
            weight.new_empty(bits, dtype=torch.int64),
            weight.new_empty(share, dtype=share_dtype),
            weight.new_empty(num_tokens, dtype=torch.float32),
            order,
            weight.new_empty(1, dtype=torch.int32),
            per_group,
            blocks_padded(num_blocks),
            weight.new_empty(num_tokens, dtype=torch.float32) if has_teacher else None,
        )


def marks_of(
    mass: Tensor,  # [num_blocks, V_local], negative where kept
    factors: MassFactors,
    count: Tensor,
    log_dropped: Tensor,
    seed: Tensor,  # [1] int32
    dtype: torch.dtype,
    *,
    threshold: float,
    draws: bool,
    order: Tensor | None = None,  # [N] of `order_dtype`
    looseness: float = 1.0,
    teacher: tuple[Tensor, MassFactors] | None = None,
    reverse: bool = False,
    of_ratio: float = 0.0,
) -> Marks:
    """Turns column masses into marks; the masses are not needed afterwards.

    Args:
        looseness: how many times too large masses are, which would draw as many columns more.
        teacher: the same of a teacher, whose columns are kept with these; of reverse KL and
            Jensen-Shannon sums of log ratios. Its shares follow those of `mass` in `share`.
        reverse: as of `ForwardRequest`.
        of_ratio: as of `score_of`.
    """
    num_blocks, num_columns = mass.shape
    words = triton.cdiv(num_blocks, 64)
    blocks_per_group = triton.cdiv(num_blocks, TAIL_GROUPS)
    groups = triton.cdiv(num_blocks, blocks_per_group)
    share_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    kept = torch.empty(num_columns, words, dtype=torch.int64, device=mass.device)
    # Where columns are drawn, the kernel writes every word.
    drawn = torch.empty_like(kept) if draws else torch.zeros_like(kept)
    models = 1 if teacher is None else 2
    factor = DRAW_FACTOR_OF_FORWARD_KL if teacher and not reverse else DRAW_FACTOR
    share = torch.empty(models * groups, num_columns, dtype=share_dtype, device=mass.device)
    teacher_mass, teacher_factors = teacher or (mass, factors)
    block, at_once, warps = (4096, 4, 4) if interpreted() else MARKS
    start(marks_kernel, (triton.cdiv(num_columns, block),))(
        mass,
        factors.of_blocks,
        factors.shape,
        count,
        seed,
        kept,
        drawn,
        share,
        teacher_mass,
        teacher_factors.of_blocks,
        share[groups:] if teacher else share,
        num_columns,
        num_blocks,
        words,
        blocks_per_group,
        threshold * factor * looseness,
        of_ratio,
        TOKENS=TOKEN_BLOCK,
        BLOCK_V=block,
        AT_ONCE=at_once,
        HAS_DRAWN=draws,
        WIDTH=factors.width,
        LAUNCHES=factors.launches,
        GROUPS=factors.groups,
        HAS_TEACHER=teacher is not None,
        IS_REVERSE=reverse,
        num_warps=warps,
    )
    padded = blocks_padded(num_blocks)
    return Marks(kept, drawn, share, log_dropped, order, seed, blocks_per_group, padded)


def order_dtype(num_tokens: int) -> torch.dtype:
    return torch.int16 if num_tokens <= 2**15 else torch.int32


def blocks_padded(num_blocks: int) -> int:
    """Returns a power of two above num_blocks, the same for up to 32,512 tokens: kernels are
    compiled for it."""
    return max(256, triton.next_power_of_2(num_blocks + 1))


@dataclass(frozen=True)
class KeptColumns:
    """Marks, and the lse of all ranks, which makes probabilities of their sums."""

    marks: Marks
    lse: Tensor  # [N]
    tail: bool
    draws: bool
    keeps_flat: bool  # the rule keeps all columns of a flat softmax

    @property
    def dropped_mass(self) -> Tensor:
        """Returns each token's probability mass in columns not kept, [N]."""
        return (self.marks.log_dropped - self.lse).exp()

    @property
    def scores(self) -> Marks:
        return self.marks


def keep(
    tokens: Tokens,
    head: Head,
    scores: Scores,
    lse: Tensor,  # [N] over all ranks
    rule: ColumnFilter,
    room: Room,
) -> KeptColumns:
    """Returns the marks of the forward, which has already applied `rule`."""
    assert isinstance(scores, Marks)
    return KeptColumns(scores, lse, rule.tail, rule.draws, rule.keeps_flat)
