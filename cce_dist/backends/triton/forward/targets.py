"""The targets' logits, computed beside the forward's last kernels; and each token's results, put in
the caller's order."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cce_dist.backends.triton.filter.marks import order_dtype
from cce_dist.backends.triton.forward.operands import Finished
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.kernels.forward.targets import target_products_kernel, targets_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import is_wide
from cce_dist.core.streams import start_on_side_stream
from cce_dist.core.types import Head
from cce_dist.options import TOKEN_BLOCK

# Target columns of one program: two programs share a block, as loads take most of their time.
TARGETS = 64


@dataclass(frozen=True)
class Placed:
    """Results of each token, in the caller's order, and vectors that the marks keep."""

    lse: Tensor  # [N] fp32, of this shard
    target_logit: Tensor  # [N] fp32
    log_dropped: Tensor | None  # [N] fp32: see `Finished`
    seed: Tensor | None  # [1] int32
    order: Tensor | None  # [N] int16 or int32: see `Marks`


def start_products(state: ForwardState) -> Callable[[], Tensor]:
    """Starts the products of each block's target columns with its tokens, on a side stream: the
    next kernels of the current stream leave most of the device idle.

    Returns: a function that waits for the products and returns them, [num_blocks, 128, 128] fp32;
    call it even after an error.
    """
    weight, bias = state.weight, state.head.bias
    size = (state.num_blocks, TOKEN_BLOCK, TOKEN_BLOCK)
    products = weight.new_empty(size, dtype=torch.float32)
    launch = functools.partial(
        start(target_products_kernel, (TOKEN_BLOCK // TARGETS, state.num_blocks)),
        state.packed,
        weight,
        state.count if bias is None else bias,
        state.targets,
        state.count,
        products,
        weight.shape[1],
        state.packed.stride(0),
        weight.stride(0),
        TOKENS=TOKEN_BLOCK,
        TARGETS=TARGETS,
        BLOCK_D=state.tiles.dims,
        PRECISION="ieee",
        HAS_BIAS=bias is not None,
        num_warps=state.tiles.warps * TARGETS // TOKEN_BLOCK,
        num_stages=state.tiles.target_stages or state.tiles.stages,
    )
    wait = start_on_side_stream(weight.device, launch)

    def finish() -> Tensor:
        wait()
        return products

    return finish


def add_targets(
    state: ForwardState,
    finished: Finished,
    products: Tensor,  # of `start_products`
    order: Tensor | None,  # [N] int64: token i of the blocks is the caller's token order[i]
    order_as: torch.dtype | None = None,  # of the marks' order; None: `order_dtype`
    student: tuple[Tensor, Head] | None = None,
    full: Tensor | None = None,
) -> Placed:
    """Adds the targets' logits, and marks the targets' columns as kept, whatever their mass.

    Args:
        student: of a teacher's state: its student's `products` and head, whose softcap' the dropped
            sums have.
        full: of `Screened`: statistics are those of a tail, which loses these columns.
    """
    num_tokens, score = len(state.tokens), finished.dropped is not None
    student_softcap = None if student is None else student[1].softcap
    new, short = finished.lse.new_empty, order_as or order_dtype(num_tokens)
    placed = Placed(
        lse=new(num_tokens),
        target_logit=new(num_tokens),
        log_dropped=new(num_tokens) if score else None,
        seed=new(1, dtype=torch.int32) if score else None,
        order=None if order is None else new(num_tokens, dtype=short),
    )

    def or_dummy(tensor: Tensor | None) -> Tensor:
        return state.count if tensor is None else tensor

    start(targets_kernel, (state.num_blocks,))(
        products,
        state.targets,
        finished.lse,
        or_dummy(state.buffers.mass),
        or_dummy(finished.dropped),
        or_dummy(finished.unkept),
        or_dummy(finished.entropy),
        or_dummy(finished.sum_p2),
        or_dummy(full),
        finished.target_logit,
        state.count,
        or_dummy(order),
        placed.lse,
        placed.target_logit,
        or_dummy(placed.log_dropped),
        or_dummy(placed.seed),
        or_dummy(placed.order),
        products if student is None else student[0],
        num_tokens,
        state.weight.shape[0],
        state.scale,
        state.head.softcap or 1.0,
        student_softcap or 1.0,
        BLOCK=TOKEN_BLOCK,
        WIDE=is_wide(state.weight),
        HAS_SOFTCAP=state.head.softcap is not None,
        HAS_SCORE=score,
        HAS_UNKEPT=state.has_unkept,
        HAS_ENTROPY=full is not None and finished.entropy is not None,
        HAS_SQUARES=full is not None and finished.sum_p2 is not None,
        HAS_ORDER=order is not None,
        HAS_STUDENT=student is not None,
        STUDENT_HAS_SOFTCAP=student_softcap is not None,
        num_warps=8,
    )
    return placed
