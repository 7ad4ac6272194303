"""The choice of a step's tokens: a pure function of seed, step and data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.errors import ConfigError


@dataclass(frozen=True)
class Batches:
    """The token ids, split into a part to train on and a held-out part (the end).

    Every tp rank of a data-parallel rank reads the same sequences. Sequence i of the global
    batch does not depend on how many ranks share it, so layouts can be compared.
    """

    train: np.ndarray
    held_out: np.ndarray
    seed: int
    batch: int
    sequence_length: int

    def step(self, step: int, dp_rank: int, dp: int) -> tuple[Tensor, Tensor]:
        """Returns ids and targets of a step, [batch, sequence_length] int64 each."""
        choices = len(self.train) - self.sequence_length
        starts = np.random.default_rng([self.seed, step]).integers(choices, size=dp * self.batch)
        mine = starts[dp_rank * self.batch : (dp_rank + 1) * self.batch]
        return stack_sequences(self.train, mine, self.sequence_length)

    def held_out_batch(self) -> tuple[Tensor, Tensor]:
        """Returns the same ids and targets on every call and every rank."""
        starts = np.arange(self.batch) * self.sequence_length
        return stack_sequences(self.held_out, starts, self.sequence_length)


def stack_sequences(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Returns ids and targets of the sequences at `starts`, [len(starts), length] int64 each."""
    rows = np.stack([tokens[start : start + length + 1] for start in starts])
    ids = torch.from_numpy(rows.astype(np.int64))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def split_tokens(tokens: np.ndarray, config: TrainConfig, dp: int) -> Batches:
    """Splits token ids: the last share, data.held_out, is for the report's held-out batch.

    Raises:
        ConfigError: the text is too short for one held-out batch and one training sequence.
    """
    length = config.data.sequence_length
    # Of the global batch: the split of a short text must not depend on the layout.
    needed = dp * config.batch * length + 1
    num_held_out = max(needed, int(len(tokens) * config.data.held_out))
    num_train = len(tokens) - num_held_out
    if num_train <= length:
        raise ConfigError(
            f"the text must have at least {needed + length + 1} tokens for batch={config.batch} x "
            f"dp={dp} held-out sequences and one training sequence of data.sequence_length="
            f"{length}, got {len(tokens)}: add text, or lower batch or data.sequence_length"
        )
    return Batches(
        train=tokens[:num_train],
        held_out=tokens[num_train:],
        seed=config.run.seed,
        batch=config.batch,
        sequence_length=length,
    )
