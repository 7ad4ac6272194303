"""After the forward: the targets' logits, and their columns kept whatever their mass."""

import triton
import triton.language as tl

from cce_dist.kernels.numbers import LOG2E, softcapped


@triton.jit
def take_from(log_ptrs, mass, lse, mask):
    """The logarithm of a sum, of which `mass` times exp(lse) is no part any more."""
    left = tl.exp2((tl.load(log_ptrs) - lse) * LOG2E)
    left = tl.maximum(left - mass, 0.0)
    tl.store(log_ptrs, lse + tl.log2(left) / LOG2E, mask=mask)


@triton.jit
def targets_kernel(
    packed_ptr,  # [N, stride_pn]: the tokens that count first; N a multiple of BLOCK
    weight_ptr,  # [V, D]
    bias_ptr,  # [V]
    target_ptr,  # [N] int32, -1: none here
    lse_ptr,  # [N] natural log, of this shard
    mass_ptr,  # [num_blocks, V]: its sign set where a target's column was not kept
    dropped_ptr,  # [N] log of the dropped sum: less those columns
    unkept_ptr,  # [N] log of the sum of exp(z) over the same: less those columns, if HAS_UNKEPT
    logit_ptr,  # [N] z of the target, 0 without one: out
    count_ptr,  # [1] int32
    V,
    D,
    stride_pn,
    stride_wv,
    scale,
    softcap,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCORE: tl.constexpr,
    HAS_UNKEPT: tl.constexpr,
):
    """One program: a block's target columns against its tokens, in the forward's own arithmetic.

    nll is then a difference of two numbers that share their rounding.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    token = block * BLOCK + lane
    count = tl.load(count_ptr)
    if block * BLOCK >= count:
        tl.store(logit_ptr + token, tl.zeros((BLOCK,), tl.float32))
        return
    target = tl.load(target_ptr + token)
    here = target >= 0
    column = tl.maximum(target, 0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    c_ptrs = weight_ptr + column[:, None] * stride_wv + dims[None, :]
    e_ptrs = packed_ptr + token.to(tl.int64)[:, None] * stride_pn + dims[None, :]
    x = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, D, BLOCK_D):
        inside = (k + dims < D)[None, :]
        c = tl.load(c_ptrs + k, mask=inside, other=0.0)
        e = tl.load(e_ptrs + k, mask=inside, other=0.0)
        x = tl.dot(c, e.T, x, input_precision=PRECISION)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    if HAS_SOFTCAP:
        x, slope = softcapped(x, softcap, WIDE)
    own = lane[:, None] == lane[None, :]
    logit = tl.sum(tl.where(own, x, 0.0), 0) * scale
    tl.store(logit_ptr + token, tl.where(here, logit, 0.0))
    if HAS_SCORE:
        mass_ptrs = mass_ptr + block.to(tl.int64) * V + column
        mass = tl.load(mass_ptrs, mask=here, other=-1.0).to(tl.float32)
        # Of tokens with the same target the first one stands for all.
        across = tl.load(target_ptr + block * BLOCK + lane)
        again = (target[:, None] == across[None, :]) & (lane[None, :] < lane[:, None])
        is_first = tl.max(again.to(tl.int32), 1) == 0
        is_new = here & is_first & (mass >= 0)
        lse = tl.load(lse_ptr + token)
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        p = tl.exp2(x * (scale * LOG2E) - (lse * LOG2E)[None, :])
        p = tl.where(is_new[:, None], p, 0.0)
        if HAS_UNKEPT:
            take_from(unkept_ptr + token, tl.sum(p, 0), lse, token < count)
        if HAS_SOFTCAP:
            p *= slope
        take_from(dropped_ptr + token, tl.sum(p, 0), lse, token < count)
        mark = -tl.maximum(mass, 1e-30)
        tl.store(mass_ptrs, mark.to(mass_ptr.dtype.element_ty), mask=here & (mass >= 0))
