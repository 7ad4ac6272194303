"""Inputs of a benchmark: random, skewed as a trained model's, or captured from a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from .shapes import Shape
from .zipf import zipf_tensors

KINDS = ("gaussian", "zipf", "zipf-shuffled", "zipf-interleaved")
# Ranks among which the last of these deals out the vocabulary.
DEALT_TO = 4
IGNORE_INDEX = -100
# Channels that stick out by so much, and so many of them.
OUTLIERS = ("alike", "varying")
OUTLIER_SIZE, OUTLIER_SHARE = 30, 1 / 24


@dataclass(frozen=True)
class BenchInputs:
    """hidden [N, D], weight [V, D], targets [N] int64; `kind` names where they come from.

    Args:
        token_counts: [V] int64, how often the training text has each id; None: not known.
        training: of a captured file: its step, and how the model was trained.
        softcap: of the logits; None: they have none.
    """

    kind: str
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    token_counts: Tensor | None = None
    training: Mapping[str, int | float | bool] = field(default_factory=dict)
    softcap: float | None = None

    @property
    def description(self) -> dict[str, str | int]:
        """What identifies these inputs in a row of results."""
        return {
            "inputs": self.kind + ("" if self.softcap is None else f" softcap {self.softcap:g}"),
            "N": len(self.hidden),
            "ignored": int((self.targets == IGNORE_INDEX).sum()),
            "V": len(self.weight),
            "D": self.hidden.shape[1],
            "dtype": str(self.hidden.dtype).removeprefix("torch."),
        }

    @property
    def num_valid(self) -> int:
        return int((self.targets != IGNORE_INDEX).sum())

    def without_ignored(self) -> BenchInputs:
        """The same loss from fewer tokens: those whose target counts."""
        valid = self.targets != IGNORE_INDEX
        return replace(self, hidden=self.hidden[valid], targets=self.targets[valid])

    def ignoring(self, fraction: float) -> BenchInputs:
        """A seeded random `fraction` of the targets becomes IGNORE_INDEX.

        Raises:
            ValueError: fraction is not in [0, 1).
        """
        if not 0 <= fraction < 1:
            raise ValueError(f"ignored-fraction must lie in [0, 1), got {fraction}")
        if fraction == 0:
            return self
        device = self.targets.device
        generator = torch.Generator(device).manual_seed(1)
        order = torch.rand(len(self.targets), generator=generator, device=device).argsort()
        chosen = order[: round(fraction * len(order))]
        targets = self.targets.clone()
        targets[chosen] = IGNORE_INDEX
        return replace(self, targets=targets)

    def with_outliers(self, kind: str) -> BenchInputs:
        """Some of hidden's channels far larger than others, and the weight's as much smaller, as
        trained models have them: "alike", at all tokens by the same, or "varying".

        Raises:
            ValueError: neither of those.
        """
        if kind not in OUTLIERS:
            raise ValueError(f"outliers must be one of {list(OUTLIERS)}, got {kind!r}")
        hidden, weight = (x.to(torch.float32, copy=True) for x in (self.hidden, self.weight))
        some = slice(0, math.ceil(hidden.shape[1] * OUTLIER_SHARE))
        if kind == "alike":
            hidden[:, some] += OUTLIER_SIZE * hidden.std()
        else:
            hidden[:, some] *= OUTLIER_SIZE
        weight[:, some] /= OUTLIER_SIZE
        hidden, weight = hidden.to(self.hidden.dtype), weight.to(self.weight.dtype)
        return replace(self, kind=f"{self.kind}, outliers {kind}", hidden=hidden, weight=weight)

    def times(self, factor: float) -> BenchInputs:
        """Hidden states, and so logits, that many times as large."""
        if factor == 1:
            return self
        return replace(self, kind=f"{self.kind} x {factor:g}", hidden=self.hidden * factor)


def check_softcap(softcap: float | None) -> None:
    """
    Raises:
        ValueError: it is not positive and finite.
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap}")


def make_inputs(
    kind: str,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> BenchInputs:
    """`kind` is "gaussian", "zipf", "zipf-shuffled" (frequent tokens anywhere in the vocabulary,
    rather than first), "zipf-interleaved" (each of four ranks has every fourth token, and its
    frequent ones first), or a file that `cce-dist bench capture` wrote.

    Of a file the first shape.num_tokens tokens are taken, or as many as it has; vocabulary and
    hidden size are its own.

    Raises:
        ValueError: neither a known kind nor such a file.
    """
    device = torch.device(device)
    if kind not in KINDS:
        if not Path(kind).is_file():
            raise ValueError(f"inputs must be one of {sorted(KINDS)} or a file, got {kind!r}")
        stored = torch.load(kind, weights_only=True, map_location=device)
        if not isinstance(stored, dict) or not {"hidden", "weight", "targets"} <= set(stored):
            raise ValueError(f"inputs must be a file of `cce-dist bench capture`, got {kind!r}")
        hidden, targets = (stored[name][: shape.num_tokens] for name in ("hidden", "targets"))
        weight = stored["weight"].to(dtype)
        # They were saved as a view that starts one token into its storage: QuACK wants 32 bytes.
        tensors = (hidden.to(dtype), weight, targets.clone())
        # Of a file of an older version: neither.
        about = (stored.get("token_counts"), stored.get("training", {}))
        return BenchInputs(Path(kind).stem, *tensors, *about)
    generator = torch.Generator(device).manual_seed(seed)
    num_tokens, vocab_size, dim = shape.num_tokens, shape.vocab_size, shape.dim
    if kind.startswith("zipf"):
        made = zipf_tensors(num_tokens, vocab_size, dim, generator=generator, dtype=dtype)
        inputs = BenchInputs(kind, *made)
        if kind == "zipf":
            return inputs
        order = torch.arange(vocab_size, device=device)
        if kind == "zipf-interleaved":
            return _renamed(inputs, torch.sort(order % DEALT_TO, stable=True).indices)
        return _renamed(inputs, torch.randperm(vocab_size, generator=generator, device=device))
    hidden = torch.randn(num_tokens, dim, generator=generator, device=device)
    weight = torch.randn(vocab_size, dim, generator=generator, device=device)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator, device=device)
    return BenchInputs(kind, hidden.to(dtype), weight.div_(math.sqrt(dim)).to(dtype), targets)


def _renamed(inputs: BenchInputs, order: Tensor) -> BenchInputs:
    """The same tokens under other ids: the order[i]-th is the i-th."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return replace(inputs, weight=inputs.weight[order], targets=place[inputs.targets])
