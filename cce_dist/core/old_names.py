"""Old names of modules: an import gives the module of the new name, and warns with that name.

Python asks `_Finder` last, only for a module that no other finder has: other imports stay fast.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ADAPTERS = "cce_dist.adapters"
NEW_NAMES = {
    "cce_dist.adapters.courier": "cce_dist.pipeline.comm.courier",
    "cce_dist.adapters.frequent_rows": "cce_dist.pipeline.frequent_rows",
    "cce_dist.adapters.groups": "cce_dist.pipeline.comm.groups",
    "cce_dist.adapters.last_stage": "cce_dist.pipeline.schedules.last_stage",
    "cce_dist.adapters.microbatch": "cce_dist.pipeline.microbatch",
    "cce_dist.adapters.mpi": "cce_dist.ranks.mpi",
    "cce_dist.adapters.neighbours": "cce_dist.pipeline.comm.neighbours",
    "cce_dist.adapters.pipeline_checks": "cce_dist.pipeline.checks",
    "cce_dist.adapters.pipeline_embedding": "cce_dist.pipeline.embedding",
    "cce_dist.adapters.pipeline_grads": "cce_dist.pipeline.grads",
    "cce_dist.adapters.pipeline_head": "cce_dist.pipeline.head",
    "cce_dist.adapters.pipeline_phases": "cce_dist.pipeline.embedding",
    "cce_dist.adapters.pipeline_rehearsal": "cce_dist.pipeline.warm_up",
    "cce_dist.adapters.pipeline_server": "cce_dist.pipeline.schedules.server",
    "cce_dist.adapters.pipelining": "cce_dist.pipeline.schedules.torch_schedules",
    "cce_dist.adapters.planned": "cce_dist.pipeline.schedules.vocab_1f1b",
    "cce_dist.allocations": "cce_dist.core.allocations",
    "cce_dist.phases": "cce_dist.core.phases",
    "cce_dist.pipeline.phases": "cce_dist.pipeline.embedding",
    "cce_dist.train.batches": "cce_dist.train.data.batches",
    "cce_dist.train.blame": "cce_dist.train.watch.blame",
    "cce_dist.train.config_file": "cce_dist.train.config.load",
    "cce_dist.train.elastic": "cce_dist.train.config.fit_to_ranks",
    "cce_dist.train.fsdp": "cce_dist.train.model.fsdp",
    "cce_dist.train.head": "cce_dist.train.model.head",
    "cce_dist.train.heartbeat": "cce_dist.train.watch.heartbeat",
    "cce_dist.train.perplexity": "cce_dist.train.evaluate.perplexity",
    "cce_dist.train.pipeline_layout": "cce_dist.train.config.pipeline",
    "cce_dist.train.pipeline_model": "cce_dist.train.pipeline.stages",
    "cce_dist.train.pipeline_report": "cce_dist.train.report.run",
    "cce_dist.train.place": "cce_dist.train.watch.place",
    "cce_dist.train.scores": "cce_dist.train.evaluate.scores",
    "cce_dist.train.text": "cce_dist.train.data.text",
    "cce_dist.train.tokens": "cce_dist.train.data.tokens",
    "cce_dist.train.windows": "cce_dist.train.evaluate.windows",
}

# Functions and classes of these modules that have new names, too.
_CLASSES = {"EmbeddingPhases": "TiedEmbedding", "HeadPhases": "PipelineHead"}
NEW_FUNCTIONS = {
    "cce_dist.adapters.groups": {"own_groups": "make_groups", "own_couriers": "make_couriers"},
    "cce_dist.adapters.microbatch": {"plainly": "without_autograd"},
    "cce_dist.adapters.pipeline_phases": _CLASSES,
    "cce_dist.pipeline.phases": _CLASSES,
    "cce_dist.adapters.pipeline_rehearsal": {"rehearse_head": "warm_up_head"},
    "cce_dist.adapters.pipelining": {"told_of_forwards": "observe_passes"},
}


def install() -> None:
    """Makes the old names importable."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def attributes_of(old: str, new: str) -> Callable[[str], Any]:
    """Returns `__getattr__` for the package `old`: the module of this name is now `new`."""
    warned: list[str] = []

    def get(name: str) -> Any:
        # Submodules of the package are not attributes of the old module.
        if name.startswith("__") or importlib.util.find_spec(f"{old}.{name}") is not None:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        if not warned:
            warned.append(name)
            _warn(old, new, stacklevel=2)
        return value

    return get


def _warn(old: str, new: str, stacklevel: int) -> None:
    text = f"{old} is now {new}; the old name will go in a later release"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


class _Finder(MetaPathFinder, Loader):
    """Finds and loads modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # The folder of the adapters is gone; an empty package stands in for it.
        if fullname == ADAPTERS:
            return ModuleSpec(fullname, self, is_package=True)
        return ModuleSpec(fullname, self) if fullname in NEW_NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == ADAPTERS:
            return None
        new = NEW_NAMES[spec.name]
        _warn(spec.name, new, stacklevel=2)
        module = importlib.import_module(new)
        for old, name in NEW_FUNCTIONS.get(spec.name, {}).items():
            setattr(module, old, getattr(module, name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Python has replaced the module's spec by that of the old name.
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


_FINDER = _Finder()
