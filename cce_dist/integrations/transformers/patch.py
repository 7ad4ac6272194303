"""Switches the loss on and off, for given models or for every model that is made from now on."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from cce_dist import LossOptions
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.log import logger
from cce_dist.integrations.options import OPTIONS, differences
from cce_dist.integrations.transformers.forward import (
    ATTRIBUTE,
    Patch,
    count_step,
    forward_of,
    forward_over,
    patch_of,
    patched_models,
)
from cce_dist.integrations.transformers.head import require_linear


@dataclass(frozen=True)
class Status:
    """The patched models of this process.

    Args:
        options: apply to models that are made from now on; None: such models stay as they are.
        models: class names of the patched models.
        refused: models that `apply` left as they are: class name and reason.
    """

    options: LossOptions | None
    models: tuple[str, ...]
    refused: tuple[str, ...] = ()


class _State:
    options: LossOptions | None = None
    post_init: Any = None
    refused: ClassVar[set[str]] = set()
    steps: Any = None  # the handle of count_step


def patch(model: Any, **options: object) -> Any:
    """Replaces the loss of a model of transformers, and returns the model.

    With labels and in train() the forward computes its loss by `linear_cross_entropy`; `logits` of
    its output is an object that computes them when somebody reads them. Without labels, or in
    eval(), the model is as before.

    Args:
        model: a PreTrainedModel, or a module that holds one, such as a PeftModel.
        options: gradient, filter, logits, screen, backend, workspace_bytes and keep_logits of
            `linear_cross_entropy`.
    Raises:
        PatchError: the model has no linear head, or is patched with other options; or the module
            holds none, or several.
        ValueError: an option is unknown or not allowed.
    """
    wanted = _options_of(options)
    inner = model_in(model)
    old = patch_of(inner)
    if old is not None and old.options != wanted:
        first, second = differences(old.options, wanted)
        raise PatchError(
            f"{type(inner).__name__} is patched with {first}, now asked for {second}; call "
            "remove(model) between them"
        )
    if old is None or not _is_held(inner, old):
        _patch(inner, wanted)
    return model


def apply(**options: object) -> Status:
    """Patches every model with a linear head that is made from now on. Options: see `patch`.

    Raises:
        PatchError: another call has applied other options.
        ValueError: an option is unknown or not allowed.
    """
    from transformers import PreTrainedModel

    wanted = _options_of(options)
    if _State.options is not None:
        if _State.options != wanted:
            first, second = differences(_State.options, wanted)
            raise PatchError(
                f"apply() has been called with {first}, now with {second}; call remove() between "
                "them"
            )
        return status()
    original = _State.post_init = PreTrainedModel.post_init
    _State.options = wanted

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        if self.get_output_embeddings() is None or patch_of(self) is not None:
            return
        try:
            _patch(self, wanted)
        except PatchError as error:
            _State.refused.add(str(error))
            logger.warning("%s", error)

    PreTrainedModel.post_init = post_init
    return status()


def remove(model: Any = None) -> None:
    """Undoes `patch` for a model; without one: for all models, and for models made later."""
    if model is None:
        _remove_all_but(set())
    else:
        _restore(model_in(model))


@contextlib.contextmanager
def patched(model: Any = None, **options: object) -> Iterator[Status]:
    """Patches a model, or all that are made, within a context. The end of the context, also by an
    exception, undoes that; a patch that was there before stays."""
    was_applied, before = _State.options is not None, _models()
    if model is None:
        apply(**options)
    else:
        patch(model, **options)
    try:
        yield status()
    finally:
        if model is not None:
            if model_in(model) not in before:
                remove(model)
        elif not was_applied:
            _remove_all_but(before)


def status() -> Status:
    """Returns the options, the patched models, and the models that `apply` refused."""
    names = sorted(type(model).__name__ for model in _models())
    return Status(_State.options, tuple(names), tuple(sorted(_State.refused)))


def _models() -> set[Any]:
    """Returns the models whose forward is the patch's."""
    by_model = ((model, patch_of(model)) for model in patched_models)
    return {model for model, old in by_model if old is not None and _is_held(model, old)}


