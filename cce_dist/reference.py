"""The specification: the loss over dense logits, in any dtype, by autograd. For tests and docs.

Every formula of `cce_dist.loss.linear_cross_entropy` stands here in the plainest form, over the
whole vocabulary on one rank. Nothing in the library calls it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reference(NamedTuple):
    """Loss and statistics; shapes are those of the (shifted) targets, 0 at ignored tokens."""

    loss: Tensor
    nll: Tensor
    lse: Tensor
    entropy: Tensor
    sum_p2: Tensor
    correct: Tensor
    max_logit: Tensor
    mean_logit: Tensor
    variance_logit: Tensor
    candidates: Tensor | None  # [..., K] log-probabilities; None: none are given


def reference_logits(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    bias: Tensor | None = None,  # [V]
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: Tensor | float = 1.0,  # [...] of each token
) -> Tensor:
    """Computes z / T with z = logit_scale * softcap * tanh((E . C + bias) / softcap), [..., V]."""
    logits = hidden @ weight.T
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature[..., None]
    return logit_scale * logits / temperature


def divergence_reference(
    student: Tensor,  # [..., V] logits over the temperature
    teacher: Tensor,  # [..., V]
    divergence: str,
    beta: float = 0.5,
) -> Tensor:
    """Computes the divergence of two softmaxes as `linear_distillation` names it, [...]."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    if divergence == "tvd":
        return (p - q).abs().sum(-1) / 2
    if divergence == "forward_kl":
        return torch.where(p > 0, p * (log_p - log_q), 0).sum(-1)
    if divergence == "reverse_kl":
        return torch.where(q > 0, q * (log_q - log_p), 0).sum(-1)
    log_m = (beta * p + (1 - beta) * q).log()
    of_teacher = torch.where(p > 0, p * (log_p - log_m), 0).sum(-1)
    of_student = torch.where(q > 0, q * (log_q - log_m), 0).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student


def linear_cross_entropy_reference(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    targets: Tensor,  # [...] int64
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    shift: int = 0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    temperature: Tensor | float = 1.0,  # of `token_logprobs`: logprobs are -nll
    support: Tensor | None = None,  # [..., V] bool, True for the ids of a `TokenSupport`
    candidates: Tensor | None = None,  # [..., K] int64
    logits: Tensor | None = None,  # [..., V] in place of `reference_logits` (dense recipes)
) -> Reference:
    """Computes the loss of `linear_cross_entropy` from dense logits. No checks, no collectives."""
    if shift:
        hidden, targets = hidden[..., :-shift, :], targets[..., shift:]
        token_weight = None if token_weight is None else token_weight[..., shift:]
        if isinstance(temperature, Tensor):
            temperature = temperature[..., shift:]
        support = None if support is None else support[..., shift:, :]
        candidates = None if candidates is None else candidates[..., shift:, :]
        logits = None if logits is None else logits[..., :-shift, :]
    if logits is None:
        logits = reference_logits(
            hidden,
            weight,
            bias,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
        )
    if support is not None:
        logits = logits.masked_fill(~support, -torch.inf)
    vocab_size = logits.shape[-1]
    valid = targets != ignore_index
    ids = targets.masked_fill(~valid, 0)

    lse = logits.logsumexp(-1)
    # A token without a single id has lse -inf.
    log_p = (logits - lse[..., None]).masked_fill(logits == -torch.inf, -torch.inf)
    nll = -log_p.gather(-1, ids[..., None])[..., 0]
    sum_p2 = (2 * log_p).logsumexp(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0)).sum(-1)

    weights = logits.new_ones(vocab_size) if class_weight is None else class_weight.to(logits)
    loss = (1 - label_smoothing) * weights[ids] * nll + z_loss * lse**2
    if label_smoothing:
        loss = loss - label_smoothing * (weights * log_p).sum(-1) / vocab_size
    if token_weight is not None:
        loss = loss * token_weight.to(loss)
    loss = torch.where(valid, loss, 0)

    loss = _reduced(loss, reduction, torch.where(valid, weights[ids], 0).sum())
    mean, variance = _moments(logits, support)
    chosen = None
    if candidates is not None:
        ids = candidates.masked_fill(~valid[..., None], 0)
        chosen = torch.where(valid[..., None], log_p.gather(-1, ids), 0)

    def keep(stat: Tensor) -> Tensor:
        return torch.where(valid, stat, 0)

    return Reference(
        loss=loss,
        nll=keep(nll),
        lse=keep(lse),
        entropy=keep(entropy),
        sum_p2=keep(sum_p2),
        correct=valid & (logits.argmax(-1) == targets),
        max_logit=keep(logits.amax(-1)),
        mean_logit=keep(mean),
        variance_logit=keep(variance),
        candidates=chosen,
    )


def _reduced(loss: Tensor, reduction: str, denominator: Tensor) -> Tensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / torch.where(denominator == 0, 1, denominator)


def _moments(logits: Tensor, support: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes mean and variance of the logits of the allowed ids, [...] each."""
    allowed = torch.ones_like(logits, dtype=torch.bool) if support is None else support
    number = allowed.sum(-1).clamp_min(1)
    mean = logits.masked_fill(~allowed, 0).sum(-1) / number
    deviation = (logits - mean[..., None]).masked_fill(~allowed, 0)
    return mean, deviation.square().sum(-1) / number
