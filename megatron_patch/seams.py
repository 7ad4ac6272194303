"""What of Megatron the patch relies on: three functions, whose signatures are looked at.

Not the version: a checkout's name says little, and these have not changed from 0.14 on.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from megatron_patch.errors import PatchError

LAYERS = "megatron.core.tensor_parallel.layers"
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"
# Module, class, function, its arguments.
EXPECTED = (
    (LAYERS, "ColumnParallelLinear", "forward", "self input_ weight runtime_gather_output"),
    (LANGUAGE_MODULE, "LanguageModule", "compute_language_model_loss", "self labels logits"),
    (LANGUAGE_MODULE, "LanguageModule", "setup_embeddings_and_output_layer", "self"),
)


@dataclass(frozen=True)
class Seams:
    """Megatron as it is installed."""

    head: Any  # ColumnParallelLinear
    language_module: Any
    version: str
    file: str


def find_seams() -> Seams:
    """Raises:
    PatchError: there is no megatron.core, or a function is not there or takes other arguments.
    """
    try:
        core = importlib.import_module("megatron.core")
        modules = {name: importlib.import_module(name) for name in (LAYERS, LANGUAGE_MODULE)}
    except ImportError as error:
        raise PatchError(
            f"megatron.core cannot be imported ({error}); install megatron-core 0.14 or newer, or "
            "put Megatron-LM on PYTHONPATH"
        ) from error
    version, file = getattr(core, "__version__", "unknown"), str(core.__file__)
    classes: dict[str, Any] = {}
    for module, owner, name, wanted in EXPECTED:
        function = getattr(getattr(modules[module], owner, None), name, None)
        # What an earlier apply() has put there stands for what it replaced.
        function = getattr(function, "__wrapped__", function)
        found = "nothing" if function is None else " ".join(inspect.signature(function).parameters)
        if found != wanted:
            raise PatchError(
                f"{module}.{owner}.{name} must take ({wanted.replace(' ', ', ')}), found "
                f"({found.replace(' ', ', ')}) in megatron.core {version} ({file}): the patch does "
                "not know this release; run without megatron_patch"
            )
        classes[owner] = getattr(modules[module], owner)
    return Seams(classes["ColumnParallelLinear"], classes["LanguageModule"], version, file)