def _remove_all_but(kept: set[Any]) -> None:
    for each in set(patched_models) - kept:
        _restore(each)
    if _State.post_init is not None:
        from transformers import PreTrainedModel

        PreTrainedModel.post_init = _State.post_init
    _State.post_init = _State.options = None
    _State.refused.clear()
    _stop_counting()


def _options_of(options: dict[str, object]) -> LossOptions:
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"options must be of {', '.join(OPTIONS)}, got {', '.join(unknown)}: the model "
            "itself decides everything else"
        )
    return LossOptions(**options)  # pyright: ignore[reportArgumentType]


def model_in(module: Any) -> Any:
    """Returns the outermost PreTrainedModel of a module: the only one with a head, or the first."""
    from transformers import PreTrainedModel

    models: list[Any] = []
    if isinstance(module, nn.Module):
        inner: set[nn.Module] = set()
        for each in module.modules():
            if isinstance(each, PreTrainedModel) and each not in inner:
                models.append(each)
                inner |= set(each.modules())
    # A vision tower, say, has no head.
    models = [x for x in models if x.get_output_embeddings() is not None] or models[:1]
    if len(models) == 1:
        return models[0]
    names = ", ".join(type(x).__name__ for x in models)
    what = type(module).__name__ + (f" with {names}: pass one of these" if models else "")
    raise PatchError(f"model must be, or hold, one PreTrainedModel of transformers, got {what}")


def _patch(model: Any, options: LossOptions) -> None:
    require_linear(type(model).__name__, model.get_output_embeddings())
    old, forward = vars(model).get(ATTRIBUTE), vars(model).get("forward")
    if old is not None and _is_held(model, old):
        old.options, old.is_on = options, True
    else:
        function = (forward_of if forward is None else forward_over)(type(model))
        setattr(model, ATTRIBUTE, Patch(options, function, forward))
        model.forward = types.MethodType(function, model)
        model._replicate_for_data_parallel = types.MethodType(_replicate_for_data_parallel, model)
    patched_models.add(model)
    if _State.steps is None:
        _State.steps = register_optimizer_step_post_hook(count_step)


def _replicate_for_data_parallel(self: Any) -> Any:
    """Replicates a patched model for nn.DataParallel, whose copy of attributes would leave the
    replica the first model's forward."""
    replica, forward = type(self)._replicate_for_data_parallel(self), self.forward
    if getattr(forward, "__self__", None) is self:
        replica.forward = types.MethodType(forward.__func__, replica)
    return replica


def _is_held(model: Any, old: Patch) -> bool:
    """Tells whether the model's forward still calls the patch's: Accelerate unwraps forwards."""
    reached: set[int] = set()
    functions: list[Any] = [model.forward]
    while functions:
        function = functions.pop()
        if function is old.function:
            return True
        if id(function) not in reached:
            reached.add(id(function))
            functions += _called_by(function)
    # A wrapper that names nothing, or the class's own.
    last = inspect.unwrap(getattr(model.forward, "__func__", model.forward))
    return getattr(last, "__func__", last) is not inspect.unwrap(type(model).forward)


def _called_by(function: Any) -> list[Any]:
    """Returns what a function may call: what it wraps, is bound to as a method, or closes over. The
    wrapper of TRL's trainers names the class's forward, and calls the model's."""
    names = ("__wrapped__", "__func__", "func")
    held = [getattr(function, name, None) for name in names]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            held.append(cell.cell_contents)
    return [x for x in held if callable(x) and not isinstance(x, (nn.Module, type))]


def _restore(model: Any) -> None:
    old = patch_of(model)
    if old is None:
        return
    old.is_on = False
    if getattr(model.forward, "__func__", None) is old.function:
        if old.forward is None:
            del model.forward
        else:
            model.forward = old.forward
        del model._replicate_for_data_parallel
        delattr(model, ATTRIBUTE)
    patched_models.discard(model)
    _stop_counting()


def _stop_counting() -> None:
    """Removes the hook of optimizers once no model is patched."""
    if _State.steps is not None and not any(patch_of(x) for x in patched_models):
        _State.steps.remove()
        _State.steps = None
