"""The dropped part of d_logits as the product of its marginals, and the mean logit's gradient.

Groups of token blocks share one product; label smoothing's mean over the vocabulary is one more
group, whose share of every column is its class weight. docs/numerics.md#the-tail.
"""

import triton
import triton.language as tl


@triton.jit
def centroid_kernel(
    weight_ptr,  # [V, D]
    share_ptr,  # [groups, V]
    class_weight_ptr,  # [V]
    part_ptr,  # [splits, GROUPS, D] fp32: out
    total_ptr,  # [2, splits, GROUPS] fp32 share of the columns in it, and of all: out
    V,
    D,
    groups,
    every,
    stride_wv,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """Sum over every `splits`-th tile of share_v C_v, for each group; of these tiles every
    `every`-th: the weight is read once, or less."""
    split = tl.program_id(1)
    dims = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    group = tl.arange(0, GROUPS)
    acc = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    total = tl.zeros((GROUPS,), tl.float32)
    seen = tl.zeros((GROUPS,), tl.float32)
    step = tl.num_programs(1)
    for tile in range(split, tl.cdiv(V, BLOCK_V), step):
        column = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        valid = column < V
        share = tl.zeros((GROUPS, BLOCK_V), tl.float32)
        if HAS_TAIL:
            share = tl.load(
                share_ptr + group.to(tl.int64)[:, None] * V + column[None, :],
                mask=(group < groups)[:, None] & valid[None, :],
                other=0.0,
            ).to(tl.float32)
        if HAS_MEAN:
            weight = valid.to(tl.float32)
            if HAS_CLASS_WEIGHT:
                weight = tl.load(class_weight_ptr + column, mask=valid, other=0.0)
            share = tl.where((group == groups)[:, None], weight[None, :], share)
        total += tl.sum(share, 1)
        if tile // step % every == 0:
            # The least of weights for every column: where none of a group's shares lies in these
            # tiles, its centroid is their mean, and not 0.
            share += tl.where(valid, 1e-20, 0.0)[None, :]
            seen += tl.sum(share, 1)
            c = tl.load(
                weight_ptr + column.to(tl.int64)[:, None] * stride_wv + dims[None, :],
                mask=valid[:, None] & (dims < D)[None, :],
                other=0.0,
            )
            if HAS_CLASS_WEIGHT:
                # tf32 has 10 bits: enough for the shares and the weight, which have no more. What
                # it would lose of the class weights is added apart.
                bits = share.to(tl.int32, bitcast=True) & -8192
                high = bits.to(tl.float32, bitcast=True)
                acc = tl.dot(share - high, c.to(tl.float32), acc, input_precision=PRECISION)
                share = high
            acc = tl.dot(share, c.to(tl.float32), acc, input_precision=PRECISION)
    out = part_ptr + (split * GROUPS + group)[:, None] * D + dims[None, :]
    tl.store(out, acc, mask=(dims < D)[None, :])
    if tl.program_id(0) == 0:
        tl.store(total_ptr + split * GROUPS + group, seen)
        tl.store(total_ptr + (step + split) * GROUPS + group, total)


@triton.jit
def merge_kernel(
    part_ptr,  # [splits, GROUPS, D]
    total_ptr,  # [2, splits, GROUPS]
    centroid_ptr,  # [GROUPS, D]: out, normalised for the tail's groups
    inverse_ptr,  # [GROUPS]: out, 1 over the group's dropped mass
    D,
    groups,
    splits,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group = tl.program_id(0)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = 0.0
    seen = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(splits):
        at = split * GROUPS + group
        seen += tl.load(total_ptr + at)
        total += tl.load(total_ptr + splits * GROUPS + at)
        acc += tl.load(part_ptr + at * D + dims, mask=dims < D, other=0.0)
    # Nothing dropped: no tail. The mean's group is a sum, not an average.
    inverse = tl.where(group < groups, tl.where(total > 0, 1.0 / total, 0.0), 1.0)
    share = tl.where(group < groups, tl.where(seen > 0, 1.0 / seen, 0.0), 1.0)
    tl.store(centroid_ptr + group * D + dims, acc * share, mask=dims < D)
    tl.store(inverse_ptr + group, inverse)


@triton.jit
def token_sums_kernel(
    hidden_ptr,
    rows_ptr,
    count_ptr,
    mass_ptr,  # [N] upstream times dropped mass
    mean_ptr,  # [N] upstream of the mean logit
    inverse_ptr,  # [GROUPS]
    tail_ptr,  # [GROUPS, D] fp32: out
    tail_bias_ptr,  # [GROUPS]: out
    D,
    groups,
    tokens_per_group,
    stride_hn,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
):
    """Sum over a group's tokens of mass_i E_i, over the group's dropped mass; 0 for no group."""
    group = tl.program_id(0)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    count = tl.load(count_ptr)
    start = group * tokens_per_group
    stop = tl.minimum(start + tokens_per_group, count)
    is_mean = group == groups
    if is_mean:
        start = 0
        stop = count
    if group > groups:
        stop = 0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    total = 0.0
    for first in range(start, stop, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        inside = token < stop
        mass = tl.zeros((BLOCK_N,), tl.float32)
        if HAS_TAIL:
            mass += tl.load(mass_ptr + token, mask=inside & (is_mean == 0), other=0.0)
        if HAS_MEAN:
            mass += tl.load(mean_ptr + token, mask=inside & is_mean, other=0.0)
        row = tl.load(rows_ptr + token, mask=inside, other=0)
        e = tl.load(
            hidden_ptr + row[:, None] * stride_hn + dims[None, :],
            mask=inside[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        acc += tl.sum(e.to(tl.float32) * mass[:, None], 0)
        total += tl.sum(mass, 0)
    inverse = tl.load(inverse_ptr + group)
    tl.store(tail_ptr + group * D + dims, acc * inverse, mask=dims < D)
    if tl.program_id(1) == 0:
        tl.store(tail_bias_ptr + group, total * inverse)
