"""Scores of an evaluation of texts, in the units that people ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cce_dist.train.checkpoint import Checkpoint
from cce_dist.train.config.schema import TrainConfig

NUM_GROUPS = 10
# math.exp has no larger argument.
MAX_NATS = 709.0


@dataclass(frozen=True)
class Score:
    """The score of some tokens: `nats` is the sum of their negative log-likelihoods."""

    tokens: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float | None:
        """The perplexity; None if it is larger than any float."""
        return math.exp(self.nats_per_token) if self.nats_per_token < MAX_NATS else None

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity,
        }


@dataclass(frozen=True)
class TextScore:
    """The score of a text. Args: num_bytes: the text's size in UTF-8."""

    score: Score
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.score.nats / math.log(2) / self.num_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            **self.score.as_json(),
            "bytes": self.num_bytes,
            "bits_per_byte": self.bits_per_byte,
        }


@dataclass(frozen=True)
class GroupScore:
    """The score of a tenth of the text; tenths are split by the frequency of tokens.

    Args:
        tenth: 1 for the most frequent ids, up to 10.
        times: counts in the text of the tenth's rarest and most frequent id.
    """

    score: Score
    tenth: int
    num_ids: int
    times: tuple[int, int]

    def as_json(self) -> dict[str, Any]:
        return {
            "tenth": self.tenth,
            "ids": self.num_ids,
            "times": list(self.times),
            **self.score.as_json(),
        }


@dataclass(frozen=True)
class Findings:
    """Results of an evaluation, the same on every rank except `seconds`, the windows' time."""

    checkpoint: Checkpoint
    config: TrainConfig
    stride: int
    dp: int
    device: str
    texts: list[tuple[Path, TextScore]]
    total: TextScore
    groups: list[GroupScore]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        config = self.config
        return {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.checkpoint.step,
            "dtype": config.dtype,
            "vocab_size": config.data.vocab_size,
            "sequence_length": config.data.sequence_length,
            "stride": self.stride,
            "batch": config.batch,
            "dp": self.dp,
            "tp": config.parallel.tp,
            "device": self.device,
            "seconds": self.seconds,
            **self.total.as_json(),
            "texts": [{"path": str(path), **score.as_json()} for path, score in self.texts],
            "frequency": [group.as_json() for group in self.groups],
        }


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


def score_texts(
    paths: Sequence[Path],
    num_tokens: Sequence[int],
    num_bytes: Sequence[int],
    nats: np.ndarray,  # [texts]
) -> list[tuple[Path, TextScore]]:
    each = zip(paths, num_tokens, num_bytes, nats.tolist(), strict=True)
    return [(path, TextScore(Score(tokens, total), size)) for path, tokens, size, total in each]


def score_groups(
    counts: np.ndarray,  # [V]
    groups: np.ndarray,  # [V], from frequency_groups
    nats: np.ndarray,  # [NUM_GROUPS]
) -> list[GroupScore]:
    """Scores each tenth that has a token."""
    scored = []
    for group in range(NUM_GROUPS):
        times = counts[(groups == group) & (counts > 0)]
        if len(times):
            score = Score(int(times.sum()), float(nats[group]))
            bounds = int(times.min()), int(times.max())
            scored.append(GroupScore(score, group + 1, len(times), bounds))
    return scored
