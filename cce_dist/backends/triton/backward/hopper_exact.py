"""The launch of `exact` for Hopper: all chunks of the vocabulary by one kernel."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import triton
from torch import Tensor

from cce_dist.backends.triton.backward.hopper_fit import ROWS, round_to_pairs
from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.filter.kept_logits import tiles_in
from cce_dist.backends.triton.forward.hopper import layout_of
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import AFTER_HIDDEN, num_programs, takes_tma
from cce_dist.options import TOKEN_BLOCK

# As in kernels/backward/exact_schedule.py: columns of a task's product.
SIDE = 128
# Numbers that a step of a product's sum takes, and steps that are loaded ahead.
STEP, STAGES = 64, 4
# Tiles of an operand whose rows are a product's, and of one whose rows its sum runs over; and the
# parts of a result, in 16 bits and in fp32, that are stored at a time.
TILES, PART, SUM_PART = ((SIDE, STEP), (STEP, SIDE)), (SIDE, 32), (SIDE, 16)
# Of the workspace, for d_logits of a chunk. With the whole, a call of 8,192 tokens and 2,304 dims
# would take 134 MiB beside its gradients, and one hundredth less time.
SHARE = 7 / 8
# Multiprocessors that the last DDS leaves free for NCCL's kernels, which start after it.
LEFT_TO_COLLECTIVES = 32


def new_chunk(state: BackwardState, most_tiles: int | None) -> Tensor:
    """Makes the memory of a chunk's d_logits.

    Args: most_tiles: the most tiles of ROWS columns; None: as many as the workspace holds.
    """
    weight, tokens = state.weight, round_to_pairs(state.num_blocks)
    if most_tiles is None:
        most_tiles = max(1, tiles_in(int(SHARE * state.room), weight, tokens))
    return weight.new_empty(tokens, min(most_tiles, triton.cdiv(weight.shape[0], ROWS)) * ROWS)


@dataclass(frozen=True)
class HopperMemory:
    """The kernel's memory, beside the operands of every backward."""

    hidden: Tensor  # [N_padded, D] packed, in the order of the blocks
    chunk: Tensor  # [tokens, columns] of a chunk's d_logits: see `new_chunk`
    queue: Tensor  # [8] int32 zeros
    count: Tensor  # [1] int32: tokens that count; -1: nothing is computed


def products_on_hopper(
    state: BackwardState, grads: GradBuffers, memory: HopperMemory, left: int = 0
) -> Callable[[int], None]:
    """Prepares SDD, DSD and DDS of all columns.

    Args: left: multiprocessors that are left to other kernels.
    Returns: a function that launches a stage of them.
    """

    def launch(stage: int) -> None:
        others = LEFT_TO_COLLECTIVES if stage == AFTER_HIDDEN else 0
        programs = max(1, num_programs(state.weight) - max(left, others))
        _launch(state, grads, memory, stage, programs)

    return launch


def _launch(
    state: BackwardState, grads: GradBuffers, memory: HopperMemory, stage: int, programs: int
) -> None:
    from cce_dist.backends.triton.kernels.backward.hopper_exact import hopper_exact_kernel

    hidden, chunk = memory.hidden, memory.chunk
    weight, head, per_token, into = state.weight, state.head, state.per_token, grads.weight
    descriptors = [_describe(matrix, tile) for matrix in (hidden, weight, chunk) for tile in TILES]
    # A descriptor stores no other dtype than the shared memory's.
    copies = into is not None and into.dtype == weight.dtype and takes_tma(into)
    sums = per_token.factors if grads.hidden is None else grads.hidden.flatten(0, 1)
    # The sums of a filter's tail come before the mean's.
    sums_of_mean = (None, None) if state.mean is None else (state.sums, state.bias_sums)
    start(hopper_exact_kernel, (programs,))(
        *descriptors,
        _describe(chunk, PART),
        _describe(into, PART) if into is not None and copies else state.count,
        _describe(sums, SUM_PART),
        chunk,
        state.or_dummy(head.bias),
        state.or_dummy(head.class_weight),
        *(state.or_dummy(None if x is None else x[state.groups :]) for x in sums_of_mean),
        per_token.targets,
        per_token.factors,
        per_token.rows,
        state.or_dummy(grads.hidden),
        state.or_dummy(into),
        state.or_dummy(grads.bias),
        memory.count,
        per_token.grad_scale,
        memory.queue,
        stage,
        state.pieces,
        state.num_tokens,
        state.num_blocks * TOKEN_BLOCK,
        weight.shape[0],
        weight.shape[1],
        chunk.shape[1],
        triton.cdiv(chunk.shape[1] // ROWS, 2) * ROWS,
        grads.weight_stride,
        per_token.scale,
        head.softcap or 1.0,
        STAGES=STAGES,
        HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_ENTROPY=state.has_entropy,
        HAS_SMOOTH=state.has_smooth,
        HAS_MEAN=state.mean is not None,
        HAS_CLASS_WEIGHT=head.class_weight is not None,
        HAS_DSD=grads.hidden is not None,
        HAS_DDS=into is not None,
        HAS_GRAD_BIAS=grads.bias is not None,
        ACCUMULATE=grads.accumulate,
        COPIES_PARTS=copies,
        num_warps=4,
    )


def _describe(matrix: Tensor, tile: tuple[int, int]) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, list(tile), layout_of(*tile, matrix.dtype))
