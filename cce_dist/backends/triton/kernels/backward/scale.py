"""The multiplication of a gradient by the upstream gradient, which mostly is 1."""

import triton
import triton.language as tl


# Numbers of elements may follow from the number of tokens, and one binary serves all.
@triton.jit(do_not_specialize=["numel", "num_blocks"])
def scale_kernel(
    grad_ptr,  # [numel]: in place
    factor_ptr,  # [] fp32
    numel,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Multiplies in fp32, and rounds. A factor of 1 ends it at once: a loss is mostly the last
    thing computed, and reading and writing the weight's gradient would take 2 % of the call."""
    factor = tl.load(factor_ptr)
    if factor == 1.0:
        return
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        if tl.cast(block + 1, tl.int64) * BLOCK <= numel:
            # Without a mask a thread reads several elements at once.
            grad = tl.load(grad_ptr + at).to(tl.float32)
            tl.store(grad_ptr + at, (grad * factor).to(grad_ptr.dtype.element_ty))
        else:
            grad = tl.load(grad_ptr + at, mask=at < numel).to(tl.float32)
            tl.store(grad_ptr + at, (grad * factor).to(grad_ptr.dtype.element_ty), mask=at < numel)
