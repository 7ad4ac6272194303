"""A head's 8-bit copy, for all microbatches of one call of Megatron's schedule.

The copy ends with the call. Megatron's optimizers write parameters by `.data` or by views of their
buffers, which leaves the parameters' versions as they were: an old copy would go unnoticed.
"""

from __future__ import annotations

from typing import Any

from cce_dist import StepQuantizer
from megatron_patch.options import PatchOptions
from megatron_patch.replacements import Replacements
from megatron_patch.seams import SCHEDULES_OF_ALL_KINDS, find_schedules

_SCHEDULES = Replacements()


class _State:
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
    for name in () if module is None else SCHEDULES_OF_ALL_KINDS:
        _SCHEDULES.replace(module, name, _as_one_step)


def restore() -> None:
    _SCHEDULES.restore()


def quantizer_of(layer: Any) -> StepQuantizer | None:
    """Returns a head's quantizer; None outside of our schedules, where a copy could be old."""
    quantizers = _State.quantizers
    if quantizers is not None and layer not in quantizers:
        quantizers[layer] = StepQuantizer()
        quantizers[layer].begin()
    return None if quantizers is None else quantizers[layer]


def _as_one_step(original: Any, *args: Any, **kwargs: Any) -> Any:
    _end()
    _State.quantizers = {}
    try:
        return original(*args, **kwargs)
    finally:
        _end()


def _end() -> None:
    for quantizer in (_State.quantizers or {}).values():
        quantizer.end()
    _State.quantizers = None
