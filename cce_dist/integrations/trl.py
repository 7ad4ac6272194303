"""Replaces the loss of TRL's trainers: SFT, DPO, KTO, GRPO, RLOO, experimental AsyncGRPO and GMPO.

All of them call `apply` of one autograd function of TRL, found under a module's name at each call.
An object of the same signature takes that name. `trl_mask` leaves out the tokens that trainers
ignore; `trl_distillation` serves the trainers that distil.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist import LossOptions, linear_cross_entropy
from cce_dist.backends.choose import TORCH, choose_backend
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.log import logger
from cce_dist.integrations.options import OPTIONS, differences, keywords_of
from cce_dist.integrations.trl_distillation import (
    IGNORED,
    Distillation,
    in_memory_until_the_backward,
    in_our_order,
)
from cce_dist.integrations.trl_mask import Mask

__all__ = ["Status", "apply", "patched", "remove", "status"]

UTILS, KERNELS = "trl.trainer.utils", "trl.kernels.chunked_logprob"
SEAM, FUNCTION = "_ChunkedLogProbFunction", "ChunkedLogProbFunction"
ARGUMENTS = (
    "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale "
    "outputs"
)
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# The statistics of `linear_cross_entropy` that give them.
STATS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_p2",
    "mean_logits": "logit_moments",
    "is_top1": "correct",
}
KNOWN = "TRL 1.15 and 1.16"
TAKEN = tuple(sorted(OPTIONS))


class LogProbs(NamedTuple):
    """The results of TRL's function: [N] each, None where they are not asked for."""

    log_probs: Tensor  # fp32, differentiable
    entropy: Tensor | None  # fp32, nats, differentiable
    log_sum_sq_probs: Tensor | None  # fp32
    mean_logits: Tensor | None  # fp32
    is_top1: Tensor | None  # bool


@dataclass(frozen=True)
class Status:
    """The state of the patch in this process.

    Args:
        options: of the loss; None: TRL computes its own.
        calls: losses computed since `apply`; those within torch.compile are not counted.
        version: of TRL; None where nothing is applied.
        file: of TRL; None where nothing is applied.
    """

    options: LossOptions | None
    calls: int = 0
    version: str | None = None
    file: str | None = None


class _Loss:
    """The object in the place of TRL's autograd function."""

    def __init__(self, options: LossOptions, original: Any, mask: Mask) -> None:
        self.options, self.original, self.mask = options, original, mask
        self.is_on, self.calls = True, 0

    def apply(
        self,
        hidden: Tensor,  # [N, D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> LogProbs:
        """Computes log-probabilities, and of `outputs` what is asked for."""
        if not self.is_on:
            # Other code has kept this object beyond remove().
            cap = final_logit_softcapping
            args = (hidden, weight, bias, targets, temperature, chunk_size, cap, logit_scale)
            return self.original.apply(*args, outputs)
        unknown = sorted(set(outputs) - {"log_probs", *OUTPUTS})
        if unknown:
            raise PatchError(f"cce_dist knows the outputs {list(OUTPUTS)} of TRL, got {unknown}")
        if not torch.compiler.is_compiling():
            self._count(hidden, weight)
        mask = self.mask.of_caller()
        if mask is not None:
            targets = targets.masked_fill(~mask, IGNORED)
        # The head's memory stays until the backward.
        weight = in_memory_until_the_backward(weight, hidden)
        bias = None if bias is None else bias.view_as(bias)
        scale, softcap = in_our_order(logit_scale, final_logit_softcapping, temperature)
        # Without any statistic the loss would come alone, as a tensor.
        stats: Any = tuple(STATS[name] for name in outputs if name in STATS) or ("lse",)
        result: Any = linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            reduction="none",
            softcap=softcap,
            logit_scale=scale,
            stats=stats,
            **keywords_of(self.options, of_tokens=True),
        )
        mean = None if result.logit_moments is None else result.logit_moments.mean
        entropy, sum_p2, mean = (
            None if x is None else x.float() for x in (result.entropy, result.sum_p2, mean)
        )
        return LogProbs(0.0 - result.loss.float(), entropy, sum_p2, mean, result.correct)

    def _count(self, hidden: Tensor, weight: Tensor) -> None:
        """Counts a loss; the first one is logged."""
        self.calls += 1
        if self.calls > 1:
            return
        chosen = choose_backend(self.options, hidden, max(1, len(hidden)), len(weight))
        logger.info(
            "cce_dist.linear_cross_entropy, gradient %r, backend %r, computes the log-"
            "probabilities of TRL %s in place of trl.kernels.%s; "
            "cce_dist.integrations.trl.remove() switches it off",
            keywords_of(self.options, of_tokens=True)["gradient"],
            "torch" if chosen is TORCH else "triton",
            _version(),
            FUNCTION,
        )
        if self.mask.code is None:
            logger.info(
                "TRL %s picks the rows of the tokens that count before it calls the loss, and the "
                "host waits for the device; that of TRL 1.16 does not have to",
                _version(),
            )


