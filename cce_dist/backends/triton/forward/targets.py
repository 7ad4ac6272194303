"""The targets' logits: their product beside the forward's last kernels, and all that the caller is
given of each token."""

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
from cce_dist.backends.triton.forward.state import Forward
from cce_dist.backends.triton.kernels.forward.targets import target_products_kernel, targets_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import rounds_exp2
from cce_dist.core.streams import start_on_side_stream
from cce_dist.options import TOKEN_BLOCK

# Target columns of one program: two programs a block, whose loads are most of what they do.
TARGETS = 64


@dataclass(frozen=True)
class Placed:
    """Results of each token, in the caller's order, and vectors that the marks keep."""

    lse: Tensor  # [N] fp32, of this shard
    target_logit: Tensor  # [N] fp32
    log_dropped: Tensor | None  # [N] fp32: see `Finished`
    seed: Tensor | None  # [1] int32
    order: Tensor | None  # [N] int16 or int32: see `Marks`


def start_products(run: Forward) -> Callable[[], Tensor]:
    """Starts the products of each block's target columns with its tokens, beside what the current
    stream is given next, which leaves the device idle.

    Returns: a function that waits for them and returns them, [num_blocks, 128, 128] fp32; to be
    called whatever happens."""
    weight, bias = run.weight, run.head.bias
    size = (run.num_blocks, TOKEN_BLOCK, TOKEN_BLOCK)
    products = weight.new_empty(size, dtype=torch.float32)
    launch = functools.partial(
        start(target_products_kernel, (TOKEN_BLOCK // TARGETS, run.num_blocks)),
        run.packed,
        weight,
        run.count if bias is None else bias,
        run.targets,
        run.count,
        products,
        weight.shape[1],
        run.packed.stride(0),
        weight.stride(0),
        TOKENS=TOKEN_BLOCK,
        TARGETS=TARGETS,
        BLOCK_D=run.tiles.dims,
        PRECISION="ieee",
        HAS_BIAS=bias is not None,
        num_warps=run.tiles.warps * TARGETS // TOKEN_BLOCK,
        num_stages=run.tiles.target_stages or run.tiles.stages,
    )
    wait = start_on_side_stream(weight.device, launch)

    def finish() -> Tensor:
        wait()
        return products

    return finish


def add_targets(
    run: Forward,
    finished: Finished,
    products: Tensor,  # of `start_products`
    order: Tensor | None,  # [N] int64: the blocks' i-th token is the caller's order[i]-th
    order_as: torch.dtype | None = None,  # of the marks' order; None: `order_dtype`
) -> Placed:
    """Adds the targets' logits, and marks their columns as kept, whatever their mass."""
    num_tokens, score = len(run.tokens), finished.dropped is not None
    new, short = finished.lse.new_empty, order_as or order_dtype(num_tokens)
    placed = Placed(
        lse=new(num_tokens),
        target_logit=new(num_tokens),
        log_dropped=new(num_tokens) if score else None,
        seed=new(1, dtype=torch.int32) if score else None,
        order=None if order is None else new(num_tokens, dtype=short),
    )

    def or_dummy(tensor: Tensor | None) -> Tensor:
        return run.count if tensor is None else tensor

    start(targets_kernel, (run.num_blocks,))(
        products,
        run.targets,
        finished.lse,
        or_dummy(run.parts.get("mass")),
        or_dummy(finished.dropped),
        or_dummy(finished.unkept),
        finished.target_logit,
        run.count,
        or_dummy(order),
        placed.lse,
        placed.target_logit,
        or_dummy(placed.log_dropped),
        or_dummy(placed.seed),
        or_dummy(placed.order),
        num_tokens,
        run.weight.shape[0],
        run.scale,
        run.head.softcap or 1.0,
        BLOCK=TOKEN_BLOCK,
        WIDE=rounds_exp2(run.weight),
        HAS_SOFTCAP=run.head.softcap is not None,
        HAS_SCORE=score,
        HAS_UNKEPT=run.has_unkept,
        HAS_ORDER=order is not None,
        num_warps=8,
    )
    return placed
