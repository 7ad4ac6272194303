"""Log-probabilities of each token by us and by others, each under one signature.

A peer is imported when it is built. If that fails, a row of the results says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.contenders import Contender, import_alone
from cce_dist import TokenLogprobs, token_logprobs
from cce_dist.bench.golden import LossFunction
from cce_dist.logprobs import GradientOfEach, LogprobStat

# hidden [N, D], weight [V, D], targets [N] -> values of each token
TokenFunction = Callable[[Tensor, Tensor, Tensor], TokenLogprobs]

# Columns in a chunk: TRL's own.
TRL_CHUNK = 32768
STATS: tuple[LogprobStat, ...] = ("entropy", "correct")
# Tokens of a response, at most: Liger takes a response a chunk.
RESPONSE = 1024


@dataclass(frozen=True)
class Policy:
    """The loss of a policy gradient: the mean over tokens of -(A log p + entropy_weight H).

    Args:
        advantages: A of each token, [N] fp32.
    """

    advantages: Tensor
    entropy_weight: float

    def loss_of(self, function: TokenFunction) -> LossFunction:
        """Returns the loss of a function's log-probabilities, and of its entropy if it has one."""
        # A tensor, as are the advantages: verl refuses an expanded scalar as a gradient.
        bonus = torch.full_like(self.advantages, self.entropy_weight)

        def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            result = function(hidden, weight, targets)
            gain = self.advantages * result.logprobs
            if result.entropy is not None:
                gain = gain + bonus * result.entropy
            return -gain.mean()

        return loss


def draw_policy(num_tokens: int, device: torch.device, entropy_weight: float = 0.01) -> Policy:
    """Draws seeded normal advantages, of both signs."""
    generator = torch.Generator(device).manual_seed(2)
    advantages = torch.randn(num_tokens, generator=generator, device=device)
    return Policy(advantages, entropy_weight)


class Built(NamedTuple):
    loss: LossFunction
    tokens: TokenFunction | None  # None: the loss alone is known


@dataclass(frozen=True)
class LogprobContender(Contender):
    """Args: entropy: its loss has the entropy, and its gradient."""

    entropy: bool = True


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenLogprobs:
    """Computes log-probabilities, entropy and accuracy by logits in the inputs' dtype.

    The softmax is in fp32 (in float64 for float64).
    """
    logits = hidden @ weight.T
    log_p = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return TokenLogprobs(logprobs, entropy, correct=logits.argmax(-1) == targets)


def ours(
    gradient: GradientOfEach, stats: tuple[LogprobStat, ...] = STATS, *, invariant: bool = False
) -> TokenFunction:
    return partial(token_logprobs, gradient=gradient, stats=stats, invariant=invariant)


def trl() -> TokenFunction:
    """Returns the function that TRL's trainers call, with their chunks of columns."""
    function = resolve_name("trl.trainer.utils:_ChunkedLogProbFunction")

    def tokens(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenLogprobs:
        settings = (1.0, TRL_CHUNK, None, 1.0, ("log_probs", "entropy", "is_top1"))
        logprobs, entropy, _, _, correct = function.apply(hidden, weight, None, targets, *settings)
        return TokenLogprobs(logprobs, entropy, correct=correct)

    return tokens


def verl() -> TokenFunction:
    function = import_alone("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def tokens(hidden: Tensor, weight: Tensor, targets: Tensor) -> TokenLogprobs:
        return TokenLogprobs(*function(hidden, weight, targets, 1.0, "none"))

    return tokens


def liger(policy: Policy) -> Built:
    """Returns Liger's GRPO loss at a ratio of 1, whose gradient is that of -A log p."""
    make = resolve_name("liger_kernel.chunked_loss:LigerFusedLinearGRPOLoss")
    compiled = policy.advantages.is_cuda
    grpo = make(beta=0.0, compiled=compiled, use_ref_model=False, loss_type="bnpo")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        length = math.gcd(len(targets), RESPONSE)
        ids, each = targets.view(-1, length), policy.advantages.view(-1, length)
        # Its own advantages are those of responses; this factor is one of each token's loss.
        result, _ = grpo(
            hidden.view(*ids.shape, -1),
            weight,
            ids,
            torch.ones_like(each),
            torch.ones_like(each[:, 0]),
            vllm_is_ratio=each,
        )
        return result

    return Built(loss, None)


def _built(make: Callable[[], TokenFunction], policy: Policy) -> Built:
    tokens = make()
    return Built(policy.loss_of(tokens), tokens)


# In the order in which they are measured. Compilers of their own come last.
CONTENDERS = {
    "filtered": LogprobContender("ours", partial(_built, partial(ours, "filtered"))),
    "exact": LogprobContender("ours", partial(_built, partial(ours, "exact"))),
    "invariant": LogprobContender("ours", partial(_built, partial(ours, "exact", invariant=True))),
    "filtered-plain": LogprobContender(
        *("ours", partial(_built, partial(ours, "filtered", ()))),
        entropy=False,
        note="log-probabilities alone",
    ),
    "exact-plain": LogprobContender(
        *("ours", partial(_built, partial(ours, "exact", ()))),
        entropy=False,
        note="log-probabilities alone",
    ),
    "invariant-plain": LogprobContender(
        *("ours", partial(_built, partial(ours, "exact", (), invariant=True))),
        entropy=False,
        note="log-probabilities alone",
    ),
    "dense": LogprobContender("dense", partial(_built, lambda: dense)),
    "trl": LogprobContender("peer", partial(_built, trl)),
    "verl": LogprobContender("peer", partial(_built, verl), note="no accuracy"),
    "torch-compile": LogprobContender(
        "peer", partial(_built, lambda: torch.compile(dense, dynamic=False)), on_cpu=False
    ),
    "liger-grpo": LogprobContender(
        *("peer", liger),
        entropy=False,
        note="a loss and no entropy; its forward computes the gradients",
    ),
}
