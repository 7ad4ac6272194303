"""Compilation of a job's kernels into Triton's cache, without a GPU."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import base64
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs

from cce_dist.backends.triton.launch.driver import extension
from cce_dist.backends.triton.launch.start import can_compile_only, compile_only
from cce_dist.backends.triton.launch.tiles import interpreted

from .calls import HeadCalls
from .launchers import compiler, launchers
from .stand_in import Device, stand_in, tensors_without_memory


@dataclass(frozen=True)
class Binary:
    """A kernel's binary in the cache."""

    kernel: str
    folder: str  # in the cache
    cached: bool  # it was there before
    seconds: float  # of one core, if it was not
    bytes: int  # of all files of the compilation


@dataclass(frozen=True)
class Report:
    """The outcome of `compile_ahead`."""

    cache: Path
    binaries: list[Binary]
    failed: dict[str, str]  # errors by kernel
    seconds: float


def compile_ahead(calls: HeadCalls, device: Device, cache: Path | None = None) -> Report:
    """Compiles every kernel that the calls launch on the device, in parallel on this process's
    cores, into Triton's cache. It takes no GPU, and no memory for the calls' tensors.

    Triton finds a binary by the kernel's source, the types of its arguments, and the versions of
    Triton and of its assembler; and the binary's files by their absolute paths. A job finds all of
    them if it has the same releases of this library and of Triton, and the folder at the same path.

    Args: cache: the folder; None: Triton's own.
    Raises:
        ValueError: the loss refuses a call on this device, kernels are interpreted, or this Triton
            cannot compile without a launch.
        OSError: the folder cannot be made.
    """
    if interpreted():
        raise ValueError("TRITON_INTERPRET must be 0 to compile, got 1")
    if not can_compile_only():
        raise ValueError(f"triton must be 3.6 or later to compile ahead, got {triton.__version__}")
    folder = Path(cache or knobs.cache.dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    compiled: list[tuple[str, str, bool, float]] = []

    def note(metadata: Mapping[str, Any], times: Any, cache_hit: bool, **rest: object) -> None:
        # Its own notation of the folder's name: triton.runtime.cache.
        name = base64.b32encode(bytes.fromhex(metadata["hash"])).decode().rstrip("=")
        compiled.append((metadata["name"], name, cache_hit, 0 if cache_hit else times.total / 1e6))

    start = time.perf_counter()
    with (
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder)),
        mock.patch.object(knobs.compilation, "listener", note),
        launchers() as launcher,
        stand_in(device, launcher),
        tensors_without_memory(),
        compile_only(torch.device("cpu")) as compilations,
    ):
        if compiler() is not None:
            # Not from this process's cache.
            extension.__wrapped__()
        calls.make()
    binaries = [Binary(*facts, _bytes_of(folder / facts[1])) for facts in compiled]
    failed = {each.name: str(each.error) for each in compilations if each.error is not None}
    return Report(folder, binaries, failed, time.perf_counter() - start)


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
