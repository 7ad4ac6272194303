"""Both heads' forwards over this rank's shard: operands, launches, splits merged."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce_dist.backends.protocol import ColumnFilter, ForwardRequest
from cce_dist.backends.triton.filter.marks import Marks, MassFactors, marks_of
from cce_dist.backends.triton.forward.hopper import Groups, num_groups
from cce_dist.backends.triton.forward.operands import EightBit, Finished, ForwardLaunch
from cce_dist.backends.triton.forward.shares import mass_factors
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.forward.targets import Placed, add_targets, start_products
from cce_dist.backends.triton.kernels.teacher.divergence import divergence_kernel
from cce_dist.backends.triton.kernels.teacher.forward import teacher_forward_kernel
from cce_dist.backends.triton.launch.arguments import descriptor_of
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import (
    KernelTiles,
    is_wide,
    takes_tma,
    tiles_for,
)
from cce_dist.backends.triton.screened.quantize import Sums
from cce_dist.backends.triton.teacher.eight_bits import TeacherInEightBits
from cce_dist.core.stats import Stats, split_lse
from cce_dist.core.types import Head, Tokens, Wanted
from cce_dist.options import TOKEN_BLOCK, Screen

# Columns of a tile: two models' products lie in registers side by side.
COLUMNS = 128
# Stages of Hopper's kernel: the student's logits take the shared memory of one.
STAGES = 3


@dataclass(frozen=True)
class MergedState:
    """One model's splits, merged."""

    lse: Tensor  # [N_padded] in the order of the blocks; float64 of fp32 inputs
    lse_of_tokens: Tensor  # [N] the same in the caller's order
    placed: Placed
    mass: Tensor
    factors: MassFactors
    log_dropped: Tensor  # [N]
    seed: Tensor
    of_targets: Tensor  # of `start_products`
    divergence: tuple[Tensor, ...]  # of a teacher, see `HeadStates.divergence`; () of a student


def merged_state(
    state: ForwardState,
    last: ForwardLaunch,
    num_launches: int,
    order: Tensor | None,
    order_as: torch.dtype | None,
    beside: tuple[HeadStates, MergedState] | None = None,
) -> MergedState:
    """Args: beside: of a teacher: both states, and its student's splits, merged."""
    products, divergence, student = start_products(state), (), None
    try:
        finished = state.merge(last)
        if beside is not None:
            heads, of_student = beside
            student = of_student.of_targets, heads.student.head
            divergence = heads.divergence(last, of_student.lse, _whole(finished))
            if heads.eight is not None:
                lse = of_student.lse.float()
                heads.eight.correct(*heads.states, lse, finished, divergence[0])
        if beside is not None and beside[0].reverse:
            # Its masses are sums of the student's probabilities.
            factors = beside[1].factors
        else:
            factors = mass_factors(state, finished, num_launches, None)
    finally:
        of_targets = products()
    placed = add_targets(state, finished, of_targets, order, order_as, student)
    mass = state.buffers.mass
    assert mass is not None and placed.log_dropped is not None and placed.seed is not None
    lse = _whole(finished)
    of_caller = placed.lse
    if finished.lse_rest is not None:
        of_caller = lse[: len(of_caller)]
        if order is not None:
            of_caller = torch.empty_like(of_caller).scatter_(0, order, of_caller)
    of_tokens = placed.log_dropped, placed.seed, of_targets, divergence
    return MergedState(lse, of_caller, placed, mass, factors, *of_tokens)


def stats_of(student: MergedState) -> Stats:
    lse, rest = student.lse_of_tokens, None
    if lse.dtype == torch.float64:
        lse, rest = split_lse(lse)
    return Stats(lse, student.placed.target_logit, lse_rest=rest)


def _whole(finished: Finished) -> Tensor:
    """Returns lse with its rest, in float64 if it has one."""
    lse, rest = finished.lse, finished.lse_rest
    return lse if rest is None else lse.double() + rest


