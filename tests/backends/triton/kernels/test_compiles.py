"""Kernels compile for GPUs that nobody ran them on, and fit what memory these have.

Without a GPU, so nothing here says that they are right there, or fast.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cce_dist.backends.eight_bits import screen_dtype
from cce_dist.backends.triton.launch.tiles import TABLE, key_of, takes_tma
from cce_dist.options import Screen

pytest.importorskip("triton")

from cce_dist.ahead.stand_in import DEVICES
from cce_dist.backends.triton.forward.hopper import why_no_gluon

SCRIPT = Path(__file__).parent / "compile_jobs.py"
KERNELS = Path(__file__).parents[4] / "cce_dist/backends/triton/kernels"
# Bytes of a multiprocessor's shared memory that each block takes beside its own.
RESERVED = 1024
# Columns of tensor memory of a multiprocessor.
TENSOR = 512
# By compute capability. Triton goes through the same passes for B200 and RTX 50, and for A10 and
# A6000, L4 and L40S, A100: what GPUs of a generation have in common is compiled for the first.
JOBS = (
    *(
        "100:bf16,everything,exact,e4m3,small,pairs,segments,heads,heads-e4m3,heads-jsd,tiles",
        "120:bf16,exact,fp32-exact",
    ),
    *(
        "86:bf16,everything,int8,heads-int8,heads-fp32,tiles",
        "89:e4m3",
        "80:everything,temperature-exact",
    ),
    "90:bf16,chunk,exact-everything,temperature,temperature-softcap,heads,heads-int8,heads-fp32,heads-reverse,tiles",
)
CAPABILITIES = (100, 90, 120, 86, 89, 80)
# Where the calls reach every kernel, but for Hopper's own.
WHOLE = 100
HOPPER = {
    *("hopper.hopper_forward_kernel", "hopper.hopper_teacher_kernel"),
    *("hopper_logits.hopper_logits_kernel", "hopper_exact.hopper_exact_kernel"),
}


def compiling(folder: Path) -> dict[str, str]:
    """Returns environment variables of a process that compiles and keeps its freed memory.

    glibc gives memory back and asks for it again all the time: a tenth of the compiler's time.
    """
    kept = (f"glibc.malloc.{name}=1000000000" for name in ("trim_threshold", "mmap_threshold"))
    tunables = ":".join((*kept, "glibc.malloc.top_pad=64000000"))
    return {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder),
        "GLIBC_TUNABLES": tunables,
    }


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of the compute capability that a test gives it."""
    found = SimpleNamespace(capability=None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    return found


def compiled(folder: Path) -> list[dict[str, Any]]:
    # Of the binaries' cache nobody else may have anything: no stage after LLVM's was run.
    env = os.environ | compiling(folder)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), ",".join(map(str, CAPABILITIES)), *JOBS],
        env=env,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def why_not(record: dict[str, Any], capability: int) -> str | None:
    """Why that kernel cannot start there."""
    if "error" in record:
        return record["error"]
    where = CAPABILITIES if record["for_all"] else (capability,)
    of_block = min(DEVICES[each].shared_bytes for each in where)
    of_all = of_block + RESERVED
    residents = record["residents"]
    if record["shared"] > of_block:
        return f"{record['shared']} bytes of shared memory, and a block has {of_block}"
    # Programs that wait for each other must all be there.
    needed = residents * (record["shared"] + RESERVED)
    if needed > of_all:
        return f"{residents} at a time take {needed} bytes of shared memory, of {of_all}"
    if residents * record["tensor"] > TENSOR:
        return f"{residents} at a time of {record['tensor']} columns of tensor memory, of {TENSOR}"
    return None


def kernels() -> set[str]:
    found = set()
    for path in KERNELS.rglob("*.py"):
        names = re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
        found |= {f"{path.stem}.{name}" for name in names}
    return found


@pytest.mark.timeout(600)
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    records = compiled(tmp_path)
    reasons = [(record, why_not(record, record["capability"])) for record in records]
    failed = [
        f"{one['kernel']} of {one['call']} on {one['capability']}: {why}"
        for one, why in reasons
        if why is not None
    ]
    assert not failed, "\n".join(failed)
    by_capability: dict[int, list[dict[str, Any]]] = {each: [] for each in CAPABILITIES}
    for record in records:
        by_capability[record["capability"]].append(record)
    seen = {
        capability: {record["kernel"] for record in found}
        for capability, found in by_capability.items()
    }
    assert all(seen.values())
    everywhere = {record["kernel"] for record in records if record["for_all"]}
    assert (seen[WHOLE] | everywhere) - HOPPER == kernels() - HOPPER
    if why_no_gluon() is None:
        assert seen[90] >= HOPPER
    # Blackwell's tensor cores are in use, and no other's are taken for them.
    in_use = {record["capability"] for record in records if record["tensor"]}
    assert in_use == {100}


FITS = {"for_all": False, "shared": 115712, "tensor": 256, "residents": 2}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"shared": 115713}, "2 at a time take 233474 bytes of shared memory, of 233472"),
        ({"shared": 232449, "residents": 1}, "232449 bytes of shared memory, and a block has"),
        ({"for_all": True}, "115712 bytes of shared memory, and a block has 101376"),
        ({"tensor": 257}, "2 at a time of 257 columns of tensor memory, of 512"),
        ({"error": "CompilationError"}, "CompilationError"),
    ],
    ids=["fits", "residents", "block", "everywhere", "tensor", "error"],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], reason: str | None) -> None:
    found = why_not(FITS | change, 100)
    assert found == reason or (found is not None and reason is not None and reason in found)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm80"),
        ((8, 6), "sm86"),
        ((8, 7), "sm80"),
        ((8, 9), "sm86"),
        ((9, 0), "sm90"),
        ((10, 3), "sm100"),
        ((11, 0), "sm100"),
        ((12, 1), "sm86"),
        ((13, 0), "sm86"),
    ],
    ids=str,
)
def test_key_of(capability: tuple[int, int], name: str, device: SimpleNamespace) -> None:
    device.capability = capability
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        key = key_of(torch.empty(1, dtype=dtype))
        assert key == (name, dtype.itemsize)
        assert key in TABLE


@pytest.mark.parametrize(
    ("major", "bits"),
    [
        (8, torch.int8),
        (9, torch.int8),
        (10, torch.float8_e4m3fn),
        (11, torch.float8_e4m3fn),
        (12, torch.int8),
    ],
    ids=str,
)
def test_screen_dtype(major: int, bits: torch.dtype, device: SimpleNamespace) -> None:
    device.capability = (major, 0)
    weight: Any = SimpleNamespace(is_cuda=True, device="cuda")
    assert screen_dtype(Screen(), weight) == bits
    assert screen_dtype(Screen(dtype="e4m3"), weight) == torch.float8_e4m3fn
    assert screen_dtype(Screen(dtype="int8"), weight) == torch.int8
    assert screen_dtype(Screen(), torch.empty(1)) == torch.int8


@pytest.mark.parametrize(
    ("capability", "takes"),
    [((8, 9), (False, False)), ((9, 0), (True, True)), ((12, 0), (True, False))],
    ids=str,
)
def test_takes_tma(
    capability: tuple[int, int], takes: tuple[bool, bool], device: SimpleNamespace
) -> None:
    device.capability = capability
    matrices = (torch.zeros(4, 16, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert tuple(map(takes_tma, matrices)) == takes
    assert not takes_tma(torch.zeros(4, 17, dtype=torch.bfloat16))
