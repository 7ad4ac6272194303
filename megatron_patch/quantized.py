"""A head's 8-bit copy, for all microbatches of one call of Megatron's schedule.

No longer than that: Megatron's optimisers write parameters by `.data` or by views of their
buffers, which leaves the parameters' versions as they were: nobody could tell an old copy.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from cce_dist import StepQuantizer
from megatron_patch.options import PatchOptions
from megatron_patch.seams import SCHEDULES_OF_ALL_KINDS, find_schedules


class _State:
    """The state of this process."""

    module: Any = None  # Megatron's, with its schedules
    schedules: ClassVar[dict[str, Any]] = {}  # what stands there
    # By head, of the call that is under way; None: there is none.
    quantizers: dict[Any, StepQuantizer] | None = None


def schedules_for(options: PatchOptions) -> Any:
    """Megatron's module, where its schedules are to say when a step ends; None: they need not.

    Raises:
        PatchError: a schedule is not there.
    """
    screens = options.logits == "screened" and options.quantize_once
    # With the vocabulary over the pipeline `PipelineHead` knows.
    return find_schedules() if screens and not options.vocab_over_pipeline else None


def replace_schedules(module: Any) -> None:
    """Replaces Megatron's schedules. Args: module: what `schedules_for` gives."""
    if module is None:
        return
    _State.module = module
    for name in SCHEDULES_OF_ALL_KINDS:
        if name not in _State.schedules:
            _State.schedules[name] = ours = _as_one_step(getattr(module, name), name)
            setattr(module, name, ours)


def restore() -> None:
    for name, ours in _State.schedules.items():
        # Where someone has wrapped ours since, it stays under theirs, and keeps nothing.
        if getattr(_State.module, name) is ours:
            setattr(_State.module, name, ours.__wrapped__)
    _State.schedules.clear()


def quantizer_of(layer: Any) -> StepQuantizer | None:
    """Returns the quantizer of a head; None outside of our schedules, where a copy could be old."""
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
