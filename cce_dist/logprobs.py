"""Per-token log-probabilities for reinforcement learning, computed by the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from cce_dist.frontend.dtensor import is_dtensor
from cce_dist.frontend.inputs import Inputs, options_of
from cce_dist.frontend.outputs import LossOutput
from cce_dist.frontend.validation import require_tensor
from cce_dist.loss import compute_loss
from cce_dist.options import (
    Backend,
    Filter,
    Screen,
    require_bool,
    require_choice,
    require_factor,
    require_finite,
    require_stats,
)
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group

IGNORED = -100
# torch.compile does not trace the defaults of LossOptions itself.
UNSCREENED = Screen()
GradientOfEach = Literal["filtered", "exact"]
LogprobStat = Literal["entropy", "sum_p2"]


class TokenLogprobs(NamedTuple):
    """Log-probabilities of each token, and the statistics that were asked for; others are None.

    Fields have targets' (shifted) shape, fp32 (float64 for float64 inputs), and are 0 where a token
    is left out.
    """

    logprobs: Tensor  # natural log of the target's probability; differentiable
    entropy: Tensor | None  # the softmax's entropy, in nats; differentiable
    sum_p2: Tensor | None = None  # log of the sum of squared probabilities


def token_logprobs(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V_local, D]
    targets: Tensor,  # [...] int64
    *,
    mask: Tensor | None = None,  # [...] bool
    temperature: float | Tensor = 1.0,  # a Tensor: [...], any float dtype
    entropy: bool = False,
    stats: tuple[LogprobStat, ...] = (),
    bias: Tensor | None = None,  # [V_local]
    group: Group | DeviceMesh | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    shift: int = 0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    gradient: GradientOfEach = "filtered",
    filter: Filter = Filter(),  # noqa: B008 - frozen
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
) -> TokenLogprobs:
    """Returns log softmax(z / temperature)[target] of every token; logits [N, V] are never stored.

    z is defined in `linear_cross_entropy`, as is every argument that is not listed here. PPO, GRPO
    and the like compute further terms (ratios, clipping, advantages, a KL term) by ordinary
    autograd on [N]: each token's upstream gradient may be any number, also negative or 0.

    Args:
        mask: True for tokens to compute, such as a response's. Other tokens cost nothing, and
            their hidden states are not read. It is aligned with targets: `shift` shifts both. None:
            every token. Tokens with target -100 are left out in any case.
        temperature: the sampling temperature, > 0. A tensor has a temperature for each token, and
            is aligned with targets as mask is. It may require grad, except with `entropy`; its
            gradient is -(logprob + entropy) / temperature of each token, times the upstream one.
            Values at tokens that do not count are not read.
        entropy: compute the entropy; it costs next to nothing, and is differentiable.
        stats: "entropy", as with `entropy`, and "sum_p2".
        gradient: "filtered" or "exact".
    Raises:
        ValueError: an argument is not supported; the message says which.
    Collectives, determinism: the same as `linear_cross_entropy` with reduction "none".
    """
    require_bool("entropy", entropy)
    require_stats(stats, get_args(LogprobStat))
    if entropy and "entropy" not in stats:
        stats = ("entropy", *stats)
    require_choice("gradient", gradient, get_args(GradientOfEach))
    logit_scale = require_finite("logit_scale", logit_scale)
    token_temperature = None
    if isinstance(temperature, Tensor):
        token_temperature = _temperature_of_tokens(temperature, targets, "entropy" in stats)
    else:
        logit_scale = _divide(logit_scale, temperature)
    if mask is not None:
        targets = _mask_targets(targets, mask)
    options = options_of(
        sequence_parallel=sequence_parallel,
        ignore_index=IGNORED,
        reduction="none",
        shift=shift,
        softcap=softcap,
        logit_scale=logit_scale,
        gradient=gradient,
        filter=filter,
        screen=UNSCREENED,
        stats=stats,
        backend=backend,
        workspace_bytes=workspace_bytes,
    )
    inputs = Inputs(hidden, weight, targets, bias, temperature=token_temperature)
    result = compute_loss(inputs, options, group, vocab_shard)
    if isinstance(result, LossOutput):
        return TokenLogprobs(0.0 - result.loss, result.entropy, result.sum_p2)
    return TokenLogprobs(0.0 - result, None)


def _divide(logit_scale: float, temperature: float) -> float:
    temperature = require_finite("temperature", temperature)
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature!r}")
    if logit_scale != 0:
        name = f"logit_scale={logit_scale!r} / temperature={temperature!r}"
        require_factor(name, logit_scale / temperature)
    return logit_scale / temperature


def _temperature_of_tokens(temperature: Tensor, targets: Tensor, entropy: bool) -> Tensor:
    require_tensor("temperature", temperature)
    if entropy and temperature.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "temperature must not require grad with entropy=True: the entropy's derivative by "
            "temperature is not computed; pass temperature.detach(), or call once more for the "
            "entropy"
        )
    if temperature.dim() == 0 and isinstance(targets, Tensor):
        return temperature.expand(targets.shape)
    return temperature


def _mask_targets(targets: Tensor, mask: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask)
        raise ValueError(f"mask must be a bool tensor, got {got}")
    if not isinstance(targets, Tensor):
        return targets  # the loss refuses it by name
    require_tensor("mask", mask)
    require_tensor("targets", targets)
    if is_dtensor(mask) != is_dtensor(targets):
        raise ValueError(
            f"mask must be a DTensor if targets is one, and plain if not, got {type(mask)} and "
            f"{type(targets)}"
        )
    if mask.shape != targets.shape:
        raise ValueError(
            f"mask must have targets' shape {list(targets.shape)}, got {list(mask.shape)}"
        )
    if mask.device != targets.device:
        raise ValueError(f"mask must be on targets' device {targets.device}, got {mask.device}")
    return targets.masked_fill(~mask, IGNORED)
