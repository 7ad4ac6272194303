"""From a command line's arguments to inputs, and what every report of one says."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import is_zipfile

import typer

from .arguments import Names

if TYPE_CHECKING:
    from .inputs import BenchInputs
    from .shapes import Shape


@contextmanager
def refusals() -> Iterator[None]:
    """A ValueError about an argument becomes the command line's own kind of error."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def shapes_of(kind: str, texts: Names, tokens: int | None, vocab: int, dim: int) -> list[Shape]:
    from .inputs import KINDS
    from .shapes import Shape, parse_shape

    if kind not in KINDS:
        # A file has its own vocabulary and hidden size; without a number, all of its tokens.
        return [Shape(tokens or sys.maxsize, 0, 0)]
    if texts:
        return [parse_shape(text, tokens) for text in texts]
    return [Shape(tokens or 2048, vocab, dim)]


def cases_of(
    inputs: Names,
    shape: Names,
    tokens: int | None,
    vocab: int,
    dim: int,
    dtype: str,
    device: str,
    ignored_fraction: float = 0.0,
    softcap: float | None = None,
) -> list[Callable[[], BenchInputs]]:
    return [
        case_of(kind, found, dtype, device, ignored_fraction, softcap)
        for kind in inputs or ["zipf"]
        for found in shapes_of(kind, shape, tokens, vocab, dim)
    ]


def case_of(
    kind: str,
    shape: Shape,
    dtype: str,
    device: str,
    ignored_fraction: float = 0.0,
    softcap: float | None = None,
) -> Callable[[], BenchInputs]:
    """What makes the inputs; the arguments are checked now."""
    import torch

    from .inputs import KINDS, check_softcap, make_inputs

    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise ValueError(f"dtype must name a torch dtype, got {dtype!r}")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must name a torch device, got {device!r}: {error}") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu where torch finds no GPU, got {device!r}")
    if kind not in KINDS and not Path(kind).is_file():
        raise ValueError(f"inputs must be one of {sorted(KINDS)} or a file, got {kind!r}")
    if not (shape.vocab_size if kind in KINDS else is_zipfile(kind)):
        raise ValueError(f"inputs must be a file of `cce-dist bench capture`, got {kind!r}")
    check_softcap(softcap)

    def make() -> BenchInputs:
        inputs = make_inputs(kind, shape, dtype=wanted, device=where).ignoring(ignored_fraction)
        return replace(inputs, softcap=softcap)

    return make


def machine_of(
    device: str, threads: int, ranks: int = 1, peers: Iterable[str] = ()
) -> dict[str, str]:
    """
    Args: peers: methods that may be other packages', whose versions are given then.
    """
    import torch

    from .machine import describe_machine, describe_peers

    if threads:
        torch.set_num_threads(threads)
    launcher = ["cce-dist"]
    if ranks > 1:
        launcher = ["torchrun", "--nproc-per-node", str(ranks), "-m", "cce_dist"]
    # What decides how many tokens fit.
    allocator = os.environ.get("PYTORCH_ALLOC_CONF")
    given = [] if allocator is None else [f"PYTORCH_ALLOC_CONF={allocator}"]
    command = shlex.join([*given, *launcher, *sys.argv[1:]])
    machine = describe_machine(torch.device(device))
    return {**machine, **describe_peers(peers), "command": command}


def reasons_of(failed: Names) -> dict[str, str]:
    return dict(text.split("=", 1) for text in failed or ())
