"""The dropped part of d_logits as the product of its marginals, and the mean logit's gradient.

Groups of token blocks share one product; label smoothing's mean over the vocabulary is one more
group, whose share of every column is its class weight. docs/design/tail.md#the-marginals.
"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import LEAST_NORMAL, LOG2E


@triton.jit
def shares_of(
    share_ptr,  # [groups, V]
    class_weight_ptr,  # [V]
    column,  # [BLOCK_V]
    V,
    groups,
    BLOCK_V: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """Returns [GROUPS, BLOCK_V] fp32: each group's share of each column, 0 beyond the
    vocabulary."""
    group = tl.arange(0, GROUPS)
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
    return share


@triton.jit(do_not_specialize=["groups", "every"])
def centroid_kernel(
    weight_ptr,  # [V, D]
    share_ptr,  # [groups, V]
    class_weight_ptr,  # [V]
    part_ptr,  # [splits, GROUPS, D] fp32: out
    seen_ptr,  # [splits, GROUPS] fp32 share of the columns in it: out
    total_ptr,  # [slices * splits, GROUPS] fp32 share of all columns: out
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
    """Sums share_v C_v, for each group, over each `every`-th of a split's tiles. The weight is read
    once, or less."""
    split = tl.program_id(1)
    dims = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    group = tl.arange(0, GROUPS)
    acc = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    total = tl.zeros((GROUPS,), tl.float32)
    seen = tl.zeros((GROUPS,), tl.float32)
    step = tl.num_programs(1)
    num_tiles = tl.cdiv(V, BLOCK_V)
    for tile in tl.range(split, num_tiles, step * every, num_stages=3):
        column = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        share = shares_of(
            share_ptr, class_weight_ptr, column, V, groups, BLOCK_V, GROUPS, HAS_TAIL, HAS_MEAN,
            HAS_CLASS_WEIGHT,
        )  # fmt: skip
        # A tiny share for every column: a group without shares in these tiles gets their mean as
        # centroid, and not 0.
        share += tl.where(column < V, 1e-20, 0.0)[None, :]
        seen += tl.sum(share, 1)
        c = tl.load(
            weight_ptr + column.to(tl.int64)[:, None] * stride_wv + dims[None, :],
            mask=(column < V)[:, None] & (dims < D)[None, :],
            other=0.0,
        )
        if HAS_CLASS_WEIGHT:
            # tf32 has 10 bits: the shares and the weight have no more. The digits of the class
            # weights that it would lose are added separately.
            bits = share.to(tl.int32, bitcast=True) & -8192
            high = bits.to(tl.float32, bitcast=True)
            acc = tl.dot(share - high, c.to(tl.float32), acc, input_precision=PRECISION)
            share = high
        acc = tl.dot(share, c.to(tl.float32), acc, input_precision=PRECISION)
    # The totals have no dims: all programs share their tiles.
    program = tl.program_id(0) * step + split
    for tile in tl.range(program, num_tiles, step * tl.num_programs(0), num_stages=3):
        column = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        share = shares_of(
            share_ptr, class_weight_ptr, column, V, groups, BLOCK_V, GROUPS, HAS_TAIL,
            HAS_MEAN, HAS_CLASS_WEIGHT,
        )  # fmt: skip
        total += tl.sum(share, 1)
    out = part_ptr + (split * GROUPS + group)[:, None] * D + dims[None, :]
    tl.store(out, acc, mask=(dims < D)[None, :])
    tl.store(total_ptr + program * GROUPS + group, total)
    if tl.program_id(0) == 0:
        tl.store(seen_ptr + split * GROUPS + group, seen)


@triton.jit(do_not_specialize=["groups", "splits"])
def merge_centroids_kernel(
    part_ptr,  # [splits, GROUPS, D]
    seen_ptr,  # [splits, GROUPS]
    total_ptr,  # [slices * splits, GROUPS]
    centroid_ptr,  # [GROUPS, D]: out, normalised for the tail's groups
    inverse_ptr,  # [GROUPS]: out, 1 over the group's dropped mass
    D,
    groups,
    splits,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
):
    group = tl.program_id(0)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    seen = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    parts = tl.zeros((LANES,), tl.float32)
    for start in range(0, splits * tl.num_programs(1), LANES):
        lane = start + tl.arange(0, LANES)
        inside = lane < splits * tl.num_programs(1)
        parts += tl.load(total_ptr + lane * GROUPS + group, mask=inside, other=0.0)
    total = tl.sum(parts, 0)
    for split in range(splits):
        at = split * GROUPS + group
        seen += tl.load(seen_ptr + at)
        acc += tl.load(part_ptr + at * D + dims, mask=dims < D, other=0.0)
    # A group that drops nothing has no tail; of a subnormal mass 1 over it may be infinite. The
    # mean's group is a sum, not an average.
    inverse = tl.where(group < groups, tl.where(total > LEAST_NORMAL, 1.0 / total, 0.0), 1.0)
    share = tl.where(group < groups, tl.where(seen > LEAST_NORMAL, 1.0 / seen, 0.0), 1.0)
    tl.store(centroid_ptr + group * D + dims, acc * share, mask=dims < D)
    tl.store(inverse_ptr + group, inverse)


@triton.jit
def token_sums_kernel(
    hidden_ptr,
    rows_ptr,
    count_ptr,
    mass_ptr,  # [N_padded] upstream times dropped mass, for the weight
    second_ptr,  # [N_padded] upstream of the mean logit; or `mass_ptr` of the teacher's tail
    part_ptr,  # [2, num_blocks, D] fp32 sum over a block's tokens of mass E_i, of mean E_i: out
    part_bias_ptr,  # [2, num_blocks] fp32 sum of mass, of mean: out
    D,
    stride_hn,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
):
    """Sums a token block x BLOCK_D dims, weighted by mass and by mean."""
    block = tl.program_id(0)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = block * TOKENS + tl.arange(0, TOKENS)
    inside = token < tl.load(count_ptr)
    row = tl.load(rows_ptr + token, mask=inside, other=0)
    e = tl.load(
        hidden_ptr + row[:, None] * stride_hn + dims[None, :],
        mask=inside[:, None] & (dims < D)[None, :],
        other=0.0,
    ).to(tl.float32)
    for kind in tl.static_range(2):
        if HAS_TAIL if kind == 0 else HAS_MEAN:
            weight_ptr = mass_ptr if kind == 0 else second_ptr
            weight = tl.load(weight_ptr + token, mask=inside, other=0.0)
            at = kind * tl.num_programs(0) + block
            tl.store(part_ptr + at * D + dims, tl.sum(e * weight[:, None], 0), mask=dims < D)
            if tl.program_id(1) == 0:
                tl.store(part_bias_ptr + at, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["groups", "num_blocks", "blocks_per_group"])
def group_sums_kernel(
    part_ptr,  # [2, num_blocks, D]
    part_bias_ptr,  # [2, num_blocks]
    inverse_ptr,  # [GROUPS]
    tail_ptr,  # [GROUPS, D] fp32: out
    tail_bias_ptr,  # [GROUPS]: out
    D,
    groups,
    num_blocks,
    blocks_per_group,
    BLOCK_D: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_TEACHER: tl.constexpr,  # `groups` more
    OF_RATIOS: tl.constexpr,  # these have the log ratios of the shares
):
    """Sums mass_i E_i over a group's tokens, over the group's dropped mass; 0 for no group."""
    group = tl.program_id(0)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    start = group * blocks_per_group
    stop = tl.where(group < groups, tl.minimum(start + blocks_per_group, num_blocks), start)
    if HAS_TEACHER:
        # The teacher's tail has the next groups, of the same blocks.
        of_teacher = (group - groups) * blocks_per_group
        is_teacher = (group >= groups) & (group < 2 * groups)
        end = tl.minimum(of_teacher + blocks_per_group, num_blocks)
        start = tl.where(is_teacher, num_blocks + of_teacher, start)
        stop = tl.where(is_teacher, num_blocks + end, tl.where(group < groups, stop, start))
    if HAS_MEAN:
        is_mean = group == groups
        start = tl.where(is_mean, num_blocks, start)
        stop = tl.where(is_mean, 2 * num_blocks, stop)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    total = 0.0
    for block in range(start, stop):
        acc += tl.load(part_ptr + block * D + dims, mask=dims < D, other=0.0)
        total += tl.load(part_bias_ptr + block)
    of_shares = group
    if OF_RATIOS:
        of_shares = tl.where((group >= groups) & (group < 2 * groups), group - groups, group)
    inverse = tl.load(inverse_ptr + of_shares)
    tl.store(tail_ptr + group * D + dims, acc * inverse, mask=dims < D)
    if tl.program_id(1) == 0:
        tl.store(tail_bias_ptr + group, total * inverse)


@triton.jit(do_not_specialize=["num_tokens", "tokens_per_group"])
def entropy_tail_kernel(
    share_ptr,  # [groups, V]; if HAS_TEACHER as many of log ratios follow: see `Marks.share`
    entropy_tail_ptr,  # [2, num_tokens]: see `TokenUpstream`: in and out
    V,
    num_tokens,  # padded
    tokens_per_group,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
):
    """Adds the mean of log s_v over a group's dropped columns to its tokens' tail of the entropy;
    or subtracts that of the log ratios, which are added column by column."""
    group = tl.program_id(0)
    total = tl.zeros((BLOCK_V,), tl.float32)
    weighted = total
    for start in tl.range(0, V, BLOCK_V, num_stages=3):
        column = start + tl.arange(0, BLOCK_V)
        at = group.to(tl.int64) * V + column
        share = tl.load(share_ptr + at, mask=column < V, other=0.0).to(tl.float32)
        total += share
        if HAS_TEACHER:
            of_ratios = share_ptr + at + tl.num_programs(0).to(tl.int64) * V
            weighted -= tl.load(of_ratios, mask=column < V, other=0.0).to(tl.float32)
        else:
            weighted += share * tl.log2(tl.where(share > 0, share, 1.0))
    mass = tl.sum(total, 0)
    mean = tl.where(mass > LEAST_NORMAL, tl.sum(weighted, 0) / mass, 0.0)
    if not HAS_TEACHER:
        # The shares are not normalised: s_v is a share over their sum.
        mean = tl.where(mass > LEAST_NORMAL, mean - tl.log2(mass), 0.0) / LOG2E
    for start in range(0, tokens_per_group, BLOCK_N):
        token = group * tokens_per_group + start + tl.arange(0, BLOCK_N)
        inside = token < num_tokens
        of_spread = tl.load(entropy_tail_ptr + num_tokens + token, mask=inside, other=0.0)
        known = tl.load(entropy_tail_ptr + token, mask=inside, other=0.0)
        tl.store(entropy_tail_ptr + token, known + of_spread * mean, mask=inside)
