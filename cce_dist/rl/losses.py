"""GRPO's, DAPO's and PPO's policy losses."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from cce_dist.core.types import accumulate_dtype
from cce_dist.frontend.dtensor import require_plain
from cce_dist.frontend.validation import require_tensor
from cce_dist.logprobs import TokenLogprobs
from cce_dist.options import require_choice, require_finite

KL = Literal["k1", "k2", "k3"]
Clip = float | tuple[float, float]


class PolicyLoss(NamedTuple):
    """A policy loss, and what one logs of it: detached means over the tokens that count.

    The loss is this process's own mean. For the mean over microbatches or data-parallel ranks weigh
    DAPO's and PPO's by `num_tokens` / the sum of all, GRPO's by the number of sequences with a
    token that counts.
    """

    loss: Tensor  # []; differentiable
    num_tokens: Tensor  # [] int64: the tokens that count
    outside: Tensor  # [] int64: tokens of the mask with a log-probability of -inf; none counts
    ratio: Tensor  # [] probability now / before
    clipped: Tensor  # [] share of tokens whose ratio is clipped, so that it has no gradient
    kl_before: Tensor  # [] nats a token, by k3: KL(before || now)
    kl_reference: Tensor | None  # [] nats a token, by k3: KL(now || reference)
    entropy: Tensor | None  # [] nats a token; None: `now` has none
    accuracy: Tensor | None  # [] share of tokens with the largest logit; None: `now` has no correct


def grpo_loss(
    now: TokenLogprobs,  # [B, T]
    before: Tensor,  # [B, T]
    advantages: Tensor,  # [B] or [B, T]
    *,
    mask: Tensor,  # [B, T] bool
    clip: Clip = 0.2,
    reference: Tensor | None = None,  # [B, T]
    kl_weight: float = 0.0,
    kl: KL = "k3",
    entropy_weight: float = 0.0,
) -> PolicyLoss:
    """Returns GRPO's loss: the mean over a sequence's tokens, then over sequences.

    A token's loss is -min(r A, clamp(r, 1 - low, 1 + high) A) + kl_weight KL - entropy_weight H,
    with r = exp(now - before), A its advantage, and H its entropy. Tensors may have any shape
    [..., T], with float dtypes, on one device; the loss is fp32 (float64 for `now` in float64). No
    gradient flows into `before`, `advantages` and `reference`.

    Tokens outside of the mask are not read: tensors may hold NaN there. A token with a
    log-probability of -inf in `now`, `before` or `reference`, such as a target outside of its
    support, is left out of all means as if the mask were False, and `outside` counts it. A sequence
    without a token that counts is in no mean. Without any token loss and gradients are 0.

    Args:
        now: under the policy that learns, from `token_logprobs`; with `shift` mask, before and
            reference are of the shifted tokens.
        before: under the policy that sampled the tokens.
        advantages: such as `group_advantages`.
        mask: the tokens that count, all of them within the mask of `now`, which has 0 for others.
        clip: low = high, or (low, high): low in [0, 1], high >= 0.
        reference: under a reference policy. None: no KL.
        kl_weight: >= 0; with 0 the KL is logged alone. The paper has 0.04.
        kl: the estimator of KL(now || reference), with x = reference - now. Averages of gradients
            are over tokens that `now` itself samples.
            "k1": -x. Its gradient is that of `now`, whose average is 0 whatever the reference: an
            estimator for logs and rewards, not for a loss.
            "k2": x^2 / 2. A biased estimate; the average of its gradient, -x times that of `now`,
            is the gradient of KL(now || reference).
            "k3": e^x - 1 - x, >= 0 and unbiased; the average of its gradient, 1 - e^x times that of
            `now`, is the gradient of KL(reference || now).
        entropy_weight: >= 0; > 0 needs `now` of `token_logprobs(..., entropy=True)`.
    Raises:
        ValueError: an argument is not as above.
    Collectives: none.
    Source: DeepSeekMath, arXiv:2402.03300, eq. 3 and 4; the KL, joschu.net/blog/kl-approx.html.
    """
    penalty = _Penalty(reference, kl_weight, kl, entropy_weight)
    return _policy_loss(now, before, advantages, mask, clip, penalty, of_sequences=True)


def dapo_loss(
    now: TokenLogprobs,  # [B, T]
    before: Tensor,  # [B, T]
    advantages: Tensor,  # [B] or [B, T]
    *,
    mask: Tensor,  # [B, T] bool
    clip: Clip = (0.2, 0.28),
) -> PolicyLoss:
    """Returns DAPO's loss: the mean over all tokens, the ratio clipped higher above, no KL.

    Arguments, errors and tokens that do not count: as in `grpo_loss`.

    Source: DAPO, arXiv:2503.14476, eq. 8 to 12.
    """
    penalty = _Penalty(None, 0.0, "k3", 0.0)
    return _policy_loss(now, before, advantages, mask, clip, penalty, of_sequences=False)


def ppo_loss(
    now: TokenLogprobs,  # [B, T]
    before: Tensor,  # [B, T]
    advantages: Tensor,  # [B] or [B, T]
    *,
    mask: Tensor,  # [B, T] bool
    clip: Clip = 0.2,
    reference: Tensor | None = None,  # [B, T]
    kl_weight: float = 0.0,
    kl: KL = "k3",
    entropy_weight: float = 0.0,
) -> PolicyLoss:
    """Returns PPO's clipped policy loss: the mean over all tokens. A value loss is the caller's.

    Arguments, errors and tokens that do not count: as in `grpo_loss`.

    Source: PPO, arXiv:1707.06347, eq. 7 and 9.
    """
    penalty = _Penalty(reference, kl_weight, kl, entropy_weight)
    return _policy_loss(now, before, advantages, mask, clip, penalty, of_sequences=False)


class _Penalty(NamedTuple):
    reference: Tensor | None
    kl_weight: float
    kl: KL
    entropy_weight: float


def _policy_loss(
    now: TokenLogprobs,
    before: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: Clip,
    penalty: _Penalty,
    *,
    of_sequences: bool,
) -> PolicyLoss:
    least, largest = _ratio_bounds(clip)
    _check_tensors(now, before, advantages, mask, penalty.reference)
    _check_penalty(now, penalty)
    # Sums of 16 bits overflow, and `before` may be wider than `now`.
    entropy = None if now.entropy is None else _widened(now.entropy)
    now = now._replace(logprobs=_widened(now.logprobs), entropy=entropy)
    reference = penalty.reference
    counts = mask
    for each in (now.logprobs, before, reference):
        counts = counts if each is None else counts & (each != -torch.inf)

    def constant(values: Tensor) -> Tensor:
        return _where(counts, values.detach()).to(now.logprobs.dtype)

    if advantages.dim() < mask.dim():
        advantages = advantages[..., None].expand_as(mask)
    advantages = constant(advantages)
    logprobs = _where(counts, now.logprobs)
    log_ratio = logprobs - constant(before)
    ratio = log_ratio.detach().exp()
    too_large = (advantages > 0) & (ratio > largest)
    too_small = (advantages < 0) & (ratio < least)
    clipped = too_large | too_small
    # A ratio may be inf. Where it has no gradient autograd must not multiply it by 0.
    with_gradient = _where(~clipped & (advantages != 0), log_ratio).exp()
    bounded = torch.where(too_small, least, torch.where(too_large, largest, with_gradient))
    per_token = -bounded * advantages
    kl_reference = None
    if reference is not None:
        gap = constant(reference) - logprobs
        kl_reference = _mean(_estimate("k3", gap.detach()), counts)
        if penalty.kl_weight != 0:
            per_token = per_token + penalty.kl_weight * _estimate(penalty.kl, gap)
    if now.entropy is not None and penalty.entropy_weight != 0:
        per_token = per_token - penalty.entropy_weight * now.entropy
    accuracy = None if now.correct is None else _mean(now.correct.to(ratio.dtype), counts)
    return PolicyLoss(
        loss=_mean_of_sequences(per_token, counts) if of_sequences else _mean(per_token, counts),
        num_tokens=counts.sum(),
        outside=(mask & ~counts).sum(),
        ratio=_mean(ratio, counts),
        clipped=_mean(clipped.to(ratio.dtype), counts),
        kl_before=_mean(_estimate("k3", log_ratio.detach()), counts),
        kl_reference=kl_reference,
        entropy=None if now.entropy is None else _mean(now.entropy.detach(), counts),
        accuracy=accuracy,
    )


def _estimate(kl: KL, gap: Tensor) -> Tensor:
    if kl == "k1":
        return -gap
    return gap.square() / 2 if kl == "k2" else gap.expm1() - gap


def _widened(values: Tensor) -> Tensor:
    return values.to(accumulate_dtype(values.dtype))


def _where(counts: Tensor, values: Tensor) -> Tensor:
    return torch.where(counts, values, 0.0)


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    return _where(counts, values).sum() / counts.sum().clamp_min(1)


def _mean_of_sequences(values: Tensor, counts: Tensor) -> Tensor:
    lengths = counts.sum(-1)
    means = _where(counts, values).sum(-1) / lengths.clamp_min(1)
    return means.sum() / (lengths > 0).sum().clamp_min(1)


def _ratio_bounds(clip: object) -> tuple[float, float]:
    pair = clip if isinstance(clip, (tuple, list)) else (clip, clip)
    if len(pair) != 2:
        raise ValueError(f"clip must be a number or a pair (low, high), got {clip!r}")
    low = require_finite("clip's low", pair[0], minimum=0)
    high = require_finite("clip's high", pair[1], minimum=0)
    if low > 1:
        raise ValueError(f"clip's low must be <= 1, since a ratio is >= 0, got {low!r}")
    return 1.0 - low, 1.0 + high


def _check_tensors(
    now: object, before: object, advantages: object, mask: object, reference: object
) -> None:
    if not isinstance(now, TokenLogprobs):
        raise ValueError(f"now must be a TokenLogprobs, as of token_logprobs, got {type(now)}")
    require_plain("now.logprobs", now.logprobs)
    logprobs = require_tensor("now.logprobs", now.logprobs)
    shape, device = logprobs.shape, logprobs.device
    if not shape:
        raise ValueError("now.logprobs must have shape [..., T], got []")
    tensors = {"now.logprobs": logprobs, "before": before, "advantages": advantages, "mask": mask}
    # Statistics of other tokens would be broadcast, or fail far from here.
    optional = {"now.entropy": now.entropy, "now.correct": now.correct, "reference": reference}
    tensors |= {name: value for name, value in optional.items() if value is not None}
    for name, value in tensors.items():
        require_plain(name, value)
        tensor = require_tensor(name, value)
        if tensor.shape != shape and not (name == "advantages" and tensor.shape == shape[:-1]):
            allowed = f"{list(shape)}" + f" or {list(shape[:-1])}" * (name == "advantages")
            raise ValueError(
                f"{name} must have shape {allowed} (from now.logprobs), got {list(tensor.shape)}"
            )
        if tensor.device != device:
            raise ValueError(f"{name} must be on now's device {device}, got {tensor.device}")
        is_bool = name in ("mask", "now.correct")
        if is_bool and tensor.dtype != torch.bool:
            raise ValueError(f"{name} must be a bool tensor, got {tensor.dtype}")
        if not is_bool and not tensor.is_floating_point():
            raise ValueError(f"{name} must have a float dtype, got {tensor.dtype}")


def _check_penalty(now: TokenLogprobs, penalty: _Penalty) -> None:
    require_choice("kl", penalty.kl, get_args(KL))
    if require_finite("kl_weight", penalty.kl_weight, minimum=0) != 0 and penalty.reference is None:
        raise ValueError(f"kl_weight must be 0 without a reference, got {penalty.kl_weight!r}")
    weight = require_finite("entropy_weight", penalty.entropy_weight, minimum=0)
    if weight != 0 and now.entropy is None:
        raise ValueError(
            f"entropy_weight must be 0 where now has no entropy, got {weight!r}: take now from "
            "token_logprobs(..., entropy=True)"
        )
