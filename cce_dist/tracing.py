"""Who looks at a call's operators: tracers, fake tensors, selective activation checkpointing."""

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
    """Whether it is a tensor of a shape, a dtype and a device, and no values."""
    # What most are costs no look at their classes' bases.
    return type(value) not in (Tensor, nn.Parameter) and is_fake_tensor(value)


def is_traced() -> bool:
    """Whether the call becomes a graph, which has only what operators show: torch.compile,
    torch.export, make_fx."""
    return torch.compiler.is_compiling() or get_proxy_mode() is not None


# The two modes of `create_selective_checkpoint_contexts`: of the forward, and when it runs again.
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def unseen_by_checkpointing() -> AbstractContextManager[None]:
    """Until it ends, selective activation checkpointing keeps no operator's result.

    A policy that keeps products would keep every tile of the logits, which is written into; and one
    that counts them would count the loss's. All other modes see what they saw.
    """
    return _without_selective() if dispatch._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def _without_selective() -> Iterator[None]:
    stack = dispatch._get_current_dispatch_mode_stack()
    first = next((i for i, mode in enumerate(stack) if isinstance(mode, _SELECTIVE)), len(stack))
    # A mode is pushed and popped at the end: those above come off, too, and some go on again.
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
