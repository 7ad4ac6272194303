"""Inputs of a benchmark: random, skewed as a trained model's, or captured from a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cce_dist.testing import gaussian_inputs, zipf_inputs

KINDS = {"gaussian": gaussian_inputs, "zipf": zipf_inputs}


@dataclass(frozen=True)
class BenchInputs:
    """hidden [N, D], weight [V, D], targets [N] int64; `kind` names where they come from."""

    kind: str
    hidden: Tensor
    weight: Tensor
    targets: Tensor

    @property
    def shape(self) -> dict[str, str]:
        return {
            "inputs": self.kind,
            "N": str(self.hidden.shape[0]),
            "V": str(self.weight.shape[0]),
            "D": str(self.hidden.shape[1]),
            "dtype": str(self.hidden.dtype).removeprefix("torch."),
        }

    def to(self, dtype: torch.dtype, device: torch.device) -> BenchInputs:
        return BenchInputs(
            self.kind,
            self.hidden.to(device, dtype),
            self.weight.to(device, dtype),
            self.targets.to(device),
        )


def make_inputs(kind: str, num_tokens: int, vocab_size: int, dim: int) -> BenchInputs:
    """`kind` is "gaussian", "zipf", or a file written by `save_inputs`, whose shape wins.

    Raises:
        ValueError: neither a known kind nor a file.
    """
    if kind in KINDS:
        generator = torch.Generator().manual_seed(0)
        made = KINDS[kind](num_tokens, vocab_size, dim, generator=generator)
        return BenchInputs(kind, made.hidden, made.weight, made.targets)
    if not Path(kind).is_file():
        raise ValueError(f"inputs must be one of {sorted(KINDS)} or a file, got {kind!r}")
    stored = torch.load(kind, weights_only=True)
    return BenchInputs(Path(kind).stem, stored["hidden"], stored["weight"], stored["targets"])
