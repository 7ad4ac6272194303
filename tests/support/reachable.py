"""Memory that a kept loss keeps alive."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# There is one of each, whoever keeps it.
_ENDS = (types.ModuleType, type, torch.nn.Module, dist.ProcessGroup, DeviceMesh, Tensor, str)


def _saved_by(node: Any) -> Iterator[Any]:
    """Returns the tensors that autograd has saved, and has not freed."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in (*names, "saved_tensors"):
        try:
            yield getattr(node, name, None)
        except RuntimeError:  # freed
            continue


def _next_to(thing: Any) -> Iterable[Any]:
    """Returns the objects that `thing` keeps alive, without things that exist once: modules,
    classes, groups."""
    if isinstance(thing, types.FunctionType):
        return (*(thing.__closure__ or ()), *(thing.__defaults__ or ()))
    if isinstance(thing, types.MethodType):
        return (thing.__self__, thing.__func__)
    if isinstance(thing, torch.autograd.graph.Node):
        attributes = vars(thing) if hasattr(thing, "__dict__") else {}
        return (
            *(node for node, _ in thing.next_functions),
            *attributes.values(),
            *_saved_by(thing),
        )
    return () if isinstance(thing, _ENDS) else gc.get_referents(thing)


def reachable_tensors(loss: Tensor) -> list[Tensor]:
    """Tensors that a loss keeps, but for those that it is differentiated by."""
    waiting: list[Any] = [loss.grad_fn]
    seen: dict[int, Any] = {}
    while waiting:
        thing = waiting.pop()
        leaf = type(thing).__name__ == "AccumulateGrad"
        if thing is None or leaf or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        waiting.extend(_next_to(thing))
    return [thing for thing in seen.values() if isinstance(thing, Tensor)]


def largest_storage(loss: Tensor) -> int:
    """Returns the bytes of the largest tensor among them, or 0."""
    return max((x.untyped_storage().nbytes() for x in reachable_tensors(loss)), default=0)
