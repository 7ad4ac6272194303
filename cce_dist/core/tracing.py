"""Checks of who observes a call's operators: tracers, fake tensors, selective checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake as is_fake_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint


def is_fake(value: object) -> bool:
    """Tells whether `value` is a tensor with a shape, a dtype and a device, and no values."""
    # The common classes come first: is_fake_tensor looks at all bases of a class.
    return type(value) not in (Tensor, nn.Parameter) and is_fake_tensor(value)


def is_traced() -> bool:
    """Tells whether torch.compile, torch.export or make_fx records this call as a graph of
    operators."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


# The modes of `create_selective_checkpoint_contexts`: for the forward, and for its recomputation.
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def unseen_by_checkpointing() -> AbstractContextManager[None]:
    """Hides the operators within the context from selective activation checkpointing.

    A policy that keeps products would keep every tile of the logits, which later operators write
    into; a policy that counts products would count the loss's. Other modes still see the operators.
    """
    return _without_selective() if dispatch._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def _without_selective() -> Iterator[None]:
    stack = dispatch._get_current_dispatch_mode_stack()
    first = next((i for i, mode in enumerate(stack) if isinstance(mode, _SELECTIVE)), len(stack))
    # Only the end of the stack can change: all modes from the first selective mode on are popped,
    # and the others are pushed again.
    above = stack[first:]
    others = [mode for mode in above if not isinstance(mode, _SELECTIVE)]
    _exchange(above, others)
    try:
        yield
    finally:
        _exchange(others, above)


def _exchange(old: list[dispatch.TorchDispatchMode], new: list[dispatch.TorchDispatchMode]) -> None:
    for _ in old:
        dispatch._pop_mode()
    for mode in new:
        dispatch._push_mode(mode)
