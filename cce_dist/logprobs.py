"""Per-token log-probabilities for reinforcement learning, computed by the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from cce_dist.frontend.dtensor import is_dtensor
from cce_dist.frontend.inputs import Inputs, options_of
from cce_dist.frontend.listed import (
    Listed,
    TokenSupport,
    beside_target,
    candidate_logprobs,
    check_candidates,
    check_support,
    is_everything,
    list_tokens,
)
from cce_dist.frontend.reduction import LossOutput
from cce_dist.frontend.support import Supported
from cce_dist.frontend.validation import require_tensor
from cce_dist.loss import compute_loss
from cce_dist.options import (
    Backend,
    Filter,
    LossOptions,
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
LogprobStat = Literal["entropy", "sum_p2", "correct", "mean_logit"]
# Of `top_k`.
LARGEST_K = 128


class TokenLogprobs(NamedTuple):
    """Log-probabilities of each token, and the statistics that were asked for; others are None.

    Unless a comment says otherwise fields have targets' (shifted) shape, in fp32 (float64 for
    float64 inputs). All are 0 where a token is left out.
    """

    logprobs: Tensor  # natural log of the target's probability; differentiable
    entropy: Tensor | None  # the softmax's entropy, in nats; differentiable
    sum_p2: Tensor | None = None  # log of the sum of squared probabilities
    correct: Tensor | None = None  # bool: the target has the largest logit, the first of equal ones
    mean_logit: Tensor | None = None  # of the ids of the softmax
    candidates: Tensor | None = None  # [..., K] log-probabilities; differentiable
    top_ids: Tensor | None = None  # [..., k] int64, by falling logit, equal logits by id
    top_logprobs: Tensor | None = None  # [..., k]
    outside: Tensor | None = None  # [] int64: the number of targets outside their support


def token_logprobs(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V_local, D]
    targets: Tensor,  # [...] int64
    *,
    mask: Tensor | None = None,  # [...] bool
    temperature: float | Tensor = 1.0,  # a Tensor: [...], any float dtype
    support: TokenSupport | None = None,
    candidates: Tensor | None = None,  # [..., K] int64
    top_k: int | None = None,
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
    invariant: bool = False,
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
        support: the token ids that the sampler allowed at each token: the softmax is over these
            alone, and so are all statistics. A target outside has log-probability -inf and no
            gradient; the result's `outside` counts such targets. The cost is in proportion to the
            number of ids: some 100 bytes an id, and a row of weight read twice. `filter` and
            `gradient` have no effect: every listed id has its gradient. temperature may require
            grad in any case.
        candidates: further ids at each token whose log-probabilities are wanted, aligned with
            targets; ids at tokens that are left out are not read. Outside of a support they have
            -inf.
        top_k: return the k largest logits' ids and log-probabilities, k in [1, 128]; not
            differentiable (pass top_ids as `candidates` of another call). With fewer ids in a
            support the rest has id -1 and -inf.
        entropy: compute the entropy; it costs next to nothing, and is differentiable.
        stats: "entropy", as with `entropy`, "sum_p2", "correct" and "mean_logit".
        gradient: "filtered" or "exact".
        invariant: as in `linear_cross_entropy`, without `support`, `candidates` and `top_k`.
    Raises:
        ValueError: an argument is not supported; the message says which.
    Collectives, determinism: the same as `linear_cross_entropy` with reduction "none". Candidates
        take in the forward one all-reduce of 4 bytes an id (in fp32 of one id more a token), and in
        the backward the collectives of a second hidden gradient; a support has these alone. top_k
        takes two all-gathers of [N, k].
    """
    require_bool("entropy", entropy)
    require_stats(stats, get_args(LogprobStat))
    if entropy and "entropy" not in stats:
        stats = ("entropy", *stats)
    require_choice("gradient", gradient, get_args(GradientOfEach))
    _check_lists(support, top_k)
    require_bool("invariant", invariant)
    lists = {"support": support, "candidates": candidates, "top_k": top_k}
    for name, value in lists.items():
        if invariant and value is not None:
            raise ValueError(f"{name} must be None with invariant=True, got {type(value)}")
    logit_scale = require_finite("logit_scale", logit_scale)
    token_temperature = None
    if isinstance(temperature, Tensor):
        entropy_of_all = "entropy" in stats and support is None
        token_temperature = _temperature_of_tokens(temperature, targets, entropy_of_all)
    else:
        logit_scale = over_temperature(logit_scale, temperature)
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
        stats=_stats_of_loss(stats, candidates is not None or top_k is not None),
        backend=backend,
        workspace_bytes=workspace_bytes,
        invariant=invariant,
    )
    inputs = Inputs(hidden, weight, targets, bias, temperature=token_temperature)
    call = (inputs, options, group, vocab_shard)
    outside = None
    if support is not None:
        listed = list_tokens(*call)
        check_support(support, listed)
        # Over the whole vocabulary the entropy has no derivative by the temperature.
        needs_lists = "entropy" in stats and _needs_grad(token_temperature)
        if needs_lists or not is_everything(support, listed):
            return _over_support(listed, support, candidates, top_k, stats)
        outside = listed.wrap(torch.zeros_like(support.offsets[0]))
    result = compute_loss(*call)
    if not isinstance(result, LossOutput):
        return TokenLogprobs(0.0 - result, None, outside=outside)
    moments = result.logit_moments
    logprobs = TokenLogprobs(
        0.0 - result.loss,
        result.entropy,
        result.sum_p2,
        result.correct,
        None if moments is None else moments.mean,
        outside=outside,
    )
    return _with_listed(logprobs, result, call, candidates, top_k)


