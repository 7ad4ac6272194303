"""A head's 8-bit copy, for all microbatches of one call of Megatron's schedule.

The copy ends with the call. Megatron's optimisers write parameters by `.data` or by views of their
buffers, which leaves the parameters' versions as they were: an old copy would go unnoticed.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from cce_dist import StepQuantizer
from megatron_patch.options import PatchOptions
from megatron_patch.seams import SCHEDULES_OF_ALL_KINDS, find_schedules


class _State:
    """The replaced schedules and the copies of this process."""

    module: Any = None  # Megatron's module of schedules
    schedules: ClassVar[dict[str, Any]] = {}  # our schedules in that module
    # Quantizers of the call under way, by head; None: no call is under way.
    quantizers: dict[Any, StepQuantizer] | None = None


def schedules_for(options: PatchOptions) -> Any:
    """Returns Megatron's module if its schedules must tell when a step ends; None: they need not.

    Raises:
        PatchError: a schedule is missing from the module.
    """
    screens = options.logits == "screened" and options.quantize_once
    # With the vocabulary over the pipeline `PipelineHead` knows when a step ends.
    return find_schedules() if screens and not options.vocab_over_pipeline else None


def replace_schedules(module: Any) -> None:
    """Replaces Megatron's schedules. Args: module: a result of `schedules_for`."""
    if module is None:
        return
    _State.module = module
    for name in SCHEDULES_OF_ALL_KINDS:
        if name not in _State.schedules:
            _State.schedules[name] = ours = _as_one_step(getattr(module, name), name)
            setattr(module, name, ours)


def restore() -> None:
    for name, ours in _State.schedules.items():
        # If other code has wrapped our function since, ours stays underneath, and keeps nothing.
        if getattr(_State.module, name) is ours:
            setattr(_State.module, name, ours.__wrapped__)
    _State.schedules.clear()


def quantizer_of(layer: Any) -> StepQuantizer | None:
    """Returns a head's quantizer; None outside of our schedules, where a copy could be old."""
    quantizers = _State.quantizers
    if quantizers is not None and layer not in quantizers:
        quantizers[layer] = StepQuantizer()
        quantizers[layer].begin()
    return None if quantizers is None else quantizers[layer]


def _as_one_step(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        if _State.schedules.get(name) is not schedule:
            return original(*args, **kwargs)
        _end()
        _State.quantizers = {}
        try:
            return original(*args, **kwargs)
        finally:
            _end()

    return schedule


def _end() -> None:
    for quantizer in (_State.quantizers or {}).values():
        quantizer.end()
    _State.quantizers = None
