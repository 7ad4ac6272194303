"""Calls of `token_logprobs` with listed ids, beside dense logits masked with -inf."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cce_dist import TokenLogprobs, TokenSupport
from cce_dist.reference import linear_cross_entropy_reference

SHAPE, DIM, CLASSES = (3, 24), 24, 90
STATS = ("entropy", "sum_p2", "correct", "mean_logit")
LEAVES = ("hidden", "weight", "bias", "temperature")


@dataclass(frozen=True)
class Listing:
    """Inputs; `allowed` is the support as a mask, with targets outside and an empty row."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    temperature: Tensor
    allowed: Tensor  # [..., V] bool
    candidates: Tensor  # [..., K]

    @classmethod
    def make(cls, dtype: torch.dtype, seed: int = 0) -> Listing:
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        targets = torch.randint(CLASSES, SHAPE, generator=generator)
        # Some ids are never allowed, others nearly always, as in text.
        chance = torch.rand(CLASSES, generator=generator) ** 2
        allowed = torch.rand(*SHAPE, CLASSES, generator=generator) < 0.5 * chance
        often = torch.rand(*SHAPE, 1, generator=generator) < 0.9
        allowed.scatter_(-1, targets[..., None], often)
        allowed[1, 4] = False
        targets[0, 5], targets[2, -1] = -100, -100
        candidates = torch.randint(CLASSES, (*SHAPE, 5), generator=generator)
        candidates[..., 1] = candidates[..., 0]
        temperature = 0.5 + torch.rand(SHAPE, generator=generator)
        return cls(
            randn(*SHAPE, DIM),
            randn(CLASSES, DIM),
            randn(CLASSES),
            targets,
            temperature.to(torch.promote_types(dtype, torch.float32)),
            allowed,
            candidates,
        )

    def to(self, dtype: torch.dtype) -> Listing:
        floats = {name: getattr(self, name).to(dtype) for name in LEAVES}
        return replace(self, **floats)

    def on(self, device: str) -> Listing:
        return Listing(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def leaves(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).detach().clone().requires_grad_() for name in LEAVES}

    @property
    def support(self) -> TokenSupport:
        """Ids in falling order, the first of each token twice."""
        offsets, ids = [0], []
        for row in self.allowed.reshape(-1, self.allowed.shape[-1]):
            of_token = row.nonzero()[:, 0].flip(0)
            ids += [of_token[:1], of_token]
            offsets.append(offsets[-1] + len(of_token[:1]) + len(of_token))
        device = self.allowed.device
        return TokenSupport(torch.tensor(offsets, device=device), torch.cat(ids))

    def usable(self, shift: int) -> Tensor:
        """Tokens that count and have a support, in the shifted shape: only there dense logits have
        gradients."""
        counts = (self.targets != -100) & self.allowed.any(-1)
        return counts[..., shift:]

    def dense(
        self, leaves: dict[str, Tensor], *, supported: bool, shift: int, options: dict[str, Any]
    ) -> TokenLogprobs:
        """The results by dense logits; a token without a support gets all ids."""
        allowed = self.allowed.where(self.allowed.any(-1, keepdim=True), True)
        found = linear_cross_entropy_reference(
            leaves["hidden"],
            leaves["weight"],
            self.targets,
            bias=leaves["bias"],
            temperature=leaves["temperature"],
            support=allowed if supported else None,
            candidates=self.candidates,
            shift=shift,
            **options,
        )
        counts = self.targets[..., shift:] != -100
        return TokenLogprobs(
            torch.where(counts, -found.nll, 0),
            found.entropy,
            found.sum_p2,
            found.correct,
            found.mean_logit,
            found.candidates,
        )
