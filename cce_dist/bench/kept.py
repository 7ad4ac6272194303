"""What a rank keeps: how many pairs of a column and a block of tokens, and how many it would
without the exchange of bounds."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from cce_dist.options import TOKEN_BLOCK

from .golden import LossFunction
from .inputs import BenchInputs
from .variants import variant_of


def kept_share(function: LossFunction, inputs: BenchInputs, *, exchanges: bool) -> float | None:
    """Of the pairs of this rank's columns and blocks of 128 tokens, those that `function` keeps;
    None: it has no filter of the Triton backend. All ranks of its group call this.

    Not the first call of its kind, which is rehearsed.
    Args: exchanges: False: as if no rank told the others what it knows of each token's lse.
    """
    variant = variant_of(function, inputs, "forward")
    with marks_seen() as seen, _without_exchanges(not exchanges):
        variant.run(variant.prepare())
    variant.finish()
    if not seen:
        return None
    num_blocks = -(-len(inputs.targets) // TOKEN_BLOCK)
    return sum(bits_set(marks.kept) / (len(marks.kept) * num_blocks) for marks in seen) / len(seen)


def bits_set(words: torch.Tensor) -> int:
    """Bits of [V, words] int64."""
    lanes = torch.arange(64, device=words.device)
    return sum(int(((part[..., None] >> lanes) & 1).sum()) for part in words.split(2**15))


@contextmanager
def marks_seen() -> Iterator[list[Any]]:
    seen: list[Any] = []
    if importlib.util.find_spec("triton") is None:
        # Nor are there kernels that could mark anything.
        yield seen
        return
    module = importlib.import_module("cce_dist.local_triton")
    made = module.marks_of

    def marks_of(*args: Any, **options: Any) -> Any:
        seen.append(made(*args, **options))
        return seen[-1]

    with patch.object(module, "marks_of", marks_of):
        yield seen


@contextmanager
def _without_exchanges(really: bool) -> Iterator[None]:
    # Where ranks ask, and where one of an empty shard answers.
    asks = importlib.import_module("cce_dist.local_triton")
    answers = importlib.import_module("cce_dist.empty_shard")
    exchanges = () if really else asks.EXCHANGES
    with patch.object(asks, "EXCHANGES", exchanges), patch.object(answers, "EXCHANGES", exchanges):
        yield
