"""Every method by name: the dense recipe, ours, and the peers; and the failure of a peer."""

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
# `exact`, whose logits are kept in about a GiB.
WITH_MEMORY = "exact-kept"
MEMORY = 900 * 2**20
# `filtered` with 8-bit logits where they don't matter; the same with the weight's 8-bit copy at
# hand.
SCREENED, SCREENED_COPY = "screened", "screened-copy"
# `filtered` within torch.compile(fullgraph=True).
COMPILED = "filtered-compiled"
# What a GPU is not needed for, and needs no compiler.
CPU_PEERS = ("torch-chunked",)


@dataclass(frozen=True)
class Method:
    """`build` imports and configures it; what it raises is reported, not raised, for a peer."""

    name: str
    origin: Literal["dense", "ours", "peer"]
    build: Callable[[], LossFunction]


def parse_backend(text: str) -> Backend:
    """
    Raises:
        ValueError: not the name of a backend.
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
    """The methods to measure, ours before peers.

    Args:
        names: only these, peers included; empty for the dense recipe and ours.
        peers: "all", "none", or names with commas; None for "all" on a GPU and those that run
            without one elsewhere, or for "none" beside `names`.
        extra: "NAME=MODULE:FUNCTION" for one more peer each, FUNCTION as a LossFunction.
        softcap: of the logits, for all but `extra`; a peer without it is reported as failed.
    Raises:
        ValueError: an unknown name, one that cannot run here, or `extra` is malformed.
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
            f"method {COMPILED} needs a GPU: on a CPU memory is counted by what no compiler traces"
        )
    return [method for name, method in known.items() if name in wanted]


def _ours(backend: Backend, softcap: float | None) -> dict[str, Callable[[], LossFunction]]:
    """Builds our losses, by the names of methods."""
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
    """The loss as a model that is compiled in one graph calls it."""
    loss = LinearCrossEntropy(gradient="filtered", backend=backend, softcap=softcap)
    return torch.compile(loss, fullgraph=True)


def with_copy(backend: Backend, softcap: float | None) -> LossFunction:
    """Screened logits of a weight that is quantised once, for the first hidden states."""
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
    """`name` broke the CUDA context; nothing else can run in this process."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


def describe_failure(error: BaseException) -> str:
    """The exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:MAX_REASON_CHARS]


def recover(name: str, reason: str, device: torch.device) -> None:
    """Frees what the failed method held.

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
    """Raises TimeoutError inside after `seconds`, between two Python instructions; 0: never."""

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
    """Begins anew in a fresh process: this one's CUDA context is gone."""
    print(f"the device was lost in {error}; starting again without it", file=sys.stderr)
    again = [*sys.argv[1:], "--failed", f"{error.name}={error.reason}"]
    os.execv(sys.executable, [sys.executable, "-m", "cce_dist", *again])
