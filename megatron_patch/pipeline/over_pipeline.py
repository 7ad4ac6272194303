"""Switches the vocabulary over the pipeline on and off, in models and in Megatron's schedule."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from megatron_patch.errors import PatchError
from megatron_patch.options import PatchOptions
from megatron_patch.pipeline.refusals import why_not_over_pipeline
from megatron_patch.pipeline.rows import Rows, replace_output_layer
from megatron_patch.pipeline.schedule import forward_backward, model_loss
from megatron_patch.pipeline.tied import ShardedEmbedding
from megatron_patch.replacements import Replacements
from megatron_patch.seams import SCHEDULE, Arguments, PipelineSeams, parallel_state

# Megatron's schedule, and the initialiser of its class.
_REPLACED = Replacements()
_MODELS: weakref.WeakSet[Any] = weakref.WeakSet()


def models() -> set[Any]:
    """Returns the models whose vocabulary is over the pipeline."""
    return set(_MODELS)


def replace_schedule(seams: PipelineSeams, kept: Iterable[Any] = ()) -> None:
    """Replaces Megatron's schedule for models whose vocabulary is over the pipeline, `kept` and
    others."""
    _MODELS.update(kept)

    def schedule(original: Any, **arguments: Any) -> Any:
        models = arguments["model"]
        models = models if isinstance(models, list) else [models]
        rows = [x for model in models for x in model.modules() if isinstance(x, Rows)]
        if not rows:
            return original(**arguments)
        return forward_backward(seams, rows[0], Arguments(**arguments))

    _REPLACED.replace(seams.schedules, SCHEDULE, schedule)


def shard_new_models(options: PatchOptions, seams: PipelineSeams) -> None:
    """Replaces GPTModel's initialiser: it puts a new model's vocabulary over the pipeline."""

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        shard_model(self, options, seams)

    _REPLACED.replace(seams.gpt_model, "__init__", init)


def shard_model(model: Any, options: PatchOptions, seams: PipelineSeams) -> None:
    """Puts a model's vocabulary over the pipeline.

    Raises:
        PatchError: on all ranks of the pipeline, if the model of one rank does not allow it.
    Collectives: one all-gather of reasons over the pipeline, then the scatter of
        `replace_output_layer`.
    """
    rows = [x for x in model.modules() if isinstance(x, Rows)]
    if rows:
        if rows[0].options != options:
            raise PatchError(f"this {type(model).__name__} is patched with {rows[0].options}")
        _MODELS.add(model)
        return
    reason = why_not_over_pipeline(model, options, seams)
    trains = model.output_layer.weight.requires_grad if reason is None and model.post_process else 0
    group = parallel_state().get_pipeline_model_parallel_group()
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, (reason, bool(trains)), group=group)
    reasons = [x for x, _ in everyone if x is not None]
    if reasons:
        raise PatchError(
            f"{type(model).__name__} cannot have its vocabulary over the pipeline: {reasons[0]}"
        )
    rows = replace_output_layer(model, options, requires_grad=everyone[-1][1])
    if rows.is_tied:
        if model.pre_process:
            scatters = model.embedding.reduce_scatter_embeddings
            model.embedding.word_embeddings = ShardedEmbedding(rows, reduce_scatters=scatters)
        # Embedding and head are one parameter: Megatron has nothing to sum over stages.
        model.share_embeddings_and_output_weights = False
    if model.post_process:
        model.compute_language_model_loss = types.MethodType(model_loss, model)
    _MODELS.add(model)


def restore() -> None:
    """Puts back Megatron's class and its schedule. Models keep their rows."""
    _REPLACED.restore()
    _MODELS.clear()


def names_of_models() -> tuple[str, ...]:
    return tuple(sorted(type(model).__name__ for model in _MODELS))
