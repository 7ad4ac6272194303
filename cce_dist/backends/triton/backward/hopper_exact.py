"""The launch of `exact` for Hopper: all chunks of the vocabulary by one kernel."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.filter.kept_logits import tiles_in
from cce_dist.backends.triton.forward.hopper import layout_of, num_groups
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import AFTER_HIDDEN, num_programs, takes_tma
from cce_dist.options import TOKEN_BLOCK

# As in kernels/backward/exact_schedule.py: rows of a task's product, and its columns.
ROWS, SIDE = 256, 128
# Numbers that a step of a product's sum takes, and steps that are loaded ahead.
STEP, STAGES = 64, 4
# Tiles of an operand whose rows are a product's, and of one whose rows its sum runs over; and the
# parts of a result, in 16 bits and in fp32, that are stored at a time.
TILES, PART, SUM_PART = ((SIDE, STEP), (STEP, SIDE)), (SIDE, 32), (SIDE, 16)
# Of the workspace, for d_logits of a chunk. With the whole, a call of 8,192 tokens and 2,304 dims
# would take 134 MiB beside its gradients, and one hundredth less time.
SHARE = 7 / 8


def runs_on_hopper(state: BackwardState, grads: GradBuffers, hidden: Tensor) -> bool:
    """Tells whether the kernel can run. It computes all logits, and sums a bias's gradient beside
    the weight's."""
    if state.logits is not None or (grads.bias is not None and grads.weight is None):
        return False
    # Rows of a padded weight may be aligned where the fp32 hidden gradient's are not.
    adds = grads.hidden is None or takes_tma(grads.hidden[0])
    return num_groups(state.weight, state.tiles) == 2 and takes_tma(hidden) and adds


def products_on_hopper(
    state: BackwardState, grads: GradBuffers, hidden: Tensor, most_tiles: int | None, *, left: int
) -> Callable[[int], None]:
    """Prepares SDD, DSD and DDS of all columns.

    Args:
        hidden: [N_padded, D] packed, in the order of the blocks.
        most_tiles: of ROWS columns in a chunk; None: as many as the workspace holds.
        left: multiprocessors that `AFTER_HIDDEN` leaves to collectives.
    Returns: a function that launches a stage of them.
    """
    weight = state.weight
    tokens = triton.cdiv(state.num_blocks * TOKEN_BLOCK, ROWS) * ROWS
    if most_tiles is None:
        most_tiles = max(1, tiles_in(int(SHARE * state.room), weight, tokens))
    tiles = min(most_tiles, triton.cdiv(weight.shape[0], ROWS))
    memory = weight.new_empty(tokens, tiles * ROWS)
    queue = torch.zeros(8, dtype=torch.int32, device=weight.device)

    def launch(stage: int) -> None:
        programs = num_programs(weight) - (left if stage == AFTER_HIDDEN else 0)
        _launch(state, grads, hidden, memory, queue, stage, max(1, programs))

    return launch


def _launch(
    state: BackwardState,
    grads: GradBuffers,
    hidden: Tensor,
    memory: Tensor,  # [tokens, columns of a chunk]
    queue: Tensor,
    stage: int,
    programs: int,
) -> None:
    from cce_dist.backends.triton.kernels.backward.hopper_exact import hopper_exact_kernel

    weight, head, per_token, into = state.weight, state.head, state.per_token, grads.weight
    descriptors = [_describe(matrix, tile) for matrix in (hidden, weight, memory) for tile in TILES]
    # A descriptor stores no other dtype than the shared memory's.
    copies = into is not None and into.dtype == weight.dtype and takes_tma(into)
    sums = per_token.factors if grads.hidden is None else grads.hidden.flatten(0, 1)
    start(hopper_exact_kernel, (programs,))(
        *descriptors,
        _describe(memory, PART),
        _describe(into, PART) if into is not None and copies else state.count,
        _describe(sums, SUM_PART),
        memory,
        state.or_dummy(head.bias),
        state.or_dummy(head.class_weight),
        state.or_dummy(state.sums),
        state.or_dummy(state.bias_sums),
        per_token.targets,
        per_token.factors,
        per_token.rows,
        state.or_dummy(grads.hidden),
        state.or_dummy(into),
        state.or_dummy(grads.bias),
        state.count,
        per_token.grad_scale,
        queue,
        stage,
        state.pieces,
        state.num_tokens,
        state.num_blocks * TOKEN_BLOCK,
        weight.shape[0],
        weight.shape[1],
        memory.shape[1],
        triton.cdiv(memory.shape[1] // ROWS, 2) * ROWS,
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
