"""The names of all Triton kernels, and of those that a test launches."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

KERNELS = Path(__file__).parents[2] / "cce_dist/backends/triton/kernels"


def kernels_in(folder: Path = KERNELS) -> set[str]:
    """Returns the names of the functions `*_kernel` in the folder's modules."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }


@contextmanager
def launched_kernels() -> Iterator[set[str]]:
    """Yields a set to which each kernel that this process launches adds its name, until it ends."""
    names: set[str] = set()
    if not importlib.util.find_spec("triton"):
        yield names
        return
    from triton.runtime.jit import KernelInterface

    launch = KernelInterface.__getitem__

    def noted_launch(kernel: Any, grid: Any) -> Any:
        names.add(kernel.fn.__name__)
        return launch(kernel, grid)

    with mock.patch.object(KernelInterface, "__getitem__", noted_launch):
        yield names
