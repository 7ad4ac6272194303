"""The header of a rank's statistics in the merge: how many they are and of which rows; and whether
the statistics of all ranks make one softmax."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from cce_dist.core.stats import Stats
from cce_dist.vocab_shard import VocabShard

# Integers travel as two numbers below 2^20 each: fp32 holds integers exactly up to 2^24.
DIGIT = 2**20
NUM_DIGITS = 8

# One head on every rank is told by these tokens: there are some, their log-sum-exps are the same on
# all ranks but for rounding, and their targets' logits differ. Of a head that began at zero, whose
# rows without targets are alike, these differ so much only when the log-sum-exps do, too.
LOOK_AT, LEAST_TOKENS = 256, 4
SAME, LEAST_SPREAD = 2.0**-22, 1.0

# On a GPU, where no number can be told.
RULE = (
    "vocab_shard of the ranks must tile [0, vocab_size), and every rank be called with the same "
    "tokens and its own rows of the head"
)


def digits_of(shard: VocabShard, length: int) -> list[int]:
    """Returns the header's digits. Args: length: how many numbers follow."""
    values = (length, shard.start, shard.stop, shard.vocab_size)
    return [digit for value in values for digit in divmod(value, DIGIT)]


def encode(shard: VocabShard, length: int, like: Tensor) -> Tensor:
    """Returns the header, [8], of the dtype and on the device of `like`."""
    digits = digits_of(shard, length)
    if like.is_cuda:
        # A copy from the host would wait for all that the device has still to do.
        return torch.cat([like.new_full((1,), digit) for digit in digits])
    return like.new_tensor(digits)


def decode(digits: Tensor) -> Tensor:
    """Turns headers [W, 8] into [W, 4] int64: length, start, stop, vocab_size."""
    high_low = digits.reshape(-1, NUM_DIGITS // 2, 2).long()
    return high_low[..., 0] * DIGIT + high_low[..., 1]


def is_sound(headers: Tensor, stats: Stats, count: Tensor | None) -> Tensor:
    """Tells whether the ranks' numbers belong together, [].

    Args:
        headers: [W, 8].
        stats: fields [W, N].
        count: [1], as in `merge_stats`.
    """
    decoded = decode(headers)
    return _same_length(decoded) & _tiles(decoded) & ~_is_repeated(stats, count)


def flaw(headers: Tensor, stats: Stats, count: Tensor | None) -> str:
    """Says why the ranks' numbers do not belong together. Args: those of `is_sound`."""
    decoded = decode(headers)
    if not _same_length(decoded):
        # Beyond the length nothing else can be believed.
        return (
            "every rank of the group must send as many numbers to the merge, got by rank "
            f"{decoded[:, 0].tolist()}: call all ranks with the same tokens and the same options"
        )
    if not _tiles(decoded):
        return _does_not_tile(decoded)
    return whole_head_of(len(decoded))


def require_records(numbers: Sequence[Sequence[int]]) -> None:
    """Checks the `record_of` of all ranks, which know how long their statistics are.

    Raises:
        ValueError: they don't belong together.
    """
    told = torch.tensor(numbers)
    decoded, (seen, holds, differs) = decode(told[:, :NUM_DIGITS]), told[:, NUM_DIGITS:].unbind(1)
    if not _tiles(decoded):
        raise ValueError(_does_not_tile(decoded))
    same = seen[0] != 0 and bool((seen == seen[0]).all())
    if same and len(seen) > 1 and holds.sum() <= 1 and differs.sum() > 0:
        raise ValueError(whole_head_of(len(seen)))


def record_of(shard: VocabShard, local: Stats, count: Tensor | None) -> list[int]:
    """Returns the header of statistics that no other rank sees, and the numbers that `_is_repeated`
    looks at, [11]: a hash of log-sum-exps, 0 of too few; whether a target is here, and whether
    targets' logits differ."""
    number = LOOK_AT if count is None else int(count)
    lse, target = local.lse[:LOOK_AT][:number], local.target_logit[:LOOK_AT][:number]
    seen = 0
    if len(lse) >= LEAST_TOKENS:
        digest = hashlib.blake2b(lse.numpy().tobytes(), digest_size=7).digest()
        seen = int.from_bytes(digest, "little")
    differs = seen != 0 and bool(target.max() - target.min() >= LEAST_SPREAD)
    return [*digits_of(shard, len(local.lse)), seen, int((target != 0).any()), int(differs)]


def whole_head_of(ranks: int) -> str:
    return (
        f"weight must be this rank's rows of the head, but each of the {ranks} ranks has the same "
        "log-sum-exp for every token, and one rank has all targets: a whole head on each of them "
        f"counts {ranks} times. Pass weight.chunk({ranks})[rank] with vocab_shard="
        f"VocabShard.chunked(V, rank, {ranks}), or group=None where each rank has a whole head"
    )


def _does_not_tile(decoded: Tensor) -> str:
    bounds = [tuple(row) for row in decoded[:, 1:].tolist()]
    return (
        "vocab_shard of the ranks must tile [0, vocab_size) without gap or overlap, got (start, "
        f"stop, vocab_size) by rank: {bounds}"
    )


def _same_length(decoded: Tensor) -> Tensor:
    return (decoded[:, 0] == decoded[0, 0]).all()


def _tiles(decoded: Tensor) -> Tensor:
    """Tells whether the shards tile their vocabulary, []."""
    _, start, stop, vocab_size = decoded.unbind(1)
    stop = stop.minimum(vocab_size).maximum(start)
    overlap = torch.minimum(stop[:, None], stop) - torch.maximum(start[:, None], start)
    overlap = overlap.fill_diagonal_(0).clamp_min(0).sum()
    covered = (stop - start).sum() == vocab_size[0]
    return covered & (overlap == 0) & (vocab_size == vocab_size[0]).all()


def _is_repeated(stats: Stats, count: Tensor | None) -> Tensor:
    """Tells whether all ranks seem to have the same rows, []. Statistics alone can tell: the rows
    are never sent."""
    lse, target = stats.lse[:, :LOOK_AT], stats.target_logit[:, :LOOK_AT]
    if len(lse) == 1 or lse.shape[1] < LEAST_TOKENS:
        return torch.zeros((), dtype=torch.bool, device=lse.device)
    place = torch.arange(lse.shape[1], device=lse.device)
    counts = torch.ones_like(place, dtype=torch.bool) if count is None else place < count
    # Of an empty shard, or of an overflow: the difference is NaN, and not the same.
    same = (lse - lse[0]).abs() <= SAME * lse[0].abs().clamp_min(1)
    of_targets = target.sum(0)
    lowest = of_targets.masked_fill(~counts, torch.inf).amin()
    spread = of_targets.masked_fill(~counts, -torch.inf).amax() - lowest
    holds = ((target != 0) & counts).any(1)
    fine = (same | ~counts).all() & (spread >= LEAST_SPREAD)
    return fine & (counts.sum() >= LEAST_TOKENS) & (holds.sum() <= 1)
