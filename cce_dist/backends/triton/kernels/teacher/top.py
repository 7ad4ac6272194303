"""The largest logits of each token, tile by tile.

A key of 64 bits has a logit's bits, in an order that is the numbers', and its column: of two equal
logits the first column has the larger key.
"""

import triton
import triton.language as tl


@triton.jit
def keys_of(z, columns):
    """Computes keys [BLOCK] int64. -0 becomes 0, and each NaN the same, above all numbers."""
    z = tl.where(z == z, z + 0.0, float("nan"))
    bits = z.to(tl.int32, bitcast=True)
    bits = tl.where(z == z, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FC00000)
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def top_kernel(
    z_ptr,  # [n, columns] fp32 logits
    keys_ptr,  # [n, k] int64, in no order: of the tiles so far, in and out
    first,  # column of the shard
    num_columns,
    k,
    stride_z,
    IS_FIRST: tl.constexpr,  # no tile came before
    K: tl.constexpr,  # a power of two >= k
    BLOCK: tl.constexpr,
):
    """Puts a tile's largest keys, from the largest on, in the place of the smallest ones."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    z = tl.load(z_ptr + row * stride_z + columns, mask=inside, other=0.0)
    nothing = tl.full([BLOCK], -(2**63), tl.int64)
    new = tl.where(inside, keys_of(z, first + columns), nothing)
    lane = tl.arange(0, K)
    listed = lane < k
    if IS_FIRST:
        # Below each number's key, and each another one.
        keys = lane.to(tl.int64) - (2**63 - 1)
    else:
        keys = tl.load(keys_ptr + row * k + lane, mask=listed, other=0)
    keys = tl.where(listed, keys, 2**63 - 1)
    smallest, largest = tl.min(keys, 0), tl.max(new, 0)
    while largest > smallest:
        keys = tl.where(keys == smallest, largest, keys)
        new = tl.where(new == largest, nothing, new)
        smallest, largest = tl.min(keys, 0), tl.max(new, 0)
    tl.store(keys_ptr + row * k + lane, keys, mask=listed)
