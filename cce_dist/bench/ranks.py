"""Benchmark of losses over ranks that share the vocabulary: time, communication, memory, errors.

Every rank of the job runs this. If a group has fewer ranks than the job, several groups do the same
side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cce_dist import VocabShard
from cce_dist.distributed import join, leave
from cce_dist.options import Backend

from .golden import (
    GRADIENT_ERRORS,
    WORST_ERROR_RATIO,
    Gradients,
    LossFunction,
    errors,
    golden_gradients,
    gradients,
    require_correct,
)
from .inputs import BenchInputs
from .machine import (
    Timer,
    Variant,
    floor_variants,
    fresh_compiler,
    interleaved_times,
    peak_extra_bytes,
    synchronize,
    variant_of,
)
from .methods import Method, describe_failure, recover
from .rank_methods import Place, Setup, kept_share
from .report import Cells, percentiles_ms

# Beyond the dense recipe's error on one rank, in fp32: other ranks sum in another order.
ERROR_SLACK = 1e-6
# About 13 ms. The device computes a quarter of a head faster than the host launches it; in a
# training step the host is ahead by the whole model's kernels.
HEAD_START_CYCLES = 24_000_000
# Measured columns of a row.
COLUMNS = (
    *("median_ms", "p10_ms", "p90_ms", "communication_ms", "exposed_ms"),
    *("least_busy_ms", "most_busy_ms"),
    *("least_kept", "most_kept", "least_kept_alone", "most_kept_alone"),
    *("peak_extra_mib", "loss_error", *GRADIENT_ERRORS),
)
# Name of the bare product hidden @ weight.T of a rank's rows.
FLOOR = "one matmul"

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """The place of this process in the job."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextmanager
def joined(device: str, timeout_seconds: float) -> Iterator[Job]:
    """Joins the ranks that a launcher started; without a launcher there is one rank.

    On GPUs each rank has a GPU, and NCCL connects the ranks; on CPUs gloo connects them.

    Raises:
        ValueError: device is no kind of device, the host has more ranks than GPUs, or the
            launcher's variables contradict one another.
        RuntimeError: some ranks did not come.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    world = join(device=kind, timeout=timeout_seconds)
    try:
        yield Job(world.rank, world.world_size, world.device)
    except BaseException:
        # With other ranks in a collective, NCCL would wait here and hide the error.
        if world.device.type != "cuda" or world.world_size == 1:
            dist.destroy_process_group()
        raise
    leave(world)


def make_places(job: Job, sizes: Sequence[int], vocab_size: int, parallel: bool) -> list[Place]:
    """Makes groups of each size; returns this rank's places in them.

    With `parallel`, each group of several ranks has a second place under sequence parallelism.

    Raises:
        ValueError: a size does not divide the number of ranks, or the vocabulary.
    """
    places = []
    for size in sorted(set(sizes)):
        if job.size % size or vocab_size % size:
            raise ValueError(
                f"size must divide the number of ranks, {job.size}, and of classes, {vocab_size}, "
                f"got {size}"
            )
        groups = [
            dist.new_group(list(range(start, start + size))) for start in range(0, job.size, size)
        ]
        group = groups[job.rank // size]
        assert isinstance(group, dist.ProcessGroup)
        place = Place(group, VocabShard.chunked(vocab_size, job.rank % size, size))
        places.append(place)
        if parallel and size > 1:
            places.append(replace(place, sequence_parallel=True))
    return places


@dataclass
class Trial:
    """Results of one method, or of the bare product, in one place."""

    name: str
    place: Place
    inputs: BenchInputs  # this rank's part
    method: Method | None = None  # None: the bare product
    function: LossFunction | None = None  # None: the bare product, or the method failed
    cells: dict[str, Any] = field(default_factory=dict)
    failed: str = ""


def bench_ranks(
    job: Job,
    inputs: BenchInputs,
    methods: Sequence[Method],
    places: Sequence[Place],
    *,
    repeats: int,
    backend: Backend = "auto",
    golden: Gradients | None = None,
    save: Callable[[list[Cells]], None] = lambda rows: None,
) -> list[Cells]:
    """Returns a row for every method and place, after rows of the bare product of a rank's rows.

    Times are those of the slowest rank. `of_matmul` is a time over the bare product's.

    Args:
        inputs: all tokens and the whole vocabulary, the same on every rank.
        backend: of our methods.
        golden: of all tokens and the whole vocabulary; None: those of the mean cross-entropy.
        save: called with all rows so far after every method, and at the end.
    Raises:
        RuntimeError: the error of one of our gradients is more than WORST_ERROR_RATIO times that
            of the dense recipe.
    """
    # On a CPU nothing here compiles; the compiler alone would take seconds to import.
    with nullcontext() if job.device.type == "cpu" else fresh_compiler():
        one = torch.zeros(1, device=job.device)
        timer = Timer(job.device, HEAD_START_CYCLES, align=lambda: dist.all_reduce(one))
        golden = golden_gradients(inputs) if golden is None else golden
        trials = [
            Trial(FLOOR, place, _inputs_of(inputs, place))
            for place in places
            if not place.sequence_parallel
        ]
        for method in methods:
            for place in places:
                if place.sequence_parallel and not method.is_ours:
                    continue
                trial = Trial(method.name, place, _inputs_of(inputs, place), method)
                trials.append(trial)
                _try(job, trial, method, Setup(backend, place=place), golden)
            save(_rows(trials))
        del golden
        _require_correct(trials)
        _time(job, trials, timer, repeats)
        if job.device.type == "cuda":
            for trial in _alive(trials):
                trial.cells |= _communication(job, trial, timer)
        rows = _rows(trials)
        save(rows)
        return rows


def _inputs_of(inputs: BenchInputs, place: Place) -> BenchInputs:
    hidden = inputs.hidden
    if place.sequence_parallel:
        hidden = hidden.chunk(place.size)[place.rank]
    return replace(inputs, hidden=hidden, weight=inputs.weight[place.rows])


def _try(job: Job, trial: Trial, method: Method, setup: Setup, golden: Gradients) -> None:
    """Measures a method's errors over all ranks, the largest peak, and the least and most kept.

    A method that fails on one rank counts as failed on all.
    """
    place = trial.place
    tokens = slice(None)
    if place.sequence_parallel:
        each = len(golden.hidden) // place.size
        tokens = slice(place.rank * each, (place.rank + 1) * each)
    mine = Gradients(golden.loss, golden.hidden[tokens], golden.weight[place.rows])
    norms = [float(grad.double().norm()) for grad in (mine.hidden, mine.weight)]
    cells: dict[str, float | None] = {}
    failed = ""
    try:
        function = method.build(setup)
        cells |= errors(gradients(function, trial.inputs), mine)
        variant = variant_of(function, trial.inputs, "loss+grad")
        cells["peak_extra_mib"] = peak_extra_bytes(variant, job.device) / 2**20
        if method.is_ours and job.device.type == "cuda":
            cells["kept"] = kept_share(function, trial.inputs, exchanges=True)
            if place.size > 1:
                cells["kept_alone"] = kept_share(function, trial.inputs, exchanges=False)
        trial.function = function
    except Exception as error:
        failed = describe_failure(error)
    everywhere = from_all(job, failed)
    failures = [f"rank {rank}: {reason}" for rank, reason in enumerate(everywhere) if reason]
    if failures:
        trial.failed, trial.function = failures[0], None
        recover(trial.name, trial.failed, job.device)
        return
    trial.cells |= _merged(from_all(job, cells), from_all(job, norms))


def _merged(
    cells: Sequence[dict[str, float | None]], norms: Sequence[list[float]]
) -> dict[str, float]:
    """Returns the cells of all ranks together.

    Args:
        cells: of each rank; its errors are relative to its part of the golden gradients.
        norms: of each rank's parts, in the order of GRADIENT_ERRORS.
    """
    columns = {
        name: [value for each in cells if (value := each.get(name)) is not None]
        for name in ("loss_error", "peak_extra_mib", *GRADIENT_ERRORS, "kept", "kept_alone")
    }
    merged = {name: max(columns[name]) for name in ("loss_error", "peak_extra_mib")}
    for name, parts in zip(GRADIENT_ERRORS, zip(*norms, strict=True), strict=True):
        off = [error * norm for error, norm in zip(columns[name], parts, strict=True)]
        merged[name] = math.hypot(*off) / math.hypot(*parts)
    for name in ("kept", "kept_alone"):
        if shares := columns[name]:
            merged |= {f"least_{name}": min(shares), f"most_{name}": max(shares)}
    return merged


def from_all(job: Job, value: T) -> list[T]:
    """Returns the value of every rank.

    Collectives: gathers pickled objects over all ranks of the job.
    """
    values: list[Any] = [None] * job.size
    dist.all_gather_object(values, value)
    return values


def _alive(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.name == FLOOR or trial.function is not None]


def _require_correct(trials: Sequence[Trial]) -> None:
    right = [trial for trial in _alive(trials) if trial.name == "dense"]
    for trial in _alive(trials) if right else ():
        if trial.method is not None and trial.method.is_ours:
            name = f"{trial.name} on {trial.place.size} ranks"
            require_correct(
                name,
                trial.cells,
                right[0].cells,
                worst_ratio=WORST_ERROR_RATIO,
                slack=ERROR_SLACK,
            )


def _variant(trial: Trial) -> Variant:
    if trial.name == FLOOR:
        return floor_variants(trial.inputs)[FLOOR, "loss"]
    assert trial.function is not None
    return variant_of(trial.function, trial.inputs, "loss+grad")


def _time(job: Job, trials: Sequence[Trial], timer: Timer, repeats: int) -> None:
    alive = dict(enumerate(_alive(trials)))
    variants = {key: _variant(trial) for key, trial in alive.items()}
    times = interleaved_times(variants, dict.fromkeys(alive, repeats), timer)
    everywhere = from_all(job, times)
    for key, trial in alive.items():
        slowest = [max(ranks) for ranks in zip(*(x[key] for x in everywhere), strict=True)]
        trial.cells |= percentiles_ms(slowest)


def _communication(job: Job, trial: Trial, timer: Timer) -> dict[str, float]:
    """Profiles one call; returns milliseconds of its communication.

    Returns:
        communication_ms: time of the collectives on the ranks that arrive last, which do not wait.
        exposed_ms: the part of it in which no other kernel of the rank runs.
        least_busy_ms, most_busy_ms: time of a rank's own kernels, least and most over the ranks.
    """
    from torch.profiler import ProfilerActivity, profile

    variant = _variant(trial)
    collectives: list[tuple[float, float]] = []
    busy = 0.0
    # The first profile only starts the profiler; the second counts.
    for _ in range(2):
        with variant.prepared() as call:
            dist.barrier()
            with profile(activities=[ProfilerActivity.CUDA]) as run:
                timer.start_ahead()
                call()
                synchronize(job.device)
        events = [x for x in run.events() or [] if x.device_type.name == "CUDA"]
        events.sort(key=lambda x: x.time_range.start)
        kernels = [x for x in events if not x.name.startswith("nccl:")]
        # The first collective is the timer's, at which all ranks start together.
        aligned = next(i for i, x in enumerate(kernels) if x.name.startswith("ncclDev"))
        kernels = kernels[aligned + 1 :]
        spans = [(x.time_range.start, x.time_range.end) for x in kernels]
        are_nccl = [x.name.startswith("ncclDev") for x in kernels]
        others = [span for span, is_nccl in zip(spans, are_nccl, strict=True) if not is_nccl]
        collectives = [
            (end - start, uncovered(start, end, others))
            for (start, end), is_nccl in zip(spans, are_nccl, strict=True)
            if is_nccl
        ]
        busy = sum(end - start for start, end in others)
    everywhere = from_all(job, (collectives, busy))
    # A collective's time begins with its rank's arrival. The last rank to arrive does not wait, so
    # the shortest time in a group is the collective's own.
    size = trial.place.size
    groups = [everywhere[first : first + size] for first in range(0, job.size, size)]
    last = [[min(ranks) for ranks in zip(*(x[0] for x in group), strict=True)] for group in groups]
    return {
        "communication_ms": max(sum(x[0] for x in group) for group in last) / 1e3,
        "exposed_ms": max(sum(x[1] for x in group) for group in last) / 1e3,
        "least_busy_ms": min(x[1] for x in everywhere) / 1e3,
        "most_busy_ms": max(x[1] for x in everywhere) / 1e3,
    }


def uncovered(start: float, end: float, others: Sequence[tuple[float, float]]) -> float:
    """Returns how much of [start, end] is covered by none of `others`, sorted by their starts."""
    total, at = 0.0, start
    for first, last in others:
        total += max(min(first, end) - at, 0.0)
        at = max(at, min(last, end))
    return total + max(end - at, 0.0)


def _rows(trials: Sequence[Trial]) -> list[Cells]:
    times = {
        (trial.name, trial.place.size): trial.cells.get("median_ms")
        for trial in trials
        if not trial.place.sequence_parallel
    }
    rows: list[Cells] = []
    for trial in trials:
        median, first = trial.cells.get("median_ms"), times.get((trial.name, 1))
        faster = None if median is None or first is None else first / median
        product = times.get((FLOOR, trial.place.size))
        cells = {name: trial.cells.get(name) for name in COLUMNS}
        rows.append(
            {
                "method": trial.name,
                "ranks": trial.place.size,
                "sequence_parallel": "yes" if trial.place.sequence_parallel else "",
                "times_faster": faster,
                "of_matmul": None if median is None or product is None else median / product,
                **cells,
                "failed": trial.failed,
            }
        )
    return rows
