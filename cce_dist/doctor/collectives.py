"""Checks of the loss's collectives at a job's sizes: their results and their times."""

from __future__ import annotations

import itertools
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

from cce_dist.distributed.joining import num_cores, own_group
from cce_dist.doctor.check import Check, make_check
from cce_dist.doctor.facts import RankFacts
from cce_dist.doctor.links import TOO_SLOW, Link, link_of
from cce_dist.doctor.ranks import Ranks
from cce_dist.doctor.report import Request
from cce_dist.ranks.gather import start_all_gather
from cce_dist.ranks.hidden_sum import reduce_grad_hidden
from cce_dist.ranks.transport import group_rank, group_size

WARM_UP = 3
FEWEST, MOST = 3, 30
# About the time that all calls of one row take together.
SECONDS_A_ROW = 1.5
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
    ranks: Ranks, request: Request, device: torch.device
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
    _, pp, tp = request.mesh(ranks.size)
    broken = True
    try:
        groups = []
        for name, width in {"tp": tp, "pp x tp": pp * tp if pp > 1 else 1}.items():
            if width > 1:
                rows = [list(range(x, x + width)) for x in range(0, ranks.size, width)]
                group = own_group(ranks.rank, rows, limit)
                assert group is not None
                groups.append((name, group, rows[ranks.rank // width]))
        yield groups
        broken = False
    finally:
        # NCCL would wait here for ranks in a collective, and hide the exception.
        if not broken or device.type != "cuda":
            dist.destroy_process_group()


def check_collectives(
    ranks: Ranks, request: Request, device: torch.device, everyone: Sequence[RankFacts]
) -> list[Check]:
    """Returns three rows for each kind of group: the smallest collective, the merge, and the sum.

    The sum is that of the hidden gradient. All groups of a kind run at the same time, as in a job;
    figures are those of the slowest rank.

    Collectives: all ranks of the job must call this.
    """
    checks: list[Check] = []
    with groups_of(ranks, request, device) as groups:
        if not groups:
            reason = "the loss has none: every rank holds the whole vocabulary"
            return [Check("collectives", "skipped", reason)]
        bandwidth = None if request.bandwidth is None else 1e9 * request.bandwidth
        for name, group, members in groups:
            size, tiny = len(members), 0.0
            link = link_of([everyone[rank] for rank in members], num_cores())
            for kind, measured in _make_all(request, group, device):
                seconds, right = _measure(ranks, f"{name}/{kind}", measured, device)
                tiny = tiny or seconds
                label = f"{kind}, {name} {size}"
                check = judge(label, measured, size, seconds, tiny, link, bandwidth)
                checks.append(check if right else _wrong(label, measured))
    return checks


def _make_all(
    request: Request, group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Measured]]:
    yield "latency", _make_gather(1, group, device)
    # The merge sends a header, and two numbers for each token.
    yield "merge", _make_gather(2 * request.tokens + 8, group, device)
    yield "sum", _make_sum(request, group, device)


def _make_gather(count: int, group: dist.ProcessGroup, device: torch.device) -> Measured:
    size = group_size(group)
    mine = torch.full((count,), float(group_rank(group)), device=device)

    def gather() -> Tensor:
        return start_all_gather(mine, group)()

    def is_right() -> bool:
        expected = torch.arange(size, dtype=mine.dtype, device=device)
        return bool((gather() == expected[:, None]).all())

    text = f"all-gather of {4 * count:,} bytes a rank"
    return Measured(gather, is_right, 4.0 * (size - 1) * count, 1, text)


def _make_sum(request: Request, group: dist.ProcessGroup, device: torch.device) -> Measured:
    """Makes the sum of `reduce_grad_hidden` for hidden states of the request's dtype."""
    size, scatter, dtype = group_size(group), request.sequence_parallel, DTYPES[request.dtype]
    grad = torch.empty(request.tokens, request.dim, device=device)
    num_bytes = (size - 1) / size * 4 * grad.numel()

    def reduce() -> Tensor:
        return reduce_grad_hidden(grad, group, scatter=scatter, dtype=dtype)

    def is_right() -> bool:
        grad.fill_(1.0)
        right = bool((reduce() == size).all())
        # Ones would become infinite when they are summed in place over and over.
        grad.zero_()
        return right

    shape = f"{list(grad.shape)} fp32"
    if scatter:
        return Measured(reduce, is_right, num_bytes, 1, f"reduce-scatter of {shape}", True)
    if dtype.itemsize == 4 or request.tokens % size:
        return Measured(reduce, is_right, 2 * num_bytes, 1, f"all-reduce of {shape}")
    text = f"reduce-scatter of {shape}, all-gather in 16 bits"
    return Measured(reduce, is_right, 1.5 * num_bytes, 2, text, True)


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
    """Times each call, in seconds. Calls run back to back, which keeps the ranks together."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(repeats):
            call()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def judge(
    name: str,
    measured: Measured,
    size: int,
    seconds: float,
    tiny: float,
    link: Link,
    bandwidth: float | None,  # expected bytes/s, in place of the link's
) -> Check:
    """Returns the row of a collective with right results.

    It is a warning if the collective takes more than TOO_SLOW times the expected time.

    Args:
        tiny: measured seconds of the smallest collective, used if the link has no figure for it.
    """
    known, num_bytes = link.expected, measured.bus_bytes
    latency = None if known is None else known.latency.get(size)
    rate, source = bandwidth, "as given by --bandwidth"
    if known is not None and rate is None:
        rate, source = (
            (known.scattered if measured.scatters else None) or known.bandwidth,
            known.source,
        )
    is_large = num_bytes >= 1e5
    expected = None
    # If the link has no figure for a small collective, add the measured time of the smallest.
    can_add = is_large and measured.steps * tiny < seconds / 2
    if rate is not None and (latency is not None or can_add):
        expected = measured.steps * (tiny if latency is None else latency) + num_bytes / rate
    speed = f", {num_bytes / seconds / 1e9:.3g} GB/s of the bus" if is_large else ""
    rule = "no figure for this link"
    if expected is not None:
        rule = f"{_duration(expected)}, at most {TOO_SLOW:g} times that ({source})"
    return make_check(
        name,
        expected is None or seconds <= TOO_SLOW * expected,
        f"{_duration(seconds)}{speed}: {measured.description}; {link.kind}",
        expected=rule,
        remedy=link.advice,
        otherwise="warning",
        numbers={
            "seconds": seconds,
            "bus_bytes": num_bytes,
            "bus_bytes_per_second": num_bytes / seconds,
            "expected_seconds": expected,
            "link": link.kind,
            "ranks": size,
        },
    )


def _wrong(name: str, measured: Measured) -> Check:
    return Check(
        name,
        "failure",
        f"wrong numbers came back: {measured.description}",
        expected="each rank's numbers, or their sum",
        remedy="do not train here: look at NCCL_DEBUG=INFO and at the GPUs' and links' errors, or "
        "try another NCCL",
    )


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} us"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
