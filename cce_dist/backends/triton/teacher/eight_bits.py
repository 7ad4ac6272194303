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
from cce_dist.backends.triton.screened.quantize import quantize_tokens
from cce_dist.options import TOKEN_BLOCK

# Logits are computed in full if the root mean square over tokens of the error of an 8-bit logit is
# above it, nats. int8 has 0.02 on skewed softmaxes, and dense logits in bf16 from 8 on as much.
MAX_ERROR = 2.0**-4
# A column is corrected if its mass in a block is at least this, in probabilities: no block has more
# such columns than MOST, but for bounds of masses that are too high.
LARGE, MOST = 1 / 8, 1024
# Of a program of `large_parts_kernel`: columns, dims, stages.
PARTS = (64, 64, 3)


@dataclass(frozen=True)
class TeacherInEightBits:
    operands: EightBit
    shape: Tensor  # [3] int32: see `forward_kernel`; no blocks if 8 bits are refused
    full: Tensor  # [1] int32: 1 if they are

    @classmethod
    def of(cls, teacher: ForwardState, shape: Tensor) -> TeacherInEightBits | None:
        """Returns the 8-bit operands of the teacher's forward; None: its head has no 8-bit copy.

        Args:
            shape: [3] of the forward in full precision, whose blocks become 0 if 8 bits will do.
        """
        rows, dim = teacher.head.quantized, teacher.weight.shape[1]
        if rows is None:
            return None
        hidden = teacher.packed[:, :dim]
        values, of_tokens, variance = quantize_tokens(hidden, rows, teacher.head.logit_scale)
        operands = EightBit(values[:, :dim], rows.values[:, :dim], rows.of_rows, of_tokens)
        eight, full = torch.empty_like(shape), torch.empty_like(teacher.count)
        start(refuse_kernel, (1,))(
            *(variance, teacher.count, shape, eight, full, MAX_ERROR**2), BLOCK=1024
        )
        return cls(operands, eight, full)

    def correct(
        self, student: ForwardState, teacher: ForwardState, lse: Tensor, of: Finished, kl: Tensor
    ) -> None:
        """Corrects `of.lse` and `kl`, [N_padded], by exact logits of the columns of much mass.

        Args: lse: [N_padded] the student's.
        """
        num_blocks, columns = teacher.num_blocks, PARTS[0]
        column, number = self._large_columns(teacher)
        part = lse.new_empty(2, MOST // columns, len(lse))
        self._sum_parts(student, teacher, column, number, lse, of.lse, part)
        start(correct_kernel, (num_blocks,))(
            *(number, part, of.lse, kl, len(lse)), MOST=MOST, COLUMNS=columns, TOKENS=TOKEN_BLOCK
        )

    def _large_columns(self, teacher: ForwardState) -> tuple[Tensor, Tensor]:
        """Returns the columns of much mass of each block, [num_blocks, MOST], and their number."""
        mass = teacher.buffers.mass
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
        columns, block_k, stages = PARTS
        operands, strides, numbers = [], [], []
        for state in (student, teacher):
            hidden, head = state.packed, state.head
            operands += [hidden, state.weight, state.or_dummy(head.bias)]
            strides += [hidden.stride(0), state.weight.stride(0)]
            numbers += [head.logit_scale, head.softcap or 1.0]
        start(large_parts_kernel, (MOST // columns, teacher.num_blocks))(
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
