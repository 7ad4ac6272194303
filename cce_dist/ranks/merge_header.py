"""The header of a rank's statistics in the merge: their length, and the rank's rows.

The ranks check by it that their statistics belong to one softmax.
"""

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

# The same head on every rank shows in the first LOOK_AT tokens, if there are LEAST_TOKENS: the
# ranks' log-sum-exps are equal but for rounding (SAME), and the targets' logits span LEAST_SPREAD.
# In a head that began at zero, rows without targets are alike on all ranks; but when its targets'
# logits span as much, its log-sum-exps differ.
LOOK_AT, LEAST_TOKENS = 256, 4
SAME, LEAST_SPREAD = 2.0**-22, 1.0

# The message on a GPU, where an assertion can print no numbers.
RULE = (
    "vocab_shard of the ranks must tile [0, vocab_size), and every rank be called with the same "
    "tokens and its own rows of the head"
)


def digits_of(shard: VocabShard, length: int) -> list[int]:
    """Returns the header's digits. Args: length: the number of numbers after the header."""
    values = (length, shard.start, shard.stop, shard.vocab_size)
    return [digit for value in values for digit in divmod(value, DIGIT)]


def encode(shard: VocabShard, length: int, like: Tensor) -> Tensor:
    """Returns the header, [8], of the dtype and on the device of `like`."""
    # On a GPU a copy from the host would wait for all work of the device.
    return torch.cat([like.new_full((1,), digit) for digit in digits_of(shard, length)])


def decode(digits: Tensor) -> Tensor:
    """Turns headers [W, 8] into [W, 4] int64: length, start, stop, vocab_size."""
    high_low = digits.reshape(-1, NUM_DIGITS // 2, 2).long()
    return high_low[..., 0] * DIGIT + high_low[..., 1]


def is_sound(headers: Tensor, stats: Stats, count: Tensor | None) -> Tensor:
    """Tells whether the ranks' statistics belong to one softmax, [] bool.

    Args:
        headers: [W, 8].
        stats: fields [W, N].
        count: [1], as in `merge_stats`.
    """
    decoded = decode(headers)
    return _same_length(decoded) & _tiles(decoded) & ~_is_repeated(stats, count)


def flaw(headers: Tensor) -> str:
    """Describes the reason why `is_sound` is False. Args: headers: [W, 8]."""
    decoded = decode(headers)
    if not _same_length(decoded):
        # With different lengths the rest of the numbers means nothing.
        return (
            "every rank of the group must send as many numbers to the merge, got by rank "
            f"{decoded[:, 0].tolist()}: call the loss with the same tokens and options on all ranks"
        )
    if not _tiles(decoded):
        return _does_not_tile(decoded)
    return whole_head_of(len(decoded))


def require_records(numbers: Sequence[Sequence[int]]) -> None:
    """Checks the `record_of` of all ranks, whose statistics have the same length.

    Raises:
        ValueError: the ranks' statistics do not belong to one softmax.
    """
    records = torch.tensor(numbers)
    decoded = decode(records[:, :NUM_DIGITS])
    hashes, holds, differs = records[:, NUM_DIGITS:].unbind(1)
    if not _tiles(decoded):
        raise ValueError(_does_not_tile(decoded))
    same = hashes[0] != 0 and bool((hashes == hashes[0]).all())
    if same and len(hashes) > 1 and holds.sum() <= 1 and differs.sum() > 0:
        raise ValueError(whole_head_of(len(hashes)))


def record_of(shard: VocabShard, local: Stats, count: Tensor | None) -> list[int]:
    """Returns 11 numbers for `require_records`, where no rank sees another rank's statistics.

    They are the header; a hash of log-sum-exps, 0 if there are too few; whether this rank has a
    target's row; and whether the targets' logits span LEAST_SPREAD.
    """
    number = LOOK_AT if count is None else int(count)
    lse, target = local.lse[:LOOK_AT][:number], local.target_logit[:LOOK_AT][:number]
    lse_hash = 0
    if len(lse) >= LEAST_TOKENS:
        digest = hashlib.blake2b(lse.numpy().tobytes(), digest_size=7).digest()
        lse_hash = int.from_bytes(digest, "little")
    differs = lse_hash != 0 and bool(target.max() - target.min() >= LEAST_SPREAD)
    return [*digits_of(shard, len(local.lse)), lse_hash, int((target != 0).any()), int(differs)]


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
    """Tells whether all ranks seem to have the same rows, [] bool. It knows statistics alone: ranks
    never send rows."""
    lse, target = stats.lse[:, :LOOK_AT], stats.target_logit[:, :LOOK_AT]
    if len(lse) == 1 or lse.shape[1] < LEAST_TOKENS:
        return torch.zeros((), dtype=torch.bool, device=lse.device)
    place = torch.arange(lse.shape[1], device=lse.device)
    counts = torch.ones_like(place, dtype=torch.bool) if count is None else place < count
    # An empty shard or an overflow makes the difference NaN, so `same` is False.
    same = (lse - lse[0]).abs() <= SAME * lse[0].abs().clamp_min(1)
    of_targets = target.sum(0)
    lowest = of_targets.masked_fill(~counts, torch.inf).amin()
    highest = of_targets.masked_fill(~counts, -torch.inf).amax()
    holds = ((target != 0) & counts).any(1)
    repeats = (same | ~counts).all() & (highest - lowest >= LEAST_SPREAD)
    return repeats & (counts.sum() >= LEAST_TOKENS) & (holds.sum() <= 1)
