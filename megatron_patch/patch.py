"""Switches the loss on and off, for given models or for every model built from now on."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from megatron_patch import quantized
from megatron_patch.errors import PatchError
from megatron_patch.options import PatchOptions
from megatron_patch.pipeline import over_pipeline
from megatron_patch.refusals import why_not
from megatron_patch.replaced import options_of, put, take_away
from megatron_patch.replacements import Replacements
from megatron_patch.seams import PipelineSeams, Seams, find_pipeline_seams, find_seams

SETUP = "setup_embeddings_and_output_layer"


@dataclass(frozen=True)
class Status:
    """The patched models of this process, and the options.

    Args:
        options: apply to models that are built from now on; None: such models stay Megatron's.
        heads: class names of the patched models.
        version: of megatron.core; None where nothing is applied.
        file: of megatron.core; None where nothing is applied.
        over_pipeline: class names of the models whose vocabulary is over the pipeline.
    """

    options: PatchOptions | None
    heads: tuple[str, ...]
    version: str | None
    file: str | None
    over_pipeline: tuple[str, ...] = ()


class _State:
    """The patch's state in this process; Megatron's classes are global to it, too."""

    options: PatchOptions | None = None
    seams: Seams | None = None
    replaced = Replacements()
    # model -> its head, which somebody may have replaced since
    models: ClassVar[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()


def apply(model: Any = None, options: PatchOptions | None = None, **keywords: object) -> Status:
    """Replaces the loss of `model`, or of every language model that is built from now on.

    Args:
        model: a Megatron model, wrapped or not (Float16Module, DDP, FSDP), or a list of them (the
            stages of virtual pipelines). Stages without a head stay as they are. None: every later
            model, when it sets up its output layer.
        options: the options, which may also come as keywords; without either, the MEGATRON_PATCH_
            variables give them.
    Raises:
        PatchError: Megatron's functions are not as expected, a head cannot be patched (the message
            says what to change), or another call has applied other options.
        ValueError: an option is not allowed.
    A call that raises changes nothing. A second call with the same options does nothing. With
    vocab_over_pipeline all ranks of a pipeline build their models, or call `apply`, at the same
    time.
    """
    if options is not None and keywords:
        raise ValueError(f"options must be given once, got options and {sorted(keywords)}")
    wanted = PatchOptions.from_environment(**keywords) if options is None else options
    seams = find_seams()
    pipeline = find_pipeline_seams() if wanted.vocab_over_pipeline else None
    schedules = quantized.schedules_for(wanted)
    if model is not None:
        models = list(_language_models(model, seams))
        if pipeline is None:
            _apply_to(models, wanted, seams)
        else:
            _shard_models(models, wanted, pipeline)
        quantized.replace_schedules(schedules)
        return status()
    if _State.options is not None:
        if _State.options != wanted:
            raise PatchError(
                f"apply() has been called with {_State.options}, now with {wanted}; call remove() "
                "between them"
            )
        return status()

    def setup(original: Any, self: Any) -> Any:
        result = original(self)
        if pipeline is None:
            _apply_to([self], wanted, seams)
        elif not isinstance(self, pipeline.gpt_model):
            raise PatchError(f"vocab_over_pipeline knows GPTModel alone, got {type(self).__name__}")
        return result

    if pipeline is not None:
        over_pipeline.replace_schedule(pipeline)
        over_pipeline.shard_new_models(wanted, pipeline)
    _State.replaced.replace(seams.language_module, SETUP, setup)
    quantized.replace_schedules(schedules)
    _State.options, _State.seams = wanted, seams
    return status()


def remove(model: Any = None) -> None:
    """Undoes `apply` for `model`, or for all models and for models built later.

    One trace stays: a model whose vocabulary is over the pipeline keeps it there, and computes no
    loss until `apply(vocab_over_pipeline=True)` puts the schedule back.
    """
    if model is None:
        _remove_all_but(set(), set())
        return
    for one in _language_models(model, find_seams()):
        _restore(one)
    if not _State.models and _State.options is None:
        quantized.restore()


@contextmanager
def patched(
    model: Any = None, options: PatchOptions | None = None, **keywords: object
) -> Iterator[Status]:
    """Applies the patch within a context. The end of the context, also by an exception, removes it;
    a patch that was there before stays."""
    was_applied, before = _State.options is not None, set(_State.models)
    over_before = over_pipeline.models()
    new_status = apply(model, options, **keywords)
    try:
        yield new_status
    finally:
        if model is not None:
            remove([x for x in _language_models(model, find_seams()) if x not in before])
        elif not was_applied:
            _remove_all_but(before, over_before)


def status() -> Status:
    heads = tuple(sorted(type(model).__name__ for model in _State.models))
    sharded = over_pipeline.names_of_models()
    version = file = None
    if _State.seams is not None and (heads or sharded or _State.options is not None):
        version, file = _State.seams.version, _State.seams.file
    return Status(_State.options, heads, version, file, sharded)


def _language_models(model: Any, seams: Seams) -> Iterator[Any]:
    modules: Iterable[Any] = model if isinstance(model, (list, tuple)) else [model]
    for module in modules:
        if not isinstance(module, nn.Module):
            raise PatchError(f"model must be a module or a list of modules, got {type(module)}")
        models = [x for x in module.modules() if isinstance(x, seams.language_module)]
        if not models:
            raise PatchError(
                f"model must be, or wrap, a Megatron LanguageModule, got {type(module).__name__}"
            )
        yield from models


def _head_of(model: Any) -> Any:
    return getattr(model, "output_layer", None) if model.post_process else None


def _apply_to(models: list[Any], options: PatchOptions, seams: Seams) -> None:
    todo = []
    for model in models:
        layer = _head_of(model)
        if layer is None:
            continue
        has = options_of(layer)
        if has == options:
            continue
        if has is not None:
            raise PatchError(
                f"this {type(model).__name__} is patched with {has}, now asked for {options}; "
                "call remove() between them"
            )
        reason = why_not(model, layer, seams, options)
        if reason is not None:
            raise PatchError(f"{type(model).__name__} cannot be patched: {reason}")
        todo.append((model, layer))
    for model, layer in todo:
        put(model, layer, options, seams)
        _State.models[model] = layer
    if todo and _State.seams is None:
        _State.seams = seams


def _shard_models(models: list[Any], options: PatchOptions, pipeline: PipelineSeams) -> None:
    for model in models:
        over_pipeline.shard_model(model, options, pipeline)
    over_pipeline.replace_schedule(pipeline)
    _State.seams = _State.seams or pipeline.language_model


def _remove_all_but(kept: set[Any], kept_over_pipeline: set[Any]) -> None:
    for one in set(_State.models) - kept:
        _restore(one)
    _State.replaced.restore()
    over_pipeline.restore()
    if kept_over_pipeline:
        over_pipeline.replace_schedule(find_pipeline_seams(), kept_over_pipeline)
    _State.options = None
    if not kept and not kept_over_pipeline:
        quantized.restore()
        _State.seams = None


def _restore(model: Any) -> None:
    layer = _State.models.pop(model, None)
    # A copy's.
    layer = _head_of(model) if layer is None else layer
    if layer is not None and options_of(layer) is not None:
        take_away(model, layer)
