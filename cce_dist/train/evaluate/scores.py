"""Scores of an evaluation of texts, in the units that people ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

NUM_GROUPS = 10
# math.exp has no larger argument.
MAX_NATS = 709.0

# Numbers and names, as in the file of `cce-dist eval --json`.
Score = dict[str, Any]


def score(tokens: int, nats: float, num_bytes: int | None = None) -> Score:
    """Scores tokens by the sum of their negative log-likelihoods.

    perplexity is None if it is larger than any float. With a text's size in UTF-8 there are
    bytes and bits_per_byte, too.
    """
    mean = nats / tokens
    perplexity = math.exp(mean) if mean < MAX_NATS else None
    values = {"tokens": tokens, "nats_per_token": mean, "perplexity": perplexity}
    if num_bytes is not None:
        values |= {"bytes": num_bytes, "bits_per_byte": nats / math.log(2) / num_bytes}
    return values


def count_ids(texts: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Counts each id in the texts, without the token before each text: [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids in texts:
        counts += np.bincount(ids[1:], minlength=vocab_size)
    return counts


def frequency_groups(counts: np.ndarray) -> np.ndarray:
    """Returns the tenth of each id, [V], for counts [V]; 0 for the most frequent ids.

    Ids are ordered by count, then by id. An id belongs to the tenth of the text in which the middle
    of its occurrences falls. So tenths are as equal as they can be without dividing an id, and a
    tenth may be empty.
    """
    order = np.argsort(-counts, kind="stable")
    ends = counts[order].cumsum()
    middle = ends - counts[order] / 2
    groups = np.empty(len(counts), dtype=np.int64)
    groups[order] = np.minimum(NUM_GROUPS * middle // max(1, ends[-1]), NUM_GROUPS - 1)
    return groups


def score_groups(
    counts: np.ndarray,  # [V]
    groups: np.ndarray,  # [V], from frequency_groups
    nats: np.ndarray,  # [NUM_GROUPS]
) -> list[Score]:
    """Scores each tenth that has a token.

    tenth is 1 for the most frequent ids, up to 10; times are the counts in the text of the tenth's
    rarest and most frequent id.
    """
    scored = []
    for group in range(NUM_GROUPS):
        times = counts[(groups == group) & (counts > 0)]
        if len(times):
            bounds = [int(times.min()), int(times.max())]
            about = {"tenth": group + 1, "ids": len(times), "times": bounds}
            scored.append({**about, **score(int(times.sum()), float(nats[group]))})
    return scored
