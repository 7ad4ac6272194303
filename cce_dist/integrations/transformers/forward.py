"""A patched model's forward: its own, with a head that defers its logits while it trains."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cce_dist import LossOptions
from cce_dist.integrations.log import logger
from cce_dist.integrations.transformers.head import Deferral

# Where a patched model keeps its patch.
ATTRIBUTE = "_cce_dist_patch"
LABELS = ("labels", "shift_labels")

# Copies of a patched model join when they are called.
patched_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass
class Patch:
    """The options, and the forward that the model's own attribute had; None: its class's."""

    options: LossOptions
    forward: Callable[..., Any] | None
    said: set[str] = field(default_factory=set)  # to the user, once


def patch_of(model: nn.Module) -> Patch | None:
    return vars(model).get(ATTRIBUTE)


@functools.cache
def forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """Returns the function that a patched model of this class has in place of its forward.

    It reads the model from its first argument: a deep copy of a patched model uses its own weights.
    """
    signature = inspect.signature(cls.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = patch_of(self)
        assert patch is not None
        run = patch.forward or functools.partial(cls.forward, self)
        patched_models.add(self)
        if not self.training or not _has_labels(signature, self, args, kwargs):
            return run(*args, **kwargs)
        if kwargs.get("fused_lm_head"):
            # TRL's forward calls no head.
            _say_whose_loss(cls.__name__, patch.said)
            return run(*args, **kwargs)
        deferral = Deferral(self.get_output_embeddings(), cls.__name__, patch.options, patch.said)
        deferral.begin()
        try:
            result = run(*args, **kwargs)
        finally:
            deferral.end()
        deferral.check()
        return result

    # The compiler takes the decoder and leaves out what has no logits.
    disable: Any = torch.compiler.disable
    return functools.wraps(cls.forward)(disable(forward, recursive=False))


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
