"""Inputs of a policy loss: advantages, and log-probabilities under two models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cce_dist.frontend.dtensor import require_plain
from cce_dist.frontend.validation import require_tensor
from cce_dist.logprobs import TokenLogprobs, token_logprobs
from cce_dist.options import require_bool, require_finite


def group_advantages(
    rewards: Tensor,  # [groups * group_size], a float dtype
    group_size: int,
    *,
    divide_by_std: bool = True,
    eps: float = 1e-4,
) -> Tensor:
    """Returns GRPO's advantages [groups * group_size]: (reward - mean) / (std + eps) of a group.

    A group is `group_size` consecutive rewards: those of one prompt's responses. Equal rewards give
    0 exactly. No gradient flows.

    Args:
        divide_by_std: False: reward - mean alone, as in Dr. GRPO (arXiv:2503.20783).
        eps: > 0. The standard deviation is that of a sample: it divides by group_size - 1.
    Raises:
        ValueError: an argument is not as above.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    require_plain("rewards", require_tensor("rewards", rewards))
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards must have shape [groups * group_size] and a float dtype, got "
            f"{list(rewards.shape)} in {rewards.dtype}"
        )
    if type(group_size) is not int or group_size < 2 or rewards.numel() % group_size != 0:
        raise ValueError(
            "group_size must be an int >= 2 that divides the number of rewards, "
            f"{rewards.numel()}, got {group_size!r}"
        )
    require_bool("divide_by_std", divide_by_std)
    if require_finite("eps", eps) <= 0:
        raise ValueError(f"eps must be > 0, got {eps!r}")
    # Squares of 16 bits overflow.
    grouped = rewards.detach().double().view(-1, group_size)
    # Without the first reward equal ones are 0, and so is their mean, which would be rounded.
    grouped = grouped - grouped[:, :1]
    centred = grouped - grouped.mean(1, keepdim=True)
    if divide_by_std:
        variance = centred.square().sum(1, keepdim=True) / (group_size - 1)
        centred = centred / (variance.sqrt() + eps)
    return centred.flatten().to(rewards.dtype)


def two_model_logprobs(
    policy: Mapping[str, Any],
    reference: Mapping[str, Any],
    ids: Tensor,  # [B, T] int64
    *,
    mask: Tensor | None = None,  # [B, T] bool
    shift: int = 0,
    temperature: float | Tensor = 1.0,
) -> tuple[TokenLogprobs, Tensor]:
    """Returns the policy's `TokenLogprobs` of ids, and a reference's log-probabilities of the same.

    Each mapping has a model's own arguments of `token_logprobs`: `hidden`, `weight`, and any other
    but targets, mask, shift and temperature, which the models share. So the models may differ in D,
    V, dtype, bias, softcap, ranks and backend.

    Returns:
        now: as `token_logprobs(**policy, ...)` returns it.
        reference: [B, T - shift], computed under `torch.no_grad`.
    Raises:
        ValueError: a mapping has a shared argument; or `token_logprobs` refuses a call.
    Collectives: those of both calls, the policy's first.
    """
    shared = {"targets": ids, "mask": mask, "shift": shift, "temperature": temperature}
    for name, model in (("policy", policy), ("reference", reference)):
        if not isinstance(model, Mapping) or not {"hidden", "weight"} <= model.keys():
            got = list(model) if isinstance(model, Mapping) else type(model)
            raise ValueError(f"{name} must be a mapping with hidden and weight, got {got}")
        if both := sorted(shared.keys() & model.keys()):
            raise ValueError(
                f"{name} must not have what the models share, got {both}: pass ids, mask, shift "
                "and temperature beside the mappings"
            )
    now = token_logprobs(**policy, **shared)
    with torch.no_grad():
        return now, token_logprobs(**reference, **shared).logprobs
