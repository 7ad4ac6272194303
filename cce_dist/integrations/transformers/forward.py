"""A patched model's forward: its own, with a head that defers its logits while it trains."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cce_dist import LossOptions
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.log import logger
from cce_dist.integrations.transformers.head import Deferral
from cce_dist.integrations.transformers.logits import DeferredLogits

# Where a patched model keeps its patch.
ATTRIBUTE = "_cce_dist_patch"
LABELS = ("labels", "shift_labels")

# Copies of a patched model join when they are called.
patched_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class Patch:
    """A patched model's options and its own forward.

    Args:
        options: the loss's.
        function: the patched forward, of `forward_of` or `forward_over`.
        forward: what the model's own attribute had before; None: its class's.
        is_on: False after `remove`, where another wrapper, such as Accelerate's, holds `function`.
    """

    options: LossOptions
    function: Callable[..., Any]
    forward: Callable[..., Any] | None
    is_on: bool = True
    said: set[str] = field(default_factory=set)  # to the user, once

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None: a pickled model's forward is its class's, so that it is not patched."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        forward = copy.deepcopy(self.forward, memo)
        return replace(self, forward=forward, said=set(self.said))


def patch_of(model: nn.Module) -> Patch | None:
    patch = vars(model).get(ATTRIBUTE)
    return patch if patch is not None and patch.is_on else None


def count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Counts an optimizer's step as a write to the heads that it trains.

    Fused optimizers do not, and logits that are read afterwards would be the new weights'.
    """
    groups = optimizer.param_groups
    stepped = {id(x) for group in groups for x in group["params"] if x.grad is not None}
    models: list[Any] = [x for x in patched_models if patch_of(x) is not None]
    heads = [x.get_output_embeddings() for x in models]
    weights = [x for head in heads if head is not None for x in head.parameters()]
    written = {id(x): x for x in weights if id(x) in stepped}
    torch.autograd.graph.increment_version(list(written.values()))


@functools.cache
def forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """Returns the function that a patched model of this class has in place of its forward.

    It reads the model from its first argument: a deep copy of a patched model uses its own weights.
    """
    return _patched(cls, _without_wrappers)


@functools.cache
def forward_over(cls: type[nn.Module]) -> Callable[..., Any]:
    """Returns the same function for a model whose forward somebody has replaced or wrapped.

    `Accelerator.unwrap_model` takes the last `__wrapped__`, and calls it with the model: that is
    `forward_of`'s function, so the patch stays, and Accelerate's wrapper beneath it goes.
    """
    patched: Any = _patched(cls, lambda forward, model: forward)
    patched.__wrapped__ = forward_of(cls)
    return patched


def _without_wrappers(forward: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Returns the forward beneath the wrappers of a model's own, at most its class's."""
    function = getattr(forward, "__func__", forward)
    last: Any = inspect.unwrap(function, stop=lambda x: x is type(model).forward)
    return forward if last is function else functools.partial(last, model)


def _patched(cls: type[nn.Module], below: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the functions of `forward_of` and `forward_over`.

    Args: below: chooses what to run, of the forward that the model had before and the model.
    """
    signature = inspect.signature(cls.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        old, patch = vars(self).get(ATTRIBUTE), patch_of(self)
        if old is None or old.forward is None:
            run = functools.partial(cls.forward, self)
        else:
            run = below(old.forward, self)
        if patch is None:
            return run(*args, **kwargs)
        patched_models.add(self)
        if not self.training or not _has_labels(signature, self, args, kwargs):
            return run(*args, **kwargs)
        if kwargs.get("fused_lm_head"):
            # TRL's forward calls no head.
            _say_whose_loss(cls.__name__, patch.said)
            return run(*args, **kwargs)
        if torch.compiler.is_exporting():
            raise PatchError(
                f"{cls.__name__} must be in eval(), or without labels, for torch.export while it "
                "is patched; to export its loss call remove(model) before"
            )
        deferral = Deferral(self.get_output_embeddings(), cls.__name__, patch.options, patch.said)
        deferral.begin()
        try:
            result = run(*args, **kwargs)
            deferral.check(_loss_in(result))
        finally:
            deferral.end()
        return result

    patched: Any = functools.wraps(cls.forward)(_beside_compiler(forward))
    # Accelerate undoes its own wrapper of a forward by going on to the last `__wrapped__`.
    del patched.__wrapped__
    patched.__signature__ = signature
    return patched


def _beside_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps torch.compile out of a forward that has no logits, but not out of what it calls."""
    disable: Any = torch.compiler.disable
    left_out = disable(function, recursive=False)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.export can leave nothing out.
        run = function if torch.compiler.is_exporting() else left_out
        return run(self, *args, **kwargs)

    return forward


def _loss_in(result: Any) -> Any:
    """Returns the loss in a forward's result; None: there is none. With shifted labels alone many
    models leave the loss to their caller."""
    if isinstance(result, Mapping):
        return result.get("loss")
    first = result[0] if isinstance(result, tuple) else result
    return None if isinstance(first, DeferredLogits) else first


def _say_whose_loss(name: str, said: set[str]) -> None:
    """Says once that TRL computes its own loss, unless it is replaced as well."""
    trl = sys.modules.get("cce_dist.integrations.trl")
    if "trl" not in said and (trl is None or trl.status().options is None):
        said.add("trl")
        logger.warning(
            "%s: TRL's trainer computes its loss outside of the model, by its own function; "
            "cce_dist.integrations.trl.apply() replaces that",
            name,
        )


def _has_labels(
    signature: inspect.Signature, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> bool:
    if any(keywords.get(name) is not None for name in LABELS):
        return True
    if len(args) < 2:
        return False
    positional = signature.bind_partial(model, *args).arguments
    return any(positional.get(name) is not None for name in LABELS)
