"""Packages that commands need beside torch, and how to install those that are missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

CORE = ""
# Modules that commands import, each with the extra of pyproject.toml that brings it.
EXTRAS = {
    "matplotlib": "train",
    "megatron": "megatron",
    "mpi4py": "mpi",
    "numpy": CORE,
    "pydantic": "train",
    "pydantic_core": "train",
    "rich": CORE,
    "safetensors": "transformers",
    "tensorboard": "tensorboard",
    "tokenizers": "train",
    "torch": CORE,
    "torchtitan": "torchtitan",
    "transformers": "transformers",
    "trl": "trl",
    "typer": CORE,
    "yaml": "train",
}


def need_modules(*names: str) -> None:
    """Checks that modules are installed, before work whose end imports them.

    Raises:
        ModuleNotFoundError: a module is missing; the error names the first.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def explain_missing(error: ModuleNotFoundError, arguments: list[str]) -> str | None:
    """Returns a line that tells the user what to install; None if no extra brings the module.

    Args:
        arguments: arguments of the command line, as in sys.argv[1:].
    """
    name = (error.name or "").partition(".")[0]
    if name not in EXTRAS or importlib.util.find_spec(name) is not None:
        return None
    extra = EXTRAS[name]
    if extra == "train" and arguments[:1] == ["bench"]:
        extra = "bench"
    named = " ".join(["cce-dist", *_subcommand(arguments)])
    return f"`{named}` needs {name}, which is not installed: pip install {requirement(extra)}"


def requirement(extra: str) -> str:
    """Returns pip's requirement for this package with an extra, quoted for a shell.

    It is the package's name if that is installed, else the checkout's folder.
    """
    try:
        importlib.metadata.distribution("cce-dist")
        place = "cce-dist"
    except importlib.metadata.PackageNotFoundError:
        place = str(Path(__file__).parents[2])
    return f"'{place}[{extra}]'" if extra else f"'{place}'"


def _subcommand(arguments: list[str]) -> list[str]:
    words = arguments[: 2 if arguments[:1] in (["bench"], ["plan"], ["vocab"]) else 1]
    return [word for word in words if not word.startswith("-")]
