"""The choice of the backend for this rank's shard: one decision, in one function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from cce_dist.backends.protocol import Backend
from cce_dist.backends.torch import quantize as torch_quantize
from cce_dist.backends.torch.backend import TorchBackend
from cce_dist.options import Backend as BackendName
from cce_dist.options import LossOptions, Screen

TORCH = TorchBackend()


def choose_backend(options: LossOptions, hidden: Tensor, num_tokens: int, columns: int) -> Backend:
    """Chooses the backend for "auto", "torch" or "triton".

    Raises:
        ValueError: options name a backend that cannot run, as an explicit choice never falls back;
            or the backend that can run lacks a feature that the options ask for.
    """
    chosen = _choose(options.backend, hidden, num_tokens, columns)
    by_kernels = chosen is not TORCH
    # Without tokens there are no logits. A rank without columns refuses what the others refuse:
    # they would else wait for each other.
    if not num_tokens:
        return chosen
    if options.invariant:
        _check_invariant(hidden, by_kernels)
    if options.keep_logits and not by_kernels:
        raise ValueError(
            'keep_logits=True needs the kernels of backend="triton", but '
            f'backend={options.backend!r} took "torch" here; leave keep_logits out'
        )
    if options.logits == "screened":
        _check_screening(options, hidden, by_kernels)
    return chosen


def _check_invariant(hidden: Tensor, by_kernels: bool) -> None:
    reason = None
    if by_kernels and hidden.dtype == torch.float16:
        reason = (
            "in fp16 the kernels divide all gradients by the largest one; use bf16 or fp32 inputs"
        )
    elif not by_kernels and hidden.device.type != "cpu":
        reason = (
            f'backend "torch" multiplies on {hidden.device.type} in an order that its library '
            "chooses; use bf16 or fp32 inputs and the kernels"
        )
    if reason is not None:
        raise ValueError(f"invariant=True cannot run here: {reason}")


def _check_screening(options: LossOptions, hidden: Tensor, by_kernels: bool) -> None:
    from cce_dist.backends.triton.launch.tiles import why_not_screened

    reason = why_not_screened(hidden, options.screen.dtype, by_kernels=by_kernels)
    if reason is not None:
        raise ValueError(f'logits="screened" cannot run here: {reason}; use logits="full"')


def quantizer_for(backend: BackendName, weight: Tensor, screen: Screen) -> Any:
    """Returns the module whose `moments_of` and `quantize_weight` make rows of 8 bits. The rows of
    both backends differ in the last digit of their fp32 numbers alone.

    Raises:
        ValueError: the named backend cannot run, or the weight is not of 16 bits.
    """
    from cce_dist.backends.triton.launch.tiles import (
        interpreted,
        warn_of_torch,
        why_not,
        why_not_screened,
    )

    by_kernels = backend == "triton"
    if backend == "auto":
        # The interpreter is for tests, which name it.
        by_kernels = not interpreted() and why_not(weight) is None
        if not by_kernels:
            warn_of_torch(weight)
    reason = why_not(weight) if by_kernels else None
    reason = reason or why_not_screened(weight, screen.dtype, by_kernels=by_kernels)
    if reason is not None:
        raise ValueError(f"weight cannot be quantised here: {reason.replace('hidden', 'weight')}")
    if not by_kernels:
        return torch_quantize
    from cce_dist.backends.triton.screened import quantize as screened_quantize

    return screened_quantize


def plays(options: LossOptions, hidden: object, weight: object) -> bool:
    """Tells whether a call may go to kernels: its repetitions then play a recording."""
    if options.backend == "torch" or not (_is_dense(hidden) and _is_dense(weight)):
        return False
    # Kernels on a CPU are the interpreter's, which a caller names.
    return hidden.is_cuda or (hidden.is_cpu and options.backend == "triton")


def goes_to_kernels(options: LossOptions, hidden: Tensor) -> bool:
    """Tells whether kernels compute a call that has tokens, on a rank that has columns."""
    from cce_dist.backends.triton.launch.tiles import interpreted, why_not

    by_name = options.backend == "triton" or (options.backend == "auto" and not interpreted())
    return by_name and why_not(hidden) is None


def _is_dense(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided


def repeated(
    function: Callable[..., Any],
    consume: Callable[..., None] = lambda *args: None,
    comes_again: bool = False,
) -> Callable[..., Any]:
    """Returns a function whose later calls of a kind play a recording, where Triton is there.
    Arguments: those of `Replayed`, which is imported at the first call."""

    @functools.cache
    def replayed() -> Callable[..., Any]:
        try:
            from cce_dist.backends.triton.launch.replay import Replayed
        except ImportError:
            return function
        return Replayed(function, consume, comes_again)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return replayed()(*args)

    return call


def _choose(backend: BackendName, hidden: Tensor, num_tokens: int, columns: int) -> Backend:
    if backend == "torch":
        return TORCH
    from cce_dist.backends.triton.launch.tiles import interpreted, warn_of_torch, why_not

    reason = why_not(hidden)
    if backend == "triton" and reason is not None:
        raise ValueError(
            f'backend="triton" cannot run here: {reason}; use backend="torch", or "auto" for the '
            "fastest one that can run"
        )
    # The interpreter is for tests, which name it.
    if reason is not None or (backend == "auto" and interpreted()):
        warn_of_torch(hidden)
        return TORCH
    if num_tokens == 0:
        return TORCH
    if columns == 0:
        from cce_dist.backends.empty_shard import EmptyShard

        return EmptyShard()
    from cce_dist.backends.triton.backend import TRITON

    return TRITON
