"""Checks of the loss's collectives at a job's sizes: their results and their times."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.distributed import own_group
from cce_dist.doctor.check import Check
from cce_dist.doctor.facts import RankFacts
from cce_dist.doctor.links import TOO_SLOW, Link, link_of
from cce_dist.doctor.ranks import Ranks
from cce_dist.ranks.gather import start_all_gather
from cce_dist.ranks.hidden_sum import reduce_grad_hidden
from cce_dist.ranks.transport import group_rank, group_size

WARM_UP = 3
FEWEST, MOST = 3, 30
# About the time that all calls of one row take together.
SECONDS_A_ROW = 1.5
TINY = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Job:
    """The sizes and the dtype of the loss whose collectives are measured.

    Args:
        bandwidth: expected bytes/s, in place of the table's; None: the table's.
    """

    tokens: int
    dim: int
    dtype: str = "bfloat16"
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    bandwidth: float | None = None


@dataclass(frozen=True)
class Measured:
    """A collective on one group.

    Args:
        is_right: calls the collective once, and checks its result.
        bus_bytes: bytes over the slowest link of a ring, by which nccl-tests define the bandwidth
            of the bus: (W - 1) / W of all S bytes for an all-gather or a reduce-scatter, twice as
            much for an all-reduce.
        steps: number of collectives that follow one another.
        scatters: the collective is a sum by reduce-scatter.
    """

    call: Callable[[], Any]
    is_right: Callable[[], bool]
    bus_bytes: float
    steps: int
    description: str
    scatters: bool = False


@contextmanager
def groups_of(
    ranks: Ranks, job: Job, device: torch.device
) -> Iterator[list[tuple[str, dist.ProcessGroup, list[int]]]]:
    """Yields this rank's groups that may share a vocabulary: name, group and members.

    Collectives: those that make groups. The groups are destroyed at the end.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=ranks.timeout)
    store = dist.PrefixStore("groups", ranks.store)
    dist.init_process_group(
        backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=limit
    )
    broken = False
    try:
        widths = {"tp": job.tp} | ({"pp x tp": job.pp * job.tp} if job.pp > 1 else {})
        groups = []
        for name, width in widths.items():
            rows = [list(range(x, x + width)) for x in range(0, ranks.size, width)]
            group = own_group(ranks.rank, rows, limit)
            if group is not None and width > 1:
                groups.append((name, group, rows[ranks.rank // width]))
        yield groups
    except BaseException:
        broken = True
        raise
    finally:
        # NCCL would wait here for ranks in a collective, and hide the exception.
        if not broken or device.type != "cuda":
            dist.destroy_process_group()


def check_collectives(
    ranks: Ranks, job: Job, device: torch.device, everyone: Sequence[RankFacts]
) -> list[Check]:
    """Returns three rows for each kind of group: the smallest collective, the merge, and the sum.

    The sum is that of the hidden gradient. All groups of a kind run at the same time, as in a job;
    figures are those of the slowest rank.

    Collectives: all ranks of the job must call this.
    """
    checks: list[Check] = []
    with groups_of(ranks, job, device) as groups:
        if not groups:
            reason = "the loss has none: every rank holds the whole vocabulary"
            return [Check(name="collectives", status="skipped", observed=reason)]
        for name, group, members in groups:
            link = link_of([everyone[rank] for rank in members], _num_cores())
            for kind in ("latency", "merge", "sum"):
                measured = _make(kind, job, group, device)
                seconds, right = _measure(ranks, f"{name}/{kind}", measured, device)
                if kind == "latency":
                    tiny = seconds
                label = f"{kind}, {name} {len(members)}"
                check = judge(label, measured, len(members), seconds, tiny, link, job.bandwidth)
                checks.append(check if right else _wrong(label, measured))
    return checks


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _make(kind: str, job: Job, group: dist.ProcessGroup, device: torch.device) -> Measured:
    size, rank = group_size(group), group_rank(group)
    share = (size - 1) / size
    if kind == "sum":
        return _make_sum(job, group, device)
    # The merge sends a header, and two numbers for each token.
    count = TINY if kind == "latency" else 2 * job.tokens + 8
    mine = torch.full((count,), float(rank), device=device)

    def gather() -> Tensor:
        return start_all_gather(mine, group, async_op=False)()

    def is_right() -> bool:
        expected = torch.arange(size, dtype=mine.dtype, device=device)
        return bool((gather() == expected[:, None]).all())

    text = f"all-gather of {4 * count:,} bytes a rank"
    return Measured(gather, is_right, share * 4 * count * size, 1, text)


def _make_sum(job: Job, group: dist.ProcessGroup, device: torch.device) -> Measured:
    """Makes the sum of `reduce_grad_hidden` for hidden states of the job's dtype."""
    size, scatter, dtype = group_size(group), job.sequence_parallel, DTYPES[job.dtype]
    share, num_bytes = (size - 1) / size, 4 * job.tokens * job.dim
    grad = torch.empty(job.tokens, job.dim, device=device)

    def reduce() -> Tensor:
        return reduce_grad_hidden(grad, group, scatter=scatter, dtype=dtype)

    def is_right() -> bool:
        grad.fill_(1.0)
        right = bool((reduce() == size).all())
        # Ones would become infinite when they are summed in place over and over.
        grad.zero_()
        return right

    shape = f"[{job.tokens}, {job.dim}]"
    if scatter:
        text = f"reduce-scatter of {shape} fp32"
        return Measured(reduce, is_right, share * num_bytes, 1, text, scatters=True)
    if dtype.itemsize == 4 or job.tokens % size:
        return Measured(reduce, is_right, 2 * share * num_bytes, 1, f"all-reduce of {shape} fp32")
    text = f"reduce-scatter of {shape} fp32, all-gather in 16 bits"
    return Measured(reduce, is_right, 1.5 * share * num_bytes, 2, text, scatters=True)


def _measure(
    ranks: Ranks, phase: str, measured: Measured, device: torch.device
) -> tuple[float, bool]:
    """Returns the median seconds of a call on the slowest rank, and whether all results are right.

    Collectives: all ranks of the job must call this.
    """
    right = measured.is_right()
    first = max(_times(measured.call, WARM_UP, device))
    first = max(ranks.share(f"{phase}/first", first))
    repeats = int(min(max(SECONDS_A_ROW / max(first, 1e-9), FEWEST), MOST))
    median = statistics.median(_times(measured.call, repeats, device))
    everywhere = ranks.share(phase, [median, right])
    return max(x[0] for x in everywhere), all(x[1] for x in everywhere)


def _times(call: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Times each call. Calls run back to back, which keeps the ranks together."""
    if device.type != "cuda":
        durations = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            durations.append(time.perf_counter() - start)
        return durations
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def judge(
    name: str,
    measured: Measured,
    size: int,
    seconds: float,
    tiny: float,
    link: Link,
    bandwidth: float | None,
) -> Check:
    """Returns the row of a collective with right results.

    It is a warning if the collective takes more than TOO_SLOW times the expected time.

    Args:
        tiny: measured seconds of the smallest collective, used if the link has no figure for it.
        bandwidth: as in `Job`.
    """
    known = link.expected
    latency = known.latency.get(size) if known is not None else None
    rate = bandwidth
    if rate is None and known is not None:
        rate = (known.scattered if measured.scatters else None) or known.bandwidth
    source = "as given by --bandwidth" if bandwidth else known.source if known else ""
    # If the link has no figure for a small collective, add the measured time of the smallest.
    expected = None
    if rate is not None and (latency is not None or measured.steps * tiny < seconds / 2):
        base = tiny if latency is None else latency
        expected = measured.steps * base + measured.bus_bytes / rate
    if measured.bus_bytes < 1e5 and latency is None:
        expected = None
    achieved = measured.bus_bytes / seconds
    speed = f", {achieved / 1e9:.3g} GB/s of the bus" if measured.bus_bytes >= 1e5 else ""
    slow = expected is not None and seconds > TOO_SLOW * expected
    return Check(
        name=name,
        status="warning" if slow else "ok",
        observed=f"{_duration(seconds)}{speed}: {measured.description}; {link.kind}",
        expected="no figure for this link"
        if expected is None
        else f"{_duration(expected)}, at most {TOO_SLOW:g} times that ({source})",
        remedy=link.advice if slow else "",
        numbers={
            "seconds": seconds,
            "bus_bytes": measured.bus_bytes,
            "bus_bytes_per_second": achieved,
            "expected_seconds": expected,
            "link": link.kind,
            "ranks": size,
        },
    )


def _wrong(name: str, measured: Measured) -> Check:
    return Check(
        name=name,
        status="failure",
        observed=f"wrong numbers came back: {measured.description}",
        expected="each rank's numbers, or their sum",
        remedy="do not train here: look at NCCL_DEBUG=INFO and at the GPUs' and links' errors, or "
        "try another NCCL",
    )


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
