"""Where a figure was measured, and how time and memory are taken."""

from __future__ import annotations

import datetime
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cce_dist.allocations import track_allocations

FLUSH_BYTES = 256 * 2**20


def describe_machine(device: torch.device) -> dict[str, str]:
    """What every published table names: date, device, software, commit."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else platform.processor() or "CPU"


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def interleaved_times(
    variants: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Seconds of each variant, `repeats` times, taken in turns so that drift hits all alike.

    The first round warms up and is thrown away; a buffer is overwritten before each launch, so
    that no variant finds its inputs in a cache.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, run in variants.items():
            flush.zero_()
            _synchronize(device)
            start = time.perf_counter()
            run()
            _synchronize(device)
            times[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in times.items()}


def peak_extra_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Memory that `run` needs at its peak over what was there before, its results included."""
    if device.type == "cuda":
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with track_allocations() as allocations:
        run()
    return allocations.peak_bytes


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