@dataclass(frozen=True)
class HeadStates:
    """The states of both heads, whose launches compute the same programs and tiles."""

    student: ForwardState
    teacher: ForwardState
    reverse: bool  # see `ForwardRequest`: the models change places before the kernels
    beta: float | None  # see `Mixture`; None: there is none
    shape: Tensor  # [3] of launches in full precision; no blocks if the teacher's go by 8 bits
    eight: TeacherInEightBits | None  # None: they do not

    @classmethod
    def of(
        cls, tokens: tuple[Tokens, Tokens], heads: tuple[Head, Head], request: ForwardRequest
    ) -> HeadStates:
        """Packs the tokens. Args: tokens, heads: of the student and of the teacher."""
        head, teacher_head = heads
        weights = (head.weight, teacher_head.weight)
        tiles = tiles_for(max(weights, key=Tensor.element_size))
        softcaps = head.softcap is not None or teacher_head.softcap is not None
        equal = weights[0].dtype == weights[1].dtype
        if softcaps or not equal or any(num_groups(each, tiles) == 1 for each in weights):
            tiles = replace(tiles, columns=min(tiles.columns, COLUMNS))
        student, teacher = (
            ForwardState.of(
                each, of, Wanted(), True, None, tiles=tiles, beside=_row_bytes(other.weight)
            )
            for each, of, other in (
                (tokens[0], head, teacher_head),
                (tokens[1], teacher_head, head),
            )
        )
        beta = None if request.mixture is None else request.mixture.beta
        return cls(student, teacher, request.reverse, beta, student.shape, None)

    def in_eight_bits(self, screen: Screen, sums: Sums | None) -> HeadStates:
        """Returns the same states, with the teacher's logits in 8 bits if they will do."""
        shape = self.shape.clone()
        eight = TeacherInEightBits.of(self.student, self.teacher, shape, screen, sums)
        return replace(self, shape=shape, eight=eight)

    @property
    def states(self) -> tuple[ForwardState, ForwardState]:
        return self.student, self.teacher

    @property
    def far_and_near(self) -> tuple[ForwardState, ForwardState]:
        """Both, last the model whose probabilities weigh the log ratios."""
        return (self.teacher, self.student) if self.reverse else self.states

    @property
    def of_ratio(self) -> float:
        """A column's score is its mass plus this times the size of its log ratios' sum, in bits:
        docs/design/distillation.md#jensen-shannon."""
        largest = math.log(2) if self.beta is None else -math.log1p(-self.beta)
        return math.log(2) * max(1.0, math.log(2) / largest)

    @property
    def tiles(self) -> KernelTiles:
        return self.student.tiles

    def launch(self, launch: ForwardLaunch, threshold: float) -> None:
        """Launches the forward in full precision and, if the teacher is screened, that in 8 bits:
        one of the two has blocks to compute."""
        portable = self.student.groups == 1 or launch.robust
        way = self._launch_portable if portable else self._launch_hopper
        way(launch, threshold, self.shape, None)
        if self.eight is not None:
            way(launch, threshold, self.eight.shape, self.eight.operands)

    def _launch_hopper(
        self, launch: ForwardLaunch, threshold: float, shape: Tensor, eight: EightBit | None
    ) -> None:
        from cce_dist.backends.triton.kernels.teacher.hopper import hopper_teacher_kernel

        far, near = self.far_and_near
        grouping = Groups(far.programs, far.groups, self.tiles, threshold, False)
        operands = []
        for state, (hidden, weight) in zip(self.far_and_near, self._operands(eight), strict=True):
            # As many bytes of a row are loaded at a time.
            dims = self.tiles.dims * far.weight.element_size() // weight.element_size()
            of_state = replace(grouping, tiles=replace(self.tiles, dims=dims))
            operands += of_state.descriptors(hidden, weight)
            operands.append(state.or_dummy(state.head.bias))
        start(hopper_teacher_kernel, (far.programs,))(
            *operands,
            *self._memory(shape, eight),
            launch.number,
            far.buffers.size,
            far.packed.shape[0],
            *far.weight.shape,
            near.weight.shape[1],
            far.head.logit_scale,
            near.head.logit_scale,
            threshold,
            self.beta or 0.0,
            self.of_ratio,
            BLOCK_N=TOKEN_BLOCK,
            ROWS=grouping.rows,
            BLOCK_D=self.tiles.dims,
            STAGES=STAGES,
            HAS_BIAS=far.head.bias is not None,
            TEACHER_HAS_BIAS=near.head.bias is not None,
            IS_REVERSE=self.reverse,
            IS_JSD=self.beta is not None,
            num_warps=4,
        )

    def _operands(self, eight: EightBit | None) -> list[tuple[Tensor, Tensor]]:
        """Returns hidden states and weight of both models, as the products read them."""
        operands = [(x.packed[:, : x.weight.shape[1]], x.weight) for x in self.far_and_near]
        return operands if eight is None else [operands[0], (eight.hidden, eight.weight)]

    def _memory(self, shape: Tensor, eight: EightBit | None) -> list[Tensor | None]:
        """Returns what both forward kernels take between the operands and the launch's number."""
        far, near = self.far_and_near
        buffers = far.buffers, near.buffers
        of_each = [
            [getattr(each, name) for each in buffers] for name in ("lower", "split_states", "mass")
        ]
        of_eight = [shape, shape] if eight is None else [eight.of_columns, eight.of_tokens]
        return [*of_eight, far.count, shape, *of_each[0], *of_each[1], *of_each[2]]

    def _launch_portable(
        self, launch: ForwardLaunch, threshold: float, shape: Tensor, eight: EightBit | None
    ) -> None:
        (far, near), tiles = self.far_and_near, self.tiles
        plain_mass = None if self.eight is None else self.eight.plain_mass
        operands, strides, use_tma = [], [], []
        for state, (hidden, weight) in zip(self.far_and_near, self._operands(eight), strict=True):
            uses = takes_tma(weight)
            operands += [
                descriptor_of(hidden, TOKEN_BLOCK, tiles.dims, uses),
                descriptor_of(weight, state.columns, tiles.dims, uses),
                state.or_dummy(state.head.bias),
            ]
            strides += [hidden.stride(0), weight.stride(0)]
            use_tma.append(uses)
        start(teacher_forward_kernel, (far.grid,))(
            *operands,
            *self._memory(shape, eight),
            far.or_dummy(plain_mass),
            launch.number,
            launch.end_tile,
            far.buffers.size,
            far.packed.shape[0],
            *far.weight.shape,
            near.weight.shape[1],
            *strides,
            far.head.logit_scale,
            far.head.softcap or 1.0,
            near.head.logit_scale,
            near.head.softcap or 1.0,
            threshold,
            self.beta or 0.0,
            self.of_ratio,
            BLOCK_N=TOKEN_BLOCK,
            BLOCK_V=far.columns,
            BLOCK_D=tiles.dims,
            USE_TMA=use_tma[0],
            TEACHER_USE_TMA=use_tma[1],
            PRECISION="ieee",
            WIDE=is_wide(far.weight) or is_wide(near.weight),
            HAS_BIAS=far.head.bias is not None,
            HAS_SOFTCAP=far.head.softcap is not None,
            TEACHER_HAS_BIAS=near.head.bias is not None,
            TEACHER_HAS_SOFTCAP=near.head.softcap is not None,
            TEACHER_ACCUMULATOR=tl.float32 if eight is None else eight.accumulator,
            IS_SCREENED=eight is not None,
            IS_REVERSE=self.reverse,
            IS_JSD=self.beta is not None,
            IS_ROBUST=launch.robust,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def divergence(
        self, last: ForwardLaunch, lse: Tensor, teacher_lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Merges the splits' KL, and `Marks.of_dropped` if it is reverse, [N_padded] in the blocks'
        order."""
        states = [
            state.buffers.split_states[last.number % len(state.buffers.split_states)]
            for state in self.far_and_near
        ]
        padded, block = self.student.packed.shape[0], 128
        new = self.student.buffers.lower.new_empty
        out = new(padded), new(padded) if self.reverse else lse
        lses = (teacher_lse, lse) if self.reverse else (lse, teacher_lse)
        start(divergence_kernel, (triton.cdiv(padded, block),))(
            self.student.count,
            self.student.shape,
            *states,
            *lses,
            *out,
            padded,
            self.student.buffers.size,
            TOKENS=TOKEN_BLOCK,
            BLOCK_N=block,
            IS_REVERSE=self.reverse,
        )
        return out


def marks_of_heads(
    heads: HeadStates,
    student: MergedState,
    teacher: tuple[Tensor, MassFactors],  # see `marks_of`
    rule: ColumnFilter,
    looseness: float = 1.0,
) -> Marks:
    """Returns `marks_of` both heads, without `Marks.of_dropped`."""
    return marks_of(
        student.mass,
        student.factors,
        heads.student.count,
        student.log_dropped,
        student.seed,
        heads.student.weight.dtype,
        threshold=rule.threshold,
        draws=rule.draws,
        order=student.placed.order,
        looseness=looseness,
        teacher=teacher,
        reverse=heads.reverse,
        of_ratio=heads.of_ratio,
    )


def _row_bytes(weight: Tensor) -> int:
    return weight.shape[1] * weight.element_size()
