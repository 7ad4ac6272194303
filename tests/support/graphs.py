"""A compiler of graphs that checks our operators' results: they are as tracing took them to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Bytes. Compiled loops read so many at once of an operator's result.
ALIGNED = 16


class _Checking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace != "cce_dist":
            return out
        with FakeTensorMode() as mode:
            fake = func(*pytree.tree_map_only(Tensor, mode.from_tensor, args))
        results, expected = pytree.tree_leaves(out), pytree.tree_leaves(fake)
        assert [_facts(x) for x in results] == [_facts(x) for x in expected], func
        offsets = [x.storage_offset() * x.itemsize for x in results if isinstance(x, Tensor)]
        assert all(offset % ALIGNED == 0 for offset in offsets), (func, offsets)
        return out


def _facts(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x


def _checked(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with _Checking():
            return graph(*arguments)

    return make_boxed_func(run)


# For `torch.compile(backend=)`: "aot_eager" with the check.
AOT_CHECKED: Any = aot_autograd(
    fw_compiler=_checked, partition_fn=min_cut_rematerialization_partition
)