class _State:
    """The patch's state in this process; TRL's function is global to it, too."""

    loss: _Loss | None = None
    distillation: Distillation | None = None


def apply(**options: object) -> Status:
    """Replaces the log-probabilities and divergences of TRL's trainers, of those that exist and of
    later ones.

    Args: gradient, filter, logits, screen, backend, workspace_bytes and keep_logits of
        `cce_dist.linear_cross_entropy`, which has their defaults; `linear_distillation` takes
        gradient, filter, backend, workspace_bytes and, with TRL's beta 0, logits. Only GKDTrainer's
        loss is a scalar: others have gradient "filtered" for "in_forward".
    Raises:
        PatchError: TRL is missing or its function is not as expected; the message says what was
            expected and what came. Or another call has applied other options.
        ValueError: an option is unknown, or its value is not allowed.
    A call that raises changes nothing. A second call with the same options does nothing.
    """
    unknown = sorted(set(options) - set(TAKEN))
    if unknown:
        raise ValueError(f"cce_dist.integrations.trl takes the options {TAKEN}, got {unknown}")
    wanted = LossOptions(**options)  # pyright: ignore[reportArgumentType]
    loss = _State.loss
    if loss is None:
        utils, original = _find_seam()
        distillation = Distillation(wanted, _version())
        distillation.install()
        mask = Mask(utils)
        mask.install()
        _State.loss, _State.distillation = _Loss(wanted, original, mask), distillation
        setattr(utils, SEAM, _State.loss)
    elif loss.options != wanted:
        first, second = differences(loss.options, wanted)
        raise PatchError(
            f"apply() has been called with {first}, now with {second}; call remove() between them"
        )
    return status()


def remove() -> None:
    """Gives TRL its own function back, also to trainers that exist."""
    loss = _State.loss
    if loss is None:
        return
    utils = importlib.import_module(UTILS)
    if getattr(utils, SEAM) is loss:
        setattr(utils, SEAM, loss.original)
    loss.is_on = False
    loss.mask.remove()
    if _State.distillation is not None:
        _State.distillation.remove()
    _State.loss = _State.distillation = None


@contextmanager
def patched(**options: object) -> Iterator[Status]:
    """Applies the patch within a context. The end of the context, also by an exception, removes it,
    unless it was applied before."""
    was_applied = _State.loss is not None
    new_status = apply(**options)
    try:
        yield new_status
    finally:
        if not was_applied:
            remove()


def status() -> Status:
    """Returns the options, and how many losses were computed since `apply`."""
    loss = _State.loss
    if loss is None:
        return Status(None)
    file = importlib.import_module("trl").__file__
    distilled = 0 if _State.distillation is None else _State.distillation.calls
    return Status(loss.options, loss.calls + distilled, _version(), file)


def _version() -> str:
    return str(getattr(importlib.import_module("trl"), "__version__", "of an unknown version"))


def _find_seam() -> tuple[Any, Any]:
    """Finds the module whose name is replaced, and TRL's function.

    Raises:
        PatchError: TRL is missing, has no such function, or one of another signature; or other code
            has replaced it.
    """
    try:
        importlib.import_module("trl")
    except ImportError as error:
        raise PatchError(f"trl cannot be imported ({error}); {KNOWN} are supported") from error
    installed = f"{KNOWN} are supported, and TRL {_version()} is installed"
    try:
        utils, kernels = map(importlib.import_module, (UTILS, KERNELS))
    except ImportError as error:
        raise PatchError(f"{installed}: {error}") from error
    found_here, original = getattr(utils, SEAM, None), getattr(kernels, FUNCTION, None)
    if found_here is None or original is None:
        missing = f"{UTILS}.{SEAM}" if found_here is None else f"{KERNELS}.{FUNCTION}"
        raise PatchError(f"{installed}: it has no {missing}")
    if found_here is not original:
        raise PatchError(f"{UTILS}.{SEAM} must be TRL's {FUNCTION}, got {found_here!r}")
    arguments = " ".join(inspect.signature(original.forward).parameters)
    if arguments != ARGUMENTS:
        rule = f"{FUNCTION}.forward must have the arguments ({ARGUMENTS})"
        raise PatchError(f"{installed}: {rule}, got ({arguments})")
    outputs = getattr(kernels, "OPTIONAL_OUTPUTS", None)
    if outputs != OUTPUTS:
        raise PatchError(f"{installed}: its outputs must be {OUTPUTS}, got {outputs}")
    return utils, original
