"""The best plan of a job, a comparison with other jobs, and changes with which a job fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import NamedTuple

from cce_dist.planner.cost.hardware import GIB, Hardware
from cce_dist.planner.cost.job import OURS, Job
from cce_dist.planner.cost.stages import Costs, costs_of
from cce_dist.planner.models.model import Model
from cce_dist.planner.orders.schedules import Schedule

from .layouts import best_layout, fits_somehow, peak_of
from .plan import Plan, schedule_of


def best_plan(model: Model, job: Job, hardware: Hardware) -> Plan:
    """Returns the plan of the best layout; if none fits, the plan that needs the least memory.

    Raises:
        ValueError: as `make_plan`.
    """
    costs = costs_of(model, job, hardware)
    return best_layout(costs, schedule_of(costs))


def largest_microbatch(plan: Plan) -> int:
    """Returns the sequences of the largest microbatch with which this layout fits; 0: none fits."""

    def fits(count: int) -> bool:
        costs = costs_of(plan.model, replace(plan.job, microbatch=count), plan.hardware)
        return peak_of(costs, plan.prediction.schedule, plan.layout) <= plan.hardware.room

    return _largest(fits, _least_microbatch(plan.job))


def largest_of_layouts(
    model: Model, job: Job, hardware: Hardware, *, below: int | None = None
) -> int:
    """Returns the sequences of the largest microbatch with which any layout fits; 0: none fits.

    Args:
        below: a size that does not fit; only smaller sizes are tried.
    """

    def fits(count: int) -> bool:
        costs = costs_of(model, replace(job, microbatch=count), hardware)
        return fits_somehow(costs, held_schedule(costs))

    return _largest(fits, _least_microbatch(job), below)


def held_schedule(costs: Costs) -> Schedule:
    """Returns a schedule that holds as many microbatches at once as the job's.

    The planned order is slow to compute, so it gets only the microbatches that fill the pipeline.
    """
    job = costs.job
    if job.schedule_name == "vocab":
        job = replace(job, microbatches=min(job.microbatches, 2 * job.pp + 8))
    return schedule_of(replace(costs, job=job))


def _least_microbatch(job: Job) -> int:
    """Returns the divisor of all microbatch sizes: tensor-parallel ranks share the tokens."""
    return job.tp // gcd(job.sequence // job.cp, job.tp) if job.sequence_parallel else 1


def _largest(fits: Callable[[int], bool], step: int, below: int | None = None) -> int:
    """Returns the largest multiple of `step` that fits, if all smaller multiples fit; 0: none."""
    if not fits(step) or (below is not None and below <= step):
        return 0
    least, most = 1, 2
    if below is not None:
        most = -(-below // step)
    else:
        while fits(step * most) and most < 2**20:
            least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(step * middle) else (least, middle)
    return step * least


@dataclass(frozen=True)
class Pays:
    """A comparison of two places of the same loss: the last stage, and all pipeline ranks."""

    last: Plan  # the best plan with the loss on the last stage
    # The best plan with the vocabulary over the pipeline ranks, under the job's schedule if that
    # keeps the vocabulary there, else in the planned order.
    over: Plan
    verdict: str  # a sentence that starts with yes or no
    planned: Plan | None = None  # the best plan in the planned order, if `over` is another

    @property
    def speedup(self) -> float:
        return self.last.seconds / self.over.seconds


def over_pipeline(job: Job) -> Job:
    """Returns the job with our loss over all pipeline (and tensor-parallel) ranks, in the planned
    order."""
    loss = job.loss if job.loss in OURS else "filtered"
    over = job.vocab_over if job.is_over_ranks else "pp-tp" if job.tp > 1 else "pp"
    return replace(job, loss=loss, vocab_over=over, schedule="auto", chunks=1)


def on_last_stage(job: Job) -> Job:
    """Returns the job with our loss on the last stage."""
    loss = job.loss if job.loss in OURS else "filtered"
    schedule = job.schedule
    if job.schedule_name == "vocab":
        # torch's 1F1B needs at least as many microbatches as stages.
        few = job.software.framework == "torch" and job.microbatches < job.pp
        schedule = "gpipe" if few else "auto"
    return replace(job, loss=loss, vocab_over="last", schedule=schedule)


def vocab_pays(
    model: Model, job: Job, hardware: Hardware, *, best: Plan | None = None
) -> Pays | None:
    """Compares the head's places; None: there is one pipeline rank, or no loss.

    Args:
        best: the job's own best plan, if it is known, so that it is not searched again.
    """
    if job.pp == 1 or job.loss == "none":
        return None

    def best_of(candidate: Job) -> Plan:
        if best is not None and best.job == candidate:
            return best
        return best_plan(model, candidate, hardware)

    last, planned = best_of(on_last_stage(job)), best_of(over_pipeline(job))
    if job.is_served:
        over_ranks = best_of(job)
        return Pays(last, over_ranks, verdict_on(over_ranks, last), planned)
    return Pays(last, planned, verdict_on(planned, last))


def verdict_on(new: Plan, old: Plan) -> str:
    """Compares a plan with an older plan, in a sentence that starts with yes or no."""
    ratio = old.seconds / new.seconds
    memory = f"{new.peak / GIB:.1f} GiB at the most instead of {old.peak / GIB:.1f}"
    if not new.fits and not old.fits:
        return f"no: neither fits, {memory}, of {new.hardware.room / GIB:.1f}"
    if new.fits and not old.fits:
        return f"yes: it fits, {memory}"
    if old.fits and not new.fits:
        return f"no: it does not fit, {memory}"
    if ratio >= 1.01:
        return f"yes: {ratio:.2f} times as fast, {memory}"
    if ratio > 0.99:
        return f"no: as fast within 1 %, {memory}"
    return f"no: {ratio:.2f} times as fast, {memory}"


class Advice(NamedTuple):
    """Advice on a job that does not fit."""

    fits: str | None  # flags with which the job fits; None: no change that was tried is enough
    tried: str  # the flags of all changes together; "": one of them was enough


def nearest_that_fits(
    model: Model, job: Job, hardware: Hardware, layout: Sequence[int] | None = None
) -> Advice:
    """Finds the first change that is enough for the job to fit.

    It tries the best layout, if another was requested; a smaller microbatch; then those of
    `_changes`, each on top of the changes before it.

    Args:
        layout: the requested layout; None: the best.
    """
    instead = ""
    if layout is not None:
        best = best_plan(model, job, hardware)
        if best.fits:
            return Advice(f"--layout {','.join(map(str, best.layout))}", "")
        instead = ", without --layout"
    smaller = largest_of_layouts(model, job, hardware, below=job.microbatch)
    if smaller:
        return Advice(f"--microbatch {smaller}{instead}", "")
    last = job
    for change in _changes(job):
        try:
            changed = change(last)
            costs = costs_of(model, changed, hardware)
            last = changed
            if fits_somehow(costs, held_schedule(costs)):
                return Advice(_flags_of(job, changed) + instead, "")
        except ValueError:
            continue  # the model cannot be cut like this
    return Advice(None, _flags_of(job, last) or "no change")


def _changes(job: Job) -> Iterator[Callable[[Job], Job]]:
    """Yields changes to try, in order: the optimizer over data-parallel ranks, the smallest
    microbatch, full recompute, sequence parallelism, then more ranks."""
    if job.dp * job.cp > 1:
        yield partial(replace, distributed_optimizer=True)
    yield partial(replace, microbatch=_least_microbatch(job))
    yield partial(replace, recompute="full")
    if job.tp > 1:
        yield partial(replace, sequence_parallel=True)
    for name, most in (("tp", 8), ("pp", 128), ("cp", 16)):
        count = getattr(job, name)
        while count < most:
            count *= 2
            yield partial(replace, **{name: count})  # pyright: ignore
        if name == "tp":
            yield partial(replace, sequence_parallel=count > 1)


def _flags_of(job: Job, changed: Job) -> str:
    """Returns the command's flags that turn `job` into `changed`."""
    changes = {key: value for key, value in vars(changed).items() if value != getattr(job, key)}
    flags = (key if value is True else f"{key} {value}" for key, value in changes.items())
    return " ".join(f"--{flag.replace('_', '-')}" for flag in flags)
