"""A patched model's forward: its own, with a head that defers its logits while it trains."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from cce_dist import LossOptions
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.transformers.expression import (
    DONE,
    IN_HEAD,
    IN_MODEL,
    Expression,
    HeadCall,
    Product,
)
from cce_dist.integrations.transformers.logits import DeferredLogits, not_compiled

logger = logging.getLogger("cce_dist.integrations")

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
            # TRL's forward calls no head: cce_dist.integrations.trl has the place of its loss.
            return run(*args, **kwargs)
        deferral = _Deferral(self.get_output_embeddings(), cls.__name__, patch)
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


def _has_labels(
    signature: inspect.Signature, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> bool:
    if any(keywords.get(name) is not None for name in LABELS):
        return True
    if len(args) < 2:
        return False
    positional = signature.bind_partial(model, *args).arguments
    return any(positional.get(name) is not None for name in LABELS)


def require_linear(name: str, head: Any) -> None:
    """Checks what can be seen of a head before it is called.

    Raises:
        PatchError: it is none, or its weight is quantised.
    """
    if not isinstance(head, nn.Module):
        raise PatchError(
            f"{name} cannot be patched: it has no output embeddings, which the loss would replace"
        )
    for module in head.modules():
        weight = getattr(module, "weight", None)
        quantised = isinstance(weight, Tensor) and not weight.dtype.is_floating_point
        if quantised or type(module).__module__.split(".")[0] in ("bitsandbytes", "torchao"):
            raise PatchError(
                f"{name} cannot be patched: its head is a {type(module).__name__}, whose weight is "
                "quantised; leave the head out of the quantisation (llm_int8_skip_modules)"
            )
        if hasattr(weight, "ds_id"):
            raise PatchError(
                f"{name} cannot be patched: DeepSpeed's ZeRO-3 computes the head by a function of "
                "its own and frees its weight at once; use ZeRO-1 or ZeRO-2, or FSDP2"
            )


class _Deferral:
    """From `begin` to `end` the head returns deferred logits."""

    def __init__(self, head: Any, name: str, patch: Patch) -> None:
        self.head, self.patch = head, patch
        self.call = HeadCall(name, patch.options, patch.said)

    @not_compiled
    def begin(self) -> None:
        head, name = self.head, self.call.model
        require_linear(name, head)
        for module in head.modules():
            if isinstance(module, FullyShardedDataParallel):
                raise PatchError(
                    f"{name} cannot be patched: its head is an FSDP1 unit of its own, which frees "
                    "the weight before the loss reads it; leave the head to the root unit, or use "
                    "FSDP2"
                )
            if isinstance(module, FSDPModule):
                # The weight is gathered once: the loss reads it after the head's forward, and the
                # backward begins with it.
                module.set_reshard_after_forward(False, recurse=False)
        self.attribute, self.inner = vars(head).get("forward"), head.forward
        head.forward = self.forward

    @not_compiled
    def end(self) -> None:
        self.call.stage = DONE
        if self.attribute is None:
            del self.head.forward
        else:
            self.head.forward = self.attribute

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        head, call = self.head, self.call
        call.stage, call.dtype = IN_HEAD, _autocast_dtype(args)
        result: Any = _sharded_over_ranks(head, call, args)
        if result is None:
            with _Products(call, _num_classes(head)):
                result = self.inner(*args, **kwargs)
        if not isinstance(result, DeferredLogits):
            raise PatchError(
                f"{call.model} cannot be patched: its head, a {type(head).__name__}, is no linear "
                "map by F.linear; switch the patch off with remove(model)"
            )
        call.stage = IN_MODEL
        return result

    @not_compiled
    def check(self) -> None:
        """Checks that the forward has computed its loss here, and says so at the first time."""
        call = self.call
        if not call.num_losses:
            raise PatchError(
                f"{call.model} cannot be patched: with labels its forward computed a loss without "
                "F.cross_entropy of its head's output (another patch, such as Liger's, may have "
                "replaced it); switch this patch off with remove(model)"
            )
        if "loss" not in call.said:
            call.said.add("loss")
            logger.info(
                "%s: cce_dist.linear_cross_entropy computes the loss in place of F.cross_entropy, "
                "without logits (gradient=%s, logits=%s, backend=%s). Switch it off with "
                "cce_dist.integrations.transformers.remove(model)",
                *(call.model, call.options.gradient, call.options.logits, call.options.backend),
            )


def _autocast_dtype(args: tuple[Any, ...]) -> torch.dtype | None:
    device = args[0].device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _num_classes(head: nn.Module) -> int:
    # Not its parameters: FSDP1 may keep one flat parameter elsewhere.
    weights = [getattr(module, "weight", None) for module in head.modules()]
    return max(x.shape[0] for x in weights if isinstance(x, Tensor) and x.dim() == 2)


def _sharded_over_ranks(head: Any, call: HeadCall, args: tuple[Any, ...]) -> DeferredLogits | None:
    """Returns the logits of a head whose rows tensor parallelism has split; None: it is whole."""
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(weight, DTensor):
        return None
    (hidden,) = args
    mesh = weight.device_mesh
    if tuple(weight.placements) != (Shard(0),):
        raise PatchError(
            f"{call.model} cannot be patched: its head's weight is placed {weight.placements} on "
            f"{mesh}, and the loss needs Shard(0) on a mesh of one dim"
        )
    if isinstance(hidden, DTensor):
        hidden = hidden.redistribute(placements=[Replicate()]).to_local()
    call.group = mesh
    biases = () if bias is None else ((bias, 1.0),)
    dtype = call.dtype or hidden.dtype
    return DeferredLogits(call, Expression((Product.of(hidden, weight),), biases), dtype)


class _Products(TorchFunctionMode):
    """F.linear with as many rows as there are classes returns deferred logits."""

    def __init__(self, call: HeadCall, num_classes: int) -> None:
        self.call, self.num_classes = call, num_classes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if weight.dim() != 2 or weight.shape[0] != self.num_classes:
            return F.linear(input, weight, bias)
        biases = () if bias is None else ((bias, 1.0),)
        dtype = self.call.dtype or input.dtype
        return DeferredLogits(self.call, Expression((Product.of(input, weight),), biases), dtype)
