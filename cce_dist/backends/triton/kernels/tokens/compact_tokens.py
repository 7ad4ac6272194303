"""The compaction before the forward: tokens that count are put in front of all others."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N", "ignore_index", "vocab_size"])
def count_kernel(
    ids_ptr,  # [N] int64
    parts_ptr,  # [2, programs] int32: ids that count; of these, ids beyond the vocabulary: out
    N,
    ignore_index,
    vocab_size,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + place, mask=place < N, other=0)
    counts = (place < N) & (ids != ignore_index)
    beyond = counts & ((ids < 0) | (ids >= vocab_size))
    tl.store(parts_ptr + tl.program_id(0), tl.sum(counts.to(tl.int32), 0))
    out_ptr = parts_ptr + tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr, tl.sum(beyond.to(tl.int32), 0))


@triton.jit(do_not_specialize=["N", "ignore_index", "first_class", "num_classes"])
def place_kernel(
    ids_ptr,  # [N] int64
    parts_ptr,  # [2, programs] int32, of `count_kernel`
    rows_ptr,  # [N] int64: the token's original place: out, as all below
    targets_ptr,  # [N] int64, 0 for those that don't count
    local_ptr,  # [N] int32 row of the target in this shard, -1 if it is not here
    counts_ptr,  # [N] uint8: whether it counts
    count_ptr,  # [1] int32: how many do
    in_range_ptr,  # [1] int32: 1 if all ids that count are classes
    number_ptr,  # [1] fp32: the larger of `count` and 1
    N,
    ignore_index,
    first_class,
    num_classes,
    BLOCK: tl.constexpr,
):
    """Puts tokens that count first; both these and the others keep their order."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    before = 0
    count = 0
    beyond = 0
    for start in range(0, programs, BLOCK):
        part = start + lane
        number = tl.load(parts_ptr + part, mask=part < programs, other=0)
        before += tl.sum(tl.where(part < program, number, 0), 0)
        count += tl.sum(number, 0)
        beyond += tl.sum(tl.load(parts_ptr + programs + part, mask=part < programs, other=0), 0)
    place = program * BLOCK + lane
    inside = place < N
    ids = tl.load(ids_ptr + place, mask=inside, other=ignore_index)
    counts = inside & (ids != ignore_index)
    seen = before + tl.cumsum(counts.to(tl.int32), 0)
    at = tl.where(counts, seen - 1, count + place - seen)
    tl.store(rows_ptr + at, place.to(tl.int64), mask=inside)
    tl.store(targets_ptr + at, tl.where(counts, ids, 0), mask=inside)
    local = ids - first_class
    here = counts & (local >= 0) & (local < num_classes)
    tl.store(local_ptr + at, tl.where(here, local, -1).to(tl.int32), mask=inside)
    tl.store(counts_ptr + at, counts.to(tl.uint8), mask=inside)
    if program == 0:
        tl.store(count_ptr, count)
        tl.store(in_range_ptr, (beyond == 0).to(tl.int32))
        tl.store(number_ptr, tl.maximum(count, 1).to(tl.float32))


# Triton compiles assertions into such kernels alone.
@triton.jit(debug=True)
def require_in_range_kernel(
    in_range_ptr,  # [1] int32, of `place_kernel`
):
    """Ends the program on the device if a target is no class. The host doesn't wait."""
    in_range = tl.load(in_range_ptr) != 0
    tl.device_assert(in_range, "targets must lie in [0, vocab_size) or equal ignore_index")