def _with_listed(
    logprobs: TokenLogprobs,
    result: LossOutput,
    call: tuple[Inputs, LossOptions, Group | DeviceMesh | None, VocabShard | None],
    candidates: Tensor | None,
    top_k: int | None,
) -> TokenLogprobs:
    """Adds the log-probabilities of candidates and of the k largest logits."""
    lse, nll = result.lse, result.loss
    if lse is None:
        return logprobs
    listed = list_tokens(*call)
    if candidates is not None:
        ids = check_candidates(candidates, listed)
        chosen = candidate_logprobs(listed, ids, lse, nll, listed.result)
        logprobs = logprobs._replace(candidates=chosen)
    if top_k is not None:
        ids, logits = map(listed.result, listed.top(top_k))
        lse, nll = lse.detach(), nll.detach()
        top = logits - lse[..., None]
        if listed.is_wide:
            is_target = ids[..., 0] == listed.result(listed.targets)
            top = beside_target(logits, logits[..., :1], lse, nll.where(is_target, torch.inf))
        logprobs = logprobs._replace(top_ids=ids, top_logprobs=top)
    return logprobs


def _stats_of_loss(stats: tuple[str, ...], lse: bool) -> tuple[str, ...]:
    """Returns the loss's names of the statistics."""
    names = tuple("logit_moments" if name == "mean_logit" else name for name in stats)
    return ("lse", *names) if lse else names


def _over_support(
    listed: Listed,
    support: TokenSupport,
    candidates: Tensor | None,
    top_k: int | None,
    stats: tuple[str, ...],
) -> TokenLogprobs:
    supported = Supported.of(listed, support)
    plain = supported.detached()
    wanted = {
        "entropy": supported.entropy,
        "sum_p2": plain.sum_p2,
        "correct": plain.correct,
        "mean_logit": plain.mean_logit,
    }
    values = {name: listed.result(stat()) for name, stat in wanted.items() if name in stats}
    chosen = top_ids = top_logprobs = None
    if candidates is not None:
        ids = check_candidates(candidates, listed)
        chosen = listed.result(supported.candidates(ids))
    if top_k is not None:
        top_ids, top_logprobs = map(listed.result, plain.top(top_k))
    return TokenLogprobs(
        listed.result(supported.logprobs()),
        values.get("entropy"),
        values.get("sum_p2"),
        values.get("correct"),
        values.get("mean_logit"),
        chosen,
        top_ids,
        top_logprobs,
        listed.wrap(supported.outside()),
    )


def _check_lists(support: object, top_k: object) -> None:
    if support is not None and not isinstance(support, TokenSupport):
        raise ValueError(f"support must be a TokenSupport(offsets, ids), got {type(support)}")
    if top_k is None:
        return
    if type(top_k) is not int or not 1 <= top_k <= LARGEST_K:
        raise ValueError(f"top_k must be an int in [1, {LARGEST_K}], got {top_k!r}")


def over_temperature(logit_scale: float, temperature: float) -> float:
    temperature = require_finite("temperature", temperature)
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature!r}")
    if logit_scale != 0:
        name = f"logit_scale={logit_scale!r} / temperature={temperature!r}"
        require_factor(name, logit_scale / temperature)
    return logit_scale / temperature


def _needs_grad(temperature: Tensor | None) -> bool:
    return temperature is not None and temperature.requires_grad and torch.is_grad_enabled()


def _temperature_of_tokens(temperature: Tensor, targets: Tensor, entropy: bool) -> Tensor:
    require_tensor("temperature", temperature)
    if entropy and _needs_grad(temperature):
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
