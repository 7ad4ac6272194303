"""A teacher's logits in 8 bits: its operands, when they are refused, and their correction."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cce_dist.backends.triton.forward.operands import EightBit, Finished
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.kernels.teacher.eight_bits import (
    correct_kernel,
    large_columns_kernel,
    large_parts_kernel,
    refuse_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.screened.quantize import Sums
from cce_dist.backends.triton.screened.steps import eight_bits_of
from cce_dist.options import TOKEN_BLOCK, Screen

# Logits are computed in full if the error of 8-bit ones, in nats, has a root mean square over
# tokens above the first, or a standard deviation above the second in one token. int8 has 0.02 on
# skewed softmaxes, as much as dense logits in bf16 from 8 on.
MAX_ERROR, MAX_OF_TOKEN = 2.0**-4, 0.5
# A column is corrected if its mass in a block is at least LARGE, in probabilities. No block has
# above 1,024 such columns. Masses of the first launches may be too large, so more are listed.
LARGE, MOST = 1 / 8, 16384
# Of `large_parts_kernel`: programs of a block; columns and dims at a time, stages. On GPUs with
# 99 KB of shared memory no more stages fit.
PARTS, STEP = 16, (64, 64, 3)


@dataclass(frozen=True)
class TeacherInEightBits:
    operands: EightBit
    variance: Tensor  # [N_padded] fp32, nats^2: of the error of a token's logits
    shape: Tensor  # [3] int32: see `forward_kernel`; no blocks if 8 bits are refused
    full: Tensor  # [1] int32: 1 if they are
    # [num_blocks, V_local] bf16 masses without the student's softcap', which the state's have;
    # None: there is no such softcap
    plain_mass: Tensor | None

    @classmethod
    def of(
        cls,
        student: ForwardState,
        teacher: ForwardState,
        shape: Tensor,
        screen: Screen,
        sums: Sums | None,
    ) -> TeacherInEightBits:
        """Quantises the teacher's weight and hidden states.

        Args:
            shape: [3] of the forward in full precision, whose blocks become 0 if 8 bits will do.
            sums: as of `eight_bits_of`.
        """
        operands, rounding = eight_bits_of(teacher, screen, sums)
        variance = rounding.variance
        eight, full = torch.empty_like(shape), torch.empty_like(teacher.count)
        start(refuse_kernel, (1,))(
            *(variance, teacher.count, shape, eight, full, MAX_ERROR**2, MAX_OF_TOKEN**2),
            BLOCK=1024,
        )
        plain_mass = None
        if student.head.softcap is not None:
            assert teacher.buffers.mass is not None
            plain_mass = torch.empty_like(teacher.buffers.mass)
        return cls(operands, variance, eight, full, plain_mass)

    def correct(
        self, student: ForwardState, teacher: ForwardState, lse: Tensor, of: Finished, kl: Tensor
    ) -> None:
        """Corrects `of.lse` and `kl`, [N_padded], by exact logits of the columns of much mass.

        Args: lse: [N_padded] the student's.
        """
        column, number = self._large_columns(teacher)
        part = lse.new_empty(3, PARTS, len(lse))
        self._sum_parts(student, teacher, column, number, lse, of.lse, part)
        start(correct_kernel, (teacher.num_blocks,))(
            *(teacher.count, self.shape, self.variance, part, of.lse, kl, len(lse)),
            PARTS=PARTS,
            TOKENS=TOKEN_BLOCK,
        )

    def _large_columns(self, teacher: ForwardState) -> tuple[Tensor, Tensor]:
        """Returns the columns of much mass of each block, [num_blocks, MOST], and their number."""
        mass = teacher.buffers.mass if self.plain_mass is None else self.plain_mass
        assert mass is not None
        num_blocks, num_columns = mass.shape
        column = mass.new_empty(num_blocks, MOST, dtype=torch.int32)
        number = mass.new_empty(num_blocks, dtype=torch.int32)
        start(large_columns_kernel, (num_blocks,))(
            mass,
            teacher.count,
            self.shape,
            column,
            number,
            num_columns,
            LARGE,
            BLOCK_N=TOKEN_BLOCK,
            BLOCK_V=8192,
            MOST=MOST,
            num_warps=8,
        )
        return column, number

    def _sum_parts(
        self,
        student: ForwardState,
        teacher: ForwardState,
        column: Tensor,
        number: Tensor,
        lse: Tensor,
        teacher_lse: Tensor,
        part: Tensor,  # written
    ) -> None:
        eight = self.operands
        columns, block_k, stages = STEP
        operands, strides, numbers = [], [], []
        for state in (student, teacher):
            hidden, head = state.packed, state.head
            operands += [hidden, state.weight, state.or_dummy(head.bias)]
            strides += [hidden.stride(0), state.weight.stride(0)]
            numbers += [head.logit_scale, head.softcap or 1.0]
        start(large_parts_kernel, (PARTS, teacher.num_blocks))(
            *operands,
            eight.hidden,
            eight.weight,
            eight.of_columns,
            eight.of_tokens,
            column,
            number,
            lse,
            teacher_lse,
            part,
            len(lse),
            teacher.weight.shape[0],
            student.weight.shape[1],
            teacher.weight.shape[1],
            *strides,
            eight.hidden.stride(0),
            eight.weight.stride(0),
            *numbers,
            MOST=MOST,
            PARTS=PARTS,
            COLUMNS=columns,
            TOKENS=TOKEN_BLOCK,
            BLOCK_K=block_k,
            STAGES=stages,
            ACCUMULATOR=eight.accumulator,
            PRECISION="ieee",
            HAS_BIAS=student.head.bias is not None,
            HAS_SOFTCAP=student.head.softcap is not None,
            TEACHER_HAS_BIAS=teacher.head.bias is not None,
            TEACHER_HAS_SOFTCAP=teacher.head.softcap is not None,
        )
