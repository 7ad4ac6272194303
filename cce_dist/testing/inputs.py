"""Seeded inputs of a linear cross-entropy; the shape of their softmax decides what a test sees."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """The tensors of one loss, over the whole vocabulary."""

    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D], padding rows included
    targets: Tensor  # [...] int64
    bias: Tensor | None = None  # [V]
    token_weight: Tensor | None = None  # [...]
    class_weight: Tensor | None = None  # [vocab_size]

    def with_options(self, generator: torch.Generator, *names: str) -> Inputs:
        """Adds the named optional tensors ("bias", "token_weight", "class_weight")."""
        num_classes = len(self.weight)
        draws = {
            "bias": lambda: _normal(generator, num_classes).to(self.weight.dtype),
            "token_weight": lambda: torch.rand(self.targets.shape, generator=generator) + 0.5,
            "class_weight": lambda: torch.rand(num_classes, generator=generator) + 0.5,
        }
        return replace(self, **{name: draws[name]() for name in names})

    def ignoring(
        self, generator: torch.Generator, fraction: float = 0.3, ignore_index: int = -100
    ) -> Inputs:
        """Gives a random `fraction` of the targets the value `ignore_index`."""
        chosen = torch.rand(self.targets.shape, generator=generator) < fraction
        return replace(self, targets=self.targets.masked_fill(chosen, ignore_index))


def _shape(tokens: int | Sequence[int]) -> tuple[int, ...]:
    return (tokens,) if isinstance(tokens, int) else tuple(tokens)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sample_targets(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    generator: torch.Generator,
) -> Tensor:
    """Draws targets [...] int64 from the softmax of the logits, like text of the model's own."""
    flat = hidden.reshape(-1, hidden.shape[-1]).double()
    ids = [
        torch.multinomial((rows @ weight.double().T).softmax(-1), 1, generator=generator)
        for rows in flat.split(1024)
        if len(rows)
    ]
    drawn = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
    return drawn.reshape(hidden.shape[:-1])


