"""Arguments that several benchmark commands take, and the inputs that these arguments name."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from zipfile import is_zipfile

import typer

from cce_dist.options import LossOptions, require_finite
from cce_dist.train.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from .inputs import BenchInputs, Shape


def _add_to_path(folders: list[Path] | None) -> list[Path] | None:
    sys.path[:0] = [str(folder.resolve()) for folder in folders or ()]
    return folders


Size = Annotated[int, typer.Option(min=1)]
Names = list[str] | None
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Write the rows here as well.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="The same, numbers unrounded.")]
RecordPath = Annotated[
    Path | None,
    typer.Option(
        "--record", help="A .json of docs/notebook/data/evidence/: write the rows here as evidence."
    ),
]
Inputs = Annotated[
    Names,
    typer.Option(
        help="gaussian, flat, zipf, zipf-shuffled, zipf-dealt-RANKS, or a file of `bench capture`; "
        "may be repeated. [zipf]"
    ),
]
Shapes = Annotated[
    Names,
    typer.Option(
        "--shape",
        help="A model's head, such as gemma2-2b, or TOKENSxVOCABxDIM; may be repeated. In place "
        "of --vocab and --dim.",
    ),
]
Tokens = Annotated[int | None, typer.Option(min=1, help="[2048; 8192 for a model's head]")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help='"cpu", "cuda", ...')]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice.")]
Ignored = Annotated[
    float, typer.Option(min=0, max=0.99, help="Share of the targets that are ignored.")
]
Softcap = Annotated[
    float | None,
    typer.Option(help="Of the logits, such as Gemma 2's 30; a peer that takes none fails."),
]
EntropyBonus = Annotated[
    float,
    typer.Option(help="The loss subtracts so much of the mean entropy; most peers fail then."),
]
BackendName = Annotated[str, typer.Option(help="Of our methods: auto, triton or torch.")]
Methods = Annotated[Names, typer.Option(help="Only these methods; may be repeated.")]
Peers = Annotated[
    str | None,
    typer.Option(
        help="all, none, or names with commas. By default none with --method; else all on a GPU, "
        "and on a CPU those that need no compiler."
    ),
]
# Parsing adds the folders to Python's path: a command need not.
PeerPath = Annotated[
    list[Path] | None,
    typer.Option(
        callback=_add_to_path,
        help="A folder that Python may import peers from; may be repeated.",
    ),
]
Extra = Annotated[
    Names,
    typer.Option(
        help="A further peer, NAME=MODULE:FUNCTION, called with (hidden, weight, targets)."
    ),
]
Failed = Annotated[Names, typer.Option(hidden=True, help="NAME=REASON of a peer not to be run.")]
Repeats = Annotated[int, typer.Option(min=3, help="Launches of each method.")]
Budget = Annotated[
    float,
    typer.Option(
        min=0, help="Most seconds of timing a method, but at least 3 launches; 0: no limit."
    ),
]
Timeout = Annotated[
    float, typer.Option(min=0, help="Seconds for a peer to import, compile and run; 0: no limit.")
]
CollectiveTimeout = Annotated[float, typer.Option(min=1, help="Limit of a collective.")]
WorstRatio = Annotated[
    float,
    typer.Option(help="Most that our gradients' errors over dense torch's may be."),
]


@contextmanager
def refusals() -> Iterator[None]:
    """Turns an error about an argument, or a config, into the command line's own kind of error."""
    try:
        yield
    except (ValueError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None


def shapes_of(
    texts: Names, tokens: int | None, vocab: int, dim: int, *, of_file: bool = False
) -> list[Shape]:
    from .inputs import Shape, parse_shape

    if of_file:
        # A file has its own vocabulary and hidden size; without `tokens`, all its tokens are used.
        return [Shape(tokens or sys.maxsize, 0, 0)]
    if texts:
        return [parse_shape(text, tokens) for text in texts]
    return [Shape(tokens or 2048, vocab, dim)]


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of this name.

    Raises:
        ValueError: torch has no such dtype.
    """
    import torch

    wanted = getattr(torch, name, None)
    if not isinstance(wanted, torch.dtype):
        raise ValueError(f"dtype must name a torch dtype, got {name!r}")
    return wanted


def device_of(name: str) -> torch.device:
    """Returns the device of this name.

    Raises:
        ValueError: torch has no such device, or it is a GPU and there is none.
    """
    import torch

    try:
        where = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must name a torch device, got {name!r}: {error}") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu where torch finds no GPU, got {name!r}")
    return where


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
    entropy_bonus: float = 0.0,
) -> list[Callable[[], BenchInputs]]:
    """Returns functions that make the inputs, each for a kind and a shape.

    Raises:
        ValueError: an argument is wrong; this is checked now.
    """
    from .inputs import is_made, make_inputs

    wanted, where = dtype_of(dtype), device_of(device)
    LossOptions(softcap=softcap)  # refuses other values
    require_finite("entropy-bonus", entropy_bonus)

    def make(kind: str, shape: Shape) -> BenchInputs:
        case = make_inputs(kind, shape, dtype=wanted, device=where).ignoring(ignored_fraction)
        return replace(case, softcap=softcap, entropy_bonus=entropy_bonus)

    cases = []
    for kind in inputs or ["zipf"]:
        of_file = not is_made(kind)
        if not (is_zipfile(kind) if of_file else vocab):
            raise ValueError(f"inputs must be a file of `cce-dist bench capture`, got {kind!r}")
        for parsed in shapes_of(shape, tokens, vocab, dim, of_file=of_file):
            cases.append(partial(make, kind, parsed))
    return cases


def machine_of(
    device: str, threads: int, ranks: int = 1, peers: Iterable[str] = ()
) -> dict[str, str]:
    """Returns machine, command, date and commit, for the head of a table or record.

    Args:
        peers: methods; if other packages implement some of them, their versions are included.
    """
    import torch

    from .machine import describe_machine
    from .methods import describe_peers

    if threads:
        torch.set_num_threads(threads)
    launcher = ["cce-dist"]
    if ranks > 1:
        launcher = ["torchrun", "--nproc-per-node", str(ranks), "-m", "cce_dist"]
    # The allocator's settings decide how many tokens fit.
    allocator = os.environ.get("PYTORCH_ALLOC_CONF")
    variables = [] if allocator is None else [f"PYTORCH_ALLOC_CONF={allocator}"]
    command = shlex.join([*variables, *launcher, *sys.argv[1:]])
    machine = describe_machine(torch.device(device))
    return {**machine, **describe_peers(peers), "command": command}


def reasons_of(failed: Names) -> dict[str, str]:
    return dict(text.split("=", 1) for text in failed or ())
