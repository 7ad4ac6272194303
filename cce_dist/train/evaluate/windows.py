"""Texts to evaluate, cut into windows of one length that score every token exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cce_dist.train.data.batches import stack_sequences
from cce_dist.train.errors import ConfigError

# A target that another window scores has this id, the default of linear_cross_entropy.
IGNORED = -100


@dataclass(frozen=True)
class Windows:
    """Windows of one length over all texts' tokens.

    Args:
        tokens: the tokens of all texts in turn; each text follows a token that is not scored.
        starts: [W] index of each window's first token.
        num_scored: [W] number of each window's targets that count; they are its last ones.
        text: [W] number of each window's text.
        length: number of tokens of a window.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_scored: np.ndarray
    text: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids and targets [B, length] int64 of these windows, and their text numbers [B].

        Targets that do not count are IGNORED.
        """
        ids, targets = stack_sequences(self.tokens, self.starts[indices], self.length)
        num_scored = torch.from_numpy(self.num_scored[indices])
        is_scored = torch.arange(self.length) >= self.length - num_scored[:, None]
        return ids, targets.masked_fill(~is_scored, IGNORED), torch.from_numpy(self.text[indices])


def cut_windows(
    texts: Sequence[np.ndarray], paths: Sequence[Path], length: int, stride: int
) -> Windows:
    """Cuts windows, each `stride` tokens behind the window before; the last ends with its text.

    Args:
        texts: [1 + T] each: a token that is not scored, then the text's tokens.
    Raises:
        ConfigError: a text has fewer tokens than a window.
    """
    starts, num_scored, text, offset = [], [], [], 0
    for number, (tokens, path) in enumerate(zip(texts, paths, strict=True)):
        num_tokens = len(tokens) - 1
        if num_tokens < length:
            raise ConfigError(
                f"{path} must have at least the {length} tokens of a window, got {num_tokens}: add "
                "text, or use a smaller --sequence-length"
            )
        first = np.append(np.arange(0, num_tokens - length, stride), num_tokens - length)
        starts.append(offset + first)
        num_scored.append(np.diff(first + length, prepend=0))
        text.append(np.full(len(first), number))
        offset += len(tokens)
    joined = (np.concatenate(arrays) for arrays in (starts, num_scored, text))
    return Windows(np.concatenate(list(texts)), *joined, length=length)