def gaussian_inputs(
    tokens: int | Sequence[int],
    num_classes: int,
    dim: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Draws logits ~ N(0, 1) and uniform targets: a model at initialisation. No filter pays."""
    shape = _shape(tokens)
    hidden = _normal(generator, *shape, dim)
    weight = _normal(generator, num_classes, dim) / math.sqrt(dim)
    targets = torch.randint(0, num_classes, shape, generator=generator)
    return Inputs(hidden.to(dtype), weight.to(dtype), targets)


def zipf_inputs(
    tokens: int | Sequence[int],
    num_classes: int,
    dim: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    """Imitates a trained model's softmax: most columns hold next to no mass.

    The log-frequency of a token lies along one direction that all hidden states share; each
    context, shared by 16 tokens, lifts a few frequent candidates by 8 + offset, 8/2, 8/3, ...
    nats. Targets are drawn from the softmax.

    The benchmarks' inputs are not these: they fit the logits of 8 or more candidates exactly, which
    at a test's small dim would make all logits twice as large.
    """
    shape = _shape(tokens)
    num_tokens = math.prod(shape)
    frequency_rank = torch.randperm(num_classes, generator=generator)
    log_frequency = -1.1 * torch.log(frequency_rank.double() + 1)
    along = 4.0
    weight = 0.7 * _normal(generator, num_classes, dim) / math.sqrt(dim)
    weight[:, 0] = log_frequency / along

    num_contexts = -(-num_tokens // 16)
    unigram = log_frequency.exp()
    num_candidates = min(6, num_classes)
    hidden = torch.zeros(num_tokens, dim, dtype=torch.float64)
    if num_tokens:
        candidates = torch.multinomial(
            unigram.expand(num_contexts, -1), num_candidates, generator=generator
        ).repeat_interleave(16, 0)[:num_tokens]
        lift = 8 / torch.arange(1, num_candidates + 1, dtype=torch.float64)
        order = torch.rand(num_tokens, num_candidates, generator=generator).argsort(-1)
        rows = weight[candidates]
        rows[..., 0] = 0
        scale = lift[order] / rows.square().sum(-1).clamp(min=1e-3)
        hidden = (scale[..., None] * rows).sum(1)
        hidden += 0.3 * _normal(generator, num_tokens, dim)
    hidden[:, 0] = along
    hidden, weight = hidden.reshape(*shape, dim).to(dtype), weight.to(dtype)
    return Inputs(hidden, weight, sample_targets(hidden, weight, generator))


def large_logit_inputs(
    tokens: int | Sequence[int],
    num_classes: int,
    dim: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    largest: float = 1e4,
) -> Inputs:
    """Draws logits up to +-`largest`, of both signs in every row: exponentials would overflow.

    Columns come in pairs that nearly tie, so that the softmax is not one-hot everywhere.
    """
    inputs = gaussian_inputs(tokens, num_classes, dim, generator=generator, dtype=torch.float64)
    weight = inputs.weight.clone()
    weight[1::2] = weight[: num_classes // 2 * 2 : 2]
    logits = inputs.hidden.reshape(-1, dim) @ weight.T
    # Both factors share the scale: fp16 ends at 65504.
    scale = math.sqrt(largest / float(logits.abs().max())) if logits.numel() else 1.0
    hidden, weight = (inputs.hidden * scale).to(dtype), (weight * scale).to(dtype)
    return replace(inputs, hidden=hidden, weight=weight)


Row = dict[str, Any]
Factors = Mapping[str, Sequence[Any]]
Allowed = Callable[[Row], bool]


def pairwise(factors: Factors, allowed: Allowed = lambda row: True) -> list[Row]:
    """Returns rows in which every pair of values that `allowed` admits occurs at least once."""
    every = _candidates(factors, allowed)
    return _covering(every, _standing(factors, every, 2), [0] * len(every))


def each_choice(factors: Factors, allowed: Allowed = lambda row: True) -> list[Row]:
    """Returns rows in which every value that `allowed` admits occurs at least once.

    There are as many rows as the longest factor has values, or a few more.
    """
    every = _candidates(factors, allowed)
    return _covering(every, _standing(factors, every, 1), _standing(factors, every, 2))


def _covering(every: Sequence[Row], wanted: Sequence[int], then: Sequence[int]) -> list[Row]:
    """Returns rows that have all bits of `wanted`. The row with the most new ones is taken first,
    and of those the row with the most new bits of `then`."""
    missing, seen = functools.reduce(operator.or_, wanted, 0), 0
    rows = []
    while missing:
        new = [
            ((mine & missing).bit_count(), (others & ~seen).bit_count())
            for mine, others in zip(wanted, then, strict=True)
        ]
        best = new.index(max(new))
        rows.append(every[best])
        missing &= ~wanted[best]
        seen |= then[best]
    return rows


def _standing(factors: Factors, rows: Sequence[Row], size: int) -> list[int]:
    """Returns for each row its combinations of `size` values, as bits of an int.

    A value counts together with its factor's name. Bits are a hundred times as fast as sets.
    """
    bits: dict[tuple, int] = {}
    sets = []
    for row in rows:
        places = [(name, values.index(row[name])) for name, values in factors.items()]
        standing = itertools.combinations(places, size)
        sets.append(sum(1 << bits.setdefault(each, len(bits)) for each in standing))
    return sets


def _candidates(factors: Factors, allowed: Allowed) -> list[Row]:
    """Returns allowed rows in random order: all of them, or 4000 where there are more."""
    rng = random.Random(0)
    if math.prod(len(values) for values in factors.values()) <= 4000:
        every = [
            dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values())
        ]
        rng.shuffle(every)
        return [row for row in every if allowed(row)]
    rows: list[Row] = []
    while len(rows) < 4000:
        row = {name: rng.choice(list(values)) for name, values in factors.items()}
        if allowed(row):
            rows.append(row)
    return rows
