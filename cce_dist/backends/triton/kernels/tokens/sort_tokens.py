"""A counting sort of tokens by the keys of `similar_kernel`: with few keys each place is a sum."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.tokens.token_keys import SEEDS, UNCOUNTED


@triton.jit(do_not_specialize=["N"])
def order_kernel(
    key_ptr,  # [N] uint8: below SEEDS, or UNCOUNTED behind all tokens that count
    tally_ptr,  # [parts, SEEDS] int16: how many of a part's tokens have each key
    rows_ptr,  # [N] int64
    target_ptr,  # [N] int32 or int64
    order_ptr,  # [N] int64, the token at each place; tokens of one key keep their order: out
    rows_out_ptr,  # [N] int64, in that order: out; may be `order_ptr` where each row is its token
    target_out_ptr,  # [N], in that order: out
    N,
    PART: tl.constexpr,  # tokens
    PARTS: tl.constexpr,  # at a time
    BLOCK: tl.constexpr,  # tokens, whole parts
):
    """Computes the new places of BLOCK tokens; a program a block."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < N
    # These loads are under way while the tallies are summed.
    key = tl.load(key_ptr + token, mask=inside, other=UNCOUNTED).to(tl.int32)
    row = tl.load(rows_ptr + token, mask=inside, other=0)
    target = tl.load(target_ptr + token, mask=inside, other=0)
    lane = tl.arange(0, SEEDS)
    first_part = tl.program_id(0) * (BLOCK // PART)
    of_all = tl.zeros((PARTS, SEEDS), tl.int32)
    of_earlier = tl.zeros((PARTS, SEEDS), tl.int32)
    parts = tl.cdiv(N, PART)
    for start in range(0, parts, PARTS):
        part = (start + tl.arange(0, PARTS))[:, None]
        tally = tl.load(tally_ptr + part * SEEDS + lane[None, :], mask=part < parts, other=0)
        of_all += tally
        of_earlier += tl.where(part < first_part, tally, 0)
    number = tl.sum(of_all, 0)
    # Behind tokens of smaller keys, and of the same key in earlier programs or earlier in this one.
    first = tl.cumsum(number, 0) - number + tl.sum(of_earlier, 0)
    place = tl.sum(tl.where(key[:, None] == lane[None, :], first[None, :], 0), 1)
    same = (key[None, :] == key[:, None]) & (token[None, :] < token[:, None])
    place += tl.sum(same.to(tl.int32), 1)
    place = tl.where(key == UNCOUNTED, token, place)
    tl.store(order_ptr + place, token.to(tl.int64), mask=inside)
    tl.store(rows_out_ptr + place, row, mask=inside)
    tl.store(target_out_ptr + place, target, mask=inside)
