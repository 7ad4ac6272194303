"""The C modules by which Triton launches kernels, without the CUDA driver that they link with.

Up to Triton 3.6 each kernel's signature has a launcher of its own, whose place in the cache depends
on its source alone. Later versions have one module for all kernels; its place depends on the folder
of the job's driver, so that only the job can make it.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from triton.backends.nvidia import driver
from triton.runtime import build

from cce_dist.backends.triton.launch.loading import load_one_at_a_time

LIBRARY = "libcuda.so.1"


def why_no_launchers() -> str | None:
    """Says why launchers cannot be made here; None if they can."""
    if not hasattr(driver, "make_launcher"):
        return "this Triton has one module for all launches, which a machine's first process makes"
    if compiler() is None:
        return "no C compiler (CC, gcc or clang): a job makes them at its first launches"
    return None


def compiler() -> str | None:
    """Returns the C compiler that Triton takes."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@contextlib.contextmanager
def launchers() -> Iterator[Callable[[Any, Any], object]]:
    """Returns a function of a kernel's source and metadata that puts its launcher into Triton's
    cache; it does nothing if `why_no_launchers`. Nothing is loaded."""
    if why_no_launchers() is not None:
        yield lambda source, metadata: None
        return
    # It replaces what the context replaces, and must stay.
    load_one_at_a_time()
    with tempfile.TemporaryDirectory() as folder:
        _make_library(Path(folder))
        with (
            mock.patch.object(driver, "library_dirs", lambda: [folder]),
            mock.patch.object(build, "_load_module_from_path", lambda name, path: mock.MagicMock()),
            mock.patch.object(driver, "PyCUtensorMap", None),
        ):
            driver.CudaUtils.__init__(mock.MagicMock())
            yield driver.CudaLauncher


def _make_library(folder: Path) -> None:
    """Makes a library with the driver's names, to link with: on the job the driver takes its place.
    A linker may leave out a library of which it uses no name."""
    source = Path(driver.__file__)
    text = source.read_text() + source.with_name("driver.c").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))
    stub = folder / "stub.c"
    stub.write_text("\n".join(f"void {name}(void) {{}}" for name in names))
    command = [str(compiler()), "-shared", "-fPIC", "-w", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([*command, str(stub), "-o", str(folder / LIBRARY)], check=True)
