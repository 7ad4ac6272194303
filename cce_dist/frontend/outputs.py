"""Results of a call: the loss and its statistics, in the shape of the targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.frontend.reduction import PickedTokens, TokenLoss
from cce_dist.options import LossOptions


class LogitMoments(NamedTuple):
    """Moments of each token's logits z over the whole vocabulary; not differentiable.

    Fields have targets' (shifted) shape, fp32 (float64 for float64 inputs), 0 at ignored tokens.
    """

    max: Tensor
    mean: Tensor
    variance: Tensor  # population variance: divided by V


class LossOutput(NamedTuple):
    """The loss and the statistics of `stats`; other statistics are None.

    Statistics have targets' (shifted) shape, 0 or False at ignored tokens.
    """

    loss: Tensor
    lse: Tensor | None = None  # natural log-sum-exp of the logits; differentiable
    entropy: Tensor | None = None  # the softmax's entropy, nats; differentiable
    correct: Tensor | None = None  # bool: the target has the largest logit
    tail_mass: Tensor | None = None  # probability mass whose gradient is approximated
    logit_moments: LogitMoments | None = None
    # bool: logits were screened; the same at all tokens that count
    screened: Tensor | None = None
    sum_p2: Tensor | None = None  # log of the sum of squared probabilities


@dataclass(frozen=True)
class Finish:
    """The reductions that turn the autograd functions' vectors into the loss's results."""

    terms: TokenLoss
    picked: PickedTokens
    shape: torch.Size  # targets' shape
    options: LossOptions
    vocab_size: int

    def result(
        self,
        nll: Tensor,
        lse: Tensor,
        smooth: Tensor | None,
        entropy: Tensor | None,
        plain: list[Tensor | None],
    ) -> Tensor | LossOutput:
        """Turns the outputs of `TwoPass` into the results of the loss."""
        loss = self.terms.per_token(nll, lse, smooth, slice(None))
        loss = self._scatter(loss) if self.options.reduction == "none" else loss.sum()
        return self.with_stats(loss, lse, entropy, plain)

    def with_stats(
        self, loss: Tensor, lse: Tensor, entropy: Tensor | None, plain: list[Tensor | None]
    ) -> Tensor | LossOutput:
        """Returns the loss; a LossOutput of loss and statistics if `stats` is not empty."""
        if not self.options.stats:
            return loss
        sum_p2, max_logit, is_argmax, mean, m2, screened, tail = plain
        moments = None
        if max_logit is not None and mean is not None and m2 is not None:
            variance = m2 / self.vocab_size
            moments = LogitMoments(*(self._scatter(x) for x in (max_logit, mean, variance)))
        return LossOutput(
            loss=loss,
            lse=self._scatter(lse) if "lse" in self.options.stats else None,
            entropy=None if entropy is None else self._scatter(entropy),
            correct=None if is_argmax is None else self._scatter(is_argmax.bool()),
            tail_mass=None if tail is None else self._scatter(tail),
            logit_moments=moments,
            screened=None if screened is None else self._scatter(screened.bool()),
            sum_p2=None if sum_p2 is None else self._scatter(sum_p2),
        )

    def _scatter(self, values: Tensor) -> Tensor:
        """Scatters values [N] of the tokens that count to targets' (shifted) shape."""
        return self.picked.scatter_to_shape(values, self.shape, self.options.shift)
