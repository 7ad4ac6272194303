"""Functions of a framework that ours replace, at once or as soon as the framework imports them."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import Any

import torch

from megatron_patch.errors import PatchError
from megatron_patch.options import PatchOptions
from megatron_patch.replacements import Replacements
from megatron_patch.seams import arguments_of, describe, without_ours

logger = logging.getLogger("megatron_patch.frameworks")


@dataclass(frozen=True)
class Seam:
    """A function of a framework, and the function in its place.

    Args:
        module: dotted name.
        name: of the function in the module, also `Class.method`. For an autograd function's `apply`
            the arguments are those of its `forward`.
        arguments: the names that it must take, in order.
        instead: ours; it gets the framework's function before the arguments.
        also_in: modules that import the function by name.
    """

    module: str
    name: str
    arguments: str
    instead: Callable[..., Any]
    also_in: tuple[str, ...] = ()

    def place_in(self, module: Any) -> tuple[Any, str]:
        """Returns the module, or the class in it, that has the function, and its name there."""
        *classes, name = self.name.split(".")
        for each in classes:
            module = getattr(module, each, None)
        return module, name


class Adapter:
    """The replaced functions of one framework in this process.

    Args:
        name: the framework's, as its distribution's.
        releases: the ones whose functions we know, for messages.
    """

    def __init__(self, name: str, releases: str) -> None:
        self.name, self.releases = name, releases
        self.options: PatchOptions | None = None
        self.replaced = Replacements()
        self._hooks: list[_AfterImport] = []

    def apply(
        self,
        keywords: Mapping[str, object],
        seams_of: Callable[[PatchOptions], tuple[Seam, ...]],
    ) -> None:
        """Replaces the framework's functions; those of modules not yet imported, at their import.

        Raises:
            PatchError: a function of an imported module is missing, takes other arguments or is not
                the framework's; or an option has no log-probabilities; or other options apply.
        """
        options = PatchOptions.from_environment(**keywords)
        for name in ("logits", "check_ranks", "vocab_over_pipeline"):
            if getattr(options, name) != getattr(PatchOptions, name):
                raise PatchError(
                    f"{name}={getattr(options, name)!r} has no log-probabilities in {self.name}: "
                    "apply without it"
                )
        if self.options is not None and self.options != options:
            raise PatchError(
                f"{self.name} has ours with {self.options}, now asked for {options}; call remove() "
                "between them"
            )
        if self.options is not None:
            return
        of_modules: dict[str, list[Seam]] = {}
        for seam in seams_of(options):
            of_modules.setdefault(seam.module, []).append(seam)
        ready = [name for name in of_modules if name in sys.modules]
        for name in ready:
            self._check(of_modules[name])
        for name in ready:
            self._replace(of_modules[name])
        for name in of_modules.keys() - set(ready):
            hook = _AfterImport(name, lambda name: self._check_and_replace(of_modules[name]))
            sys.meta_path.insert(0, hook)
            self._hooks.append(hook)
        self.options = options

    def remove(self) -> None:
        """Puts the framework's functions back."""
        sys.meta_path[:] = [x for x in sys.meta_path if x not in self._hooks]
        self._hooks.clear()
        self.replaced.restore()
        self.options = None

    def version(self) -> str:
        """Returns the framework's release, for messages."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return "of an unknown release"

    def _check_and_replace(self, seams: list[Seam]) -> None:
        self._check(seams)
        self._replace(seams)

    def _check(self, seams: list[Seam]) -> None:
        for seam in seams:
            module, described = sys.modules[seam.module], f"{seam.module}.{seam.name}"
            function = without_ours(getattr(*seam.place_in(module), None))
            owner = getattr(function, "__self__", None)
            if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
                function = owner.forward
            has = arguments_of(function)
            if has != seam.arguments.split():
                raise PatchError(
                    f"{described} must take ({', '.join(seam.arguments.split())}), got "
                    f"({', '.join(has)}) in {self.name} {self.version()} ({module.__file__}): "
                    f"megatron_patch knows {self.name} {self.releases}; run without "
                    f"megatron_patch.frameworks, or with one of these"
                )
            if function.__module__ != seam.module:
                raise PatchError(
                    f"{described} must be {self.name}'s, got {describe(function)}, which ours "
                    "would leave out: undo that replacement, or run without ours"
                )

    def _replace(self, seams: list[Seam]) -> None:
        for seam in seams:
            original = getattr(*seam.place_in(sys.modules[seam.module]))
            for module in (seam.module, *seam.also_in):
                owner, name = seam.place_in(sys.modules.get(module))
                # A module imported later has imported ours.
                if getattr(owner, name, None) is original:
                    self.replaced.replace(owner, name, seam.instead)
            logger.info(
                "%s %s: ours in place of %s.%s", self.name, self.version(), seam.module, seam.name
            )


class _AfterImport(MetaPathFinder):
    """Calls a function after each import of one module.

    A process that never imports the module, as a sampler's, doesn't import Megatron for us.
    """

    def __init__(self, module: str, then: Callable[[str], None]) -> None:
        self.module, self.then = module, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.module:
            return None
        others = [x for x in sys.meta_path if x is not self]
        specs = (x.find_spec(fullname, path, target) for x in others)
        spec: Any = next((x for x in specs if x is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.then(self.module)

        spec.loader.exec_module = exec_module
        return spec
