"""Choice, import and comparison of the contenders of a benchmark."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal


@dataclass(frozen=True)
class Contender:
    """A way to compute what a benchmark measures.

    Args:
        build: imports and configures it; a peer may raise anything here.
        on_cpu: can run on a CPU; says nothing of peers, whose failure is reported.
        note: what sets its rows apart.
    """

    origin: Literal["dense", "ours", "peer"]
    build: Callable[..., Any]
    on_cpu: bool = True
    note: str = ""


def choose_contenders(
    contenders: Mapping[str, Contender], names: Sequence[str], *, on_gpu: bool
) -> list[str]:
    """Returns the names to measure, in the registry's order; without names, all that can run.

    Raises:
        ValueError: a name is unknown, or needs a GPU.
    """
    able = [name for name, each in contenders.items() if on_gpu or each.on_cpu]
    if unknown := sorted(set(names) - set(able)):
        raise ValueError(f"method must be among {able} on this device, got {unknown}")
    return [name for name in able if not names or name in names]


def add_ratios(rows: Sequence[dict[str, Any]], contenders: Mapping[str, Contender]) -> None:
    """Adds `of_fastest_peer`, each time over that of the fastest peer in the same part."""
    peers = {name for name, each in contenders.items() if each.origin == "peer"}
    for row in rows:
        times = [
            each["median_ms"]
            for each in rows
            if each["part"] == row["part"] and not each["failed"] and each["method"] in peers
        ]
        if times and row["median_ms"] is not None:
            row["of_fastest_peer"] = row["median_ms"] / min(times)


def import_alone(name: str, stubs: Mapping[str, Mapping[str, object]] | None = None) -> ModuleType:
    """Imports a module of a peer; its packages' own imports, such as ray, need not be installed.

    If the usual import fails, empty packages take the place of the module's packages.

    Args:
        name: dotted, in a package.
        stubs: modules that take the place of those it imports, each with its attributes.
    Raises:
        ModuleNotFoundError: there is no such package, or the module itself imports another one.
    """
    try:
        return importlib.import_module(name)
    except Exception:
        top, *parents = name.split(".")[:-1]
        spec = importlib.util.find_spec(top)
        if spec is None or not spec.submodule_search_locations:
            raise
        root = Path(spec.submodule_search_locations[0])
    for module in [each for each in sys.modules if each.partition(".")[0] == top]:
        del sys.modules[module]
    for depth in range(len(parents) + 1):
        package = ModuleType(".".join((top, *parents[:depth])))
        package.__path__ = [str(root.joinpath(*parents[:depth]))]
        sys.modules[package.__name__] = package
    for each, attributes in (stubs or {}).items():
        stub = ModuleType(each)
        vars(stub).update(attributes)
        sys.modules[each] = stub
    return importlib.import_module(name)
