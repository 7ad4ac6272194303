"""All methods by name (the dense recipe, ours, the peers), and the handling of a peer's failure."""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from cce_dist import (
    Filter,
    LinearCrossEntropy,
    QuantizedWeight,
    Screen,
    linear_cross_entropy,
    quantize_weight,
)
from cce_dist.options import Backend, GradientMode

from .golden import LossFunction, dense_loss
from .peers import PEERS, build_peer

MAX_REASON_CHARS = 160
OURS: tuple[GradientMode, ...] = ("filtered", "exact", "in_forward")
# `exact` with about a GiB to keep logits in.
WITH_MEMORY = "exact-kept"
MEMORY = 900 * 2**20
# `filtered` with 8-bit logits where they don't matter; the same with an existing 8-bit copy of the
# weight.
SCREENED, SCREENED_COPY = "screened", "screened-copy"
# `filtered` within torch.compile(fullgraph=True).
COMPILED = "filtered-compiled"
# Peers that need neither a GPU nor a compiler.
CPU_PEERS = ("torch-chunked",)


@dataclass(frozen=True)
class Method:
    """A loss by name; `build` imports and configures it.

    If a peer's `build` raises, the error is reported in a row and not raised.
    """

    name: str
    origin: Literal["dense", "ours", "peer"]
    build: Callable[[], LossFunction]


def parse_backend(text: str) -> Backend:
    """Returns the backend of this name.

    Raises:
        ValueError: there is no backend of this name.
    """
    for known in get_args(Backend):
        if text == known:
            return known
    raise ValueError(f"backend must be one of {list(get_args(Backend))}, got {text!r}")


def choose_methods(
    names: Sequence[str] = (),
    peers: str | None = None,
    *,
    backend: Backend = "auto",
    extra: Sequence[str] = (),
    on_gpu: bool = False,
    softcap: float | None = None,
) -> list[Method]:
    """Returns the methods to measure, ours before peers.

    Args:
        names: only these methods, peers included; empty: the dense recipe and ours.
        peers: "all", "none", or names with commas. None: "none" if there are `names`; else "all" on
            a GPU, and elsewhere the peers that run without one.
        extra: further peers, each "NAME=MODULE:FUNCTION", whose FUNCTION is a LossFunction.
        softcap: softcap of the logits, for all but `extra`; a peer that takes none is reported as
            failed.
    Raises:
        ValueError: a name is unknown or cannot run here, or `extra` is malformed.
    """
    recipe = functools.partial(dense_loss, softcap=softcap)
    known = {"dense": Method("dense", "dense", lambda: recipe)}
    known |= {name: Method(name, "ours", build) for name, build in _ours(backend, softcap).items()}
    for name in PEERS:
        known[name] = Method(name, "peer", functools.partial(build_peer, name, softcap))
    added = [_parse_extra(text) for text in extra]
    known |= {method.name: method for method in added}

    if peers is None:
        default = PEERS if on_gpu else CPU_PEERS
        wanted_peers = [] if names else list(default)
    elif peers in ("all", "none"):
        wanted_peers = list(PEERS) if peers == "all" else []
    else:
        wanted_peers = [name for name in peers.split(",") if name]
    wanted = {*(names or ("dense", *OURS)), *wanted_peers, *(method.name for method in added)}
    unknown = sorted(wanted - set(known))
    if unknown:
        raise ValueError(f"methods and peers must be among {sorted(known)}, got {unknown}")
    if COMPILED in wanted and not on_gpu:
        raise ValueError(
            f"method {COMPILED} needs a GPU: torch.compile cannot trace the dispatch mode that "
            "counts memory on a CPU"
        )
    return [method for name, method in known.items() if name in wanted]


def _ours(backend: Backend, softcap: float | None) -> dict[str, Callable[[], LossFunction]]:
    """Returns builders of our losses, by the names of the methods."""
    loss = functools.partial(LinearCrossEntropy, backend=backend, softcap=softcap)
    screened = functools.partial(loss, logits="screened")
    return {
        **{mode: functools.partial(loss, gradient=mode) for mode in OURS},
        WITH_MEMORY: functools.partial(
            loss, gradient="exact", keep_logits=True, workspace_bytes=MEMORY
        ),
        SCREENED: screened,
        "screened-e4m3": functools.partial(screened, screen=Screen(dtype="e4m3")),
        # The backward computes the exact logits anew.
        "screened-again": functools.partial(screened, keep_logits=False),
        "screened-keep-2^-9": functools.partial(screened, filter=Filter(keep=2.0**-9)),
        "screened-in-forward": functools.partial(screened, gradient="in_forward"),
        SCREENED_COPY: functools.partial(with_copy, backend, softcap),
        COMPILED: functools.partial(compiled, backend, softcap),
    }


def compiled(backend: Backend, softcap: float | None) -> LossFunction:
    """Returns the loss, compiled into one graph as in a compiled model."""
    loss = LinearCrossEntropy(gradient="filtered", backend=backend, softcap=softcap)
    return torch.compile(loss, fullgraph=True)


def with_copy(backend: Backend, softcap: float | None) -> LossFunction:
    """Returns a loss with screened logits that quantises the weight once, at the first call."""
    quantized: QuantizedWeight | None = None

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        nonlocal quantized
        if quantized is None:
            quantized = quantize_weight(weight, hidden, backend=backend)
        mean = linear_cross_entropy(
            hidden,
            weight,
            targets,
            softcap=softcap,
            logits="screened",
            quantized_weight=quantized,
            backend=backend,
        )
        assert isinstance(mean, Tensor)
        return mean

    return loss


def _parse_extra(text: str) -> Method:
    name, equals, target = text.partition("=")
    module, colon, function = target.partition(":")
    if not (name and equals and module and colon and function):
        raise ValueError(f"extra must be NAME=MODULE:FUNCTION, got {text!r}")
    return Method(name, "peer", lambda: getattr(importlib.import_module(module), function))


class DeviceLostError(RuntimeError):
    """The method `name` broke the CUDA context; nothing else can run in this process."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


def describe_failure(error: BaseException) -> str:
    """Returns the exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:MAX_REASON_CHARS]


def recover(name: str, reason: str, device: torch.device) -> None:
    """Frees the memory that a failed method held.

    Raises:
        DeviceLostError: the device takes no more work.
    """
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        raise DeviceLostError(name, reason) from None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the context after `seconds`; with 0 it never does.

    The error comes between two Python instructions.
    """

    def interrupt(signal_number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    if not seconds:
        yield
        return
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def restart_without(error: DeviceLostError) -> None:
    """Starts the command again in a fresh process, since this one's CUDA context is gone."""
    print(f"the device was lost in {error}; starting again without it", file=sys.stderr)
    again = [*sys.argv[1:], "--failed", f"{error.name}={error.reason}"]
    os.execv(sys.executable, [sys.executable, "-m", "cce_dist", *again])
