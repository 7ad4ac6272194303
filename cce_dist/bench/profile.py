"""Profile of a method's time by torch's profiler: its kernels, on a CPU its operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from cce_dist.options import Backend

from .inputs import BenchInputs
from .machine import Part, Timer, Variant, interleaved_times, synchronize, variant_of
from .methods import Method, describe_failure
from .rank_methods import Setup
from .report import Cells, percentiles_ms

# Names of two rows: the sum of all kernels' times, and the kernels that have no row of their own.
SUM, OTHERS = "all of them", "others"
# Longest name of a kernel: a template's name may fill several lines.
LONGEST = 60


def bench_profile(
    inputs: BenchInputs,
    methods: Sequence[Method],
    *,
    backend: Backend = "auto",
    part: Part = "loss+grad",
    repeats: int = 10,
    most: int = 30,
) -> list[Cells]:
    """Returns rows that show where each method's time goes.

    A method's first row is its median call without the profiler, the second the sum of its kernels'
    times. The sum is less than the call if the device waits, and more if kernels run side by side.
    Then each of the `most` longest kernels has a row, and all others together have one.

    `calls` is the number of launches in a call, `kernel_ms` their time together, and `of_sum` its
    share of the sum.
    """
    rows: list[Cells] = []
    setup = Setup(backend, inputs.softcap)
    for method in methods:
        try:
            variant = variant_of(method.build(setup), inputs, part)
            call, kernels = profiled(variant, inputs.hidden.device, repeats)
        except Exception as error:
            if method.is_ours:
                raise
            rows.append(_row(method.name, failed=describe_failure(error)))
            continue
        rows.append(_row(method.name, "a call", 1, call))
        total = sum(ms for *_, ms in kernels)
        launches = sum(calls for _, calls, _ in kernels)
        rows.append(_row(method.name, SUM, launches, total, total))
        rows += [_row(method.name, *kernel, total) for kernel in kernels[:most]]
        other_kernels = kernels[most:]
        if other_kernels:
            calls = sum(calls for _, calls, _ in other_kernels)
            ms = sum(ms for *_, ms in other_kernels)
            rows.append(_row(method.name, f"{len(other_kernels)} {OTHERS}", calls, ms, total))
    return rows


def profiled(
    variant: Variant, device: torch.device, repeats: int
) -> tuple[float, list[tuple[str, float, float]]]:
    """Returns the median call's milliseconds; and each kernel's name, launches and milliseconds.

    Launches and milliseconds are those of one call.
    """
    taken = interleaved_times({"": variant}, {"": repeats}, Timer(device))[""]
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        for _ in range(repeats):
            with variant.prepared() as call:
                call()
            synchronize(device)
    by_name: dict[str, tuple[float, float]] = {}
    for event in profiler.key_averages():
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if micros <= 0:
            continue
        name = event.key.removeprefix("void ")[:LONGEST]
        calls, ms = by_name.get(name, (0.0, 0.0))
        by_name[name] = calls + event.count / repeats, ms + micros / 1e3 / repeats
    kernels = [(name, *numbers) for name, numbers in by_name.items()]
    return percentiles_ms(taken)["median_ms"], sorted(kernels, key=lambda each: -each[2])


def _row(
    method: str,
    kernel: str = "",
    calls: float | None = None,
    ms: float | None = None,
    total: float | None = None,
    failed: str = "",
) -> Cells:
    share = None if ms is None or not total else ms / total
    cells = {"method": method, "kernel": kernel, "calls": calls, "kernel_ms": ms, "of_sum": share}
    return {**cells, "failed": failed}
