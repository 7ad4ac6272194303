"""The hidden gradient after the products: the dropped columns' part is added, and it is stored."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N", "groups", "tokens_per_group"])
def store_hidden_kernel(
    product_ptr,  # [num_rows, D] fp32: sums of products, of tokens that count
    centroid_ptr,  # [GROUPS, D]
    rows_ptr,  # [N_padded] int64: a permutation of the first N
    count_ptr,  # [1] int32
    # [1] int32: if 0, `product_ptr` was not written; if -1, it has every column, and needs no tail
    num_chunks_ptr,
    mass_ptr,  # [N_padded] upstream times dropped mass
    drawn_ptr,  # [N] sum of the drawn columns' d_logits, which `product_ptr` contains
    grad_scale_ptr,  # [1] power of two by which `drawn_ptr` was divided
    second_ptr,  # [N_padded] upstream of the mean logit; or `mass_ptr` of the teacher's tail
    out_ptr,  # [num_rows, D]: out, 0 for tokens that don't count; may be `product_ptr`
    N,
    D,
    groups,  # of one tail
    tokens_per_group,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    EVERY: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (dims < D)[None, :]
    counts = token < tl.load(count_ptr)
    has_product = counts
    has_tail = counts
    if not EVERY:
        num_chunks = tl.load(num_chunks_ptr)
        has_product = counts & (num_chunks != 0)
        has_tail = counts & (num_chunks >= 0)
    row = tl.load(rows_ptr + token, mask=token < N, other=0)
    at = row[:, None] * D + dims[None, :]
    value = tl.load(product_ptr + at, mask=has_product[:, None] & inside, other=0.0)
    if HAS_TAIL:
        group = tl.program_id(0) * BLOCK_N // tokens_per_group
        mass = tl.load(mass_ptr + token, mask=has_tail, other=0.0)
        if HAS_DRAWN:
            if HAS_TEACHER:
                # The drawn columns stand for both tails at once: one centroid, of what they lack.
                mass += tl.load(second_ptr + token, mask=counts, other=0.0)
            drawn = tl.load(drawn_ptr + token, mask=has_product & has_tail, other=0.0)
            mass -= drawn * tl.load(grad_scale_ptr)
        centroid = tl.load(centroid_ptr + group * D + dims, mask=dims < D, other=0.0)
        value += mass[:, None] * centroid[None, :]
    if HAS_MEAN or (HAS_TEACHER and not HAS_DRAWN):
        second = tl.load(second_ptr + token, mask=counts, other=0.0)
        place = groups
        if HAS_TEACHER:
            place += tl.program_id(0) * BLOCK_N // tokens_per_group
        centroid = tl.load(centroid_ptr + place * D + dims, mask=dims < D, other=0.0)
        value += second[:, None] * centroid[None, :]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=(token < N)[:, None] & inside)
