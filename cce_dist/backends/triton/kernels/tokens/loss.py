"""The loss of all tokens from their log-sum-exps, and its gradient."""

import triton
import triton.language as tl

# Rows of a merge begin anywhere, and a gradient is the caller's.
POINTERS = ["lse_ptr", "target_logit_ptr", "divisor_ptr", "grad_ptr"]


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=POINTERS[:3])
def total_loss_kernel(
    lse_ptr,  # [N]
    target_logit_ptr,  # [N]
    divisor_ptr,  # [1]
    total_ptr,  # []: out
    N,
    divisor,
    HAS_DIVISOR: tl.constexpr,  # divide by the tensor
    BLOCK_N: tl.constexpr,
):
    """Sums the negative log-likelihoods and divides the sum. One program: the order of the sum is
    the same in every run."""
    at = tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, N, BLOCK_N):
        inside = first + at < N
        lse = tl.load(lse_ptr + first + at, mask=inside, other=0.0)
        sums += lse - tl.load(target_logit_ptr + first + at, mask=inside, other=0.0)
    if HAS_DIVISOR:
        divisor = tl.load(divisor_ptr).to(tl.float32)
    one = tl.arange(0, 1)
    total = tl.zeros((1,), tl.float32) + tl.sum(sums, 0)
    tl.store(total_ptr + one, tl.div_rn(total, tl.zeros((1,), tl.float32) + divisor))


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=POINTERS[2:])
def share_gradient_kernel(
    grad_ptr,  # []
    divisor_ptr,  # [1]
    shares_ptr,  # [N]: out
    N,
    divisor,
    HAS_DIVISOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Gives each token the gradient of its negative log-likelihood."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if HAS_DIVISOR:
        divisor = tl.load(divisor_ptr).to(tl.float32)
    zero = tl.zeros((BLOCK_N,), tl.float32)
    share = tl.div_rn(zero + tl.load(grad_ptr).to(tl.float32), zero + divisor)
    tl.store(shares_ptr + at, share, mask=at < N)
