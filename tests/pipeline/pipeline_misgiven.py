"""Steps of a pipeline that are given what they must not be; see test_pipelining_misgiven."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist.pipeline.schedules import torch_schedules as pipelining
from cce_dist.pipeline.schedules import vocab_1f1b as planned
from tests.pipeline.pipeline_setup import Job, Model, Setup, make_head, make_job

# Of the stages' group and the head's: a rank that is told nothing waits no longer.
TIMEOUT = timedelta(seconds=2)
FIRST, LAST = "first", "last"


def grow(job: Job, rows: int) -> None:
    """The batch, by this many of its rows."""
    job.args = tuple(torch.cat([x, x[:rows]]) for x in job.args)
    job.kwargs = {key: torch.cat([x, x[:rows]]) for key, x in job.kwargs.items()}


class Failing(nn.Module):
    """A stage of the user's that fails at its third microbatch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise KeyError("the user's own")
        return self.module(x)


def another_batch(job: Job) -> None:
    grow(job, job.setup.microbatches)
    job.step()


def another_batch_later(job: Job) -> None:
    job.step()
    grow(job, job.setup.microbatches)
    job.step()


def uneven_batch(job: Job) -> None:
    grow(job, 3)
    job.step()


def no_target(job: Job) -> None:
    job.kwargs = {}
    job.step()


def targets_of_another_dtype(job: Job) -> None:
    job.kwargs = {key: x.int() for key, x in job.kwargs.items()}
    job.step()


def tokens_by_keyword(job: Job) -> None:
    if job.args:
        job.kwargs["tokens"], job.args = job.args[0], ()
    job.step()


def loss_kwargs(job: Job) -> None:
    loss_fn = job.schedule._loss_fn
    job.schedule._loss_fn = lambda output, target: loss_fn(output, target, softcap=5.0)
    job.step()


def autocast(job: Job) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        job.step()


def autocast_of_the_last_stage(job: Job) -> None:
    for stage in job.stages:
        if stage.is_last:
            stage.submod.forward = torch.autocast("cpu", torch.bfloat16)(stage.submod.forward)
    job.step()


def two_steps(job: Job) -> None:
    with job.serving():
        for _ in range(2):
            job.schedule.step(*job.args, **job.kwargs)


def no_step(job: Job) -> None:
    with job.serving():
        pass


def unknown_inference(job: Job) -> None:
    """As of a torch whose names for it are others."""

    def nothing(*_: Any) -> Any:
        return contextlib.nullcontext()

    with (
        mock.patch.object(pipelining, "without_dry_run", nothing),
        mock.patch.object(planned, "without_dry_run", nothing),
    ):
        job.step()


def failing_stage(job: Job) -> None:
    if job.kwargs:
        stage = next(stage for stage in job.stages if stage.is_last)
        stage.submod = Failing(stage.submod)
    job.step()


@dataclass(frozen=True)
class Wrong:
    """What a step is given, who is told, and of what; the others only wait for them."""

    run: Callable[[Job], None]
    told: dict[str, str]  # by "first" and "last" stage
    setup: Setup = Setup()  # noqa: RUF009 - frozen
    kind: str = "ValueError"


TARGETS = r"targets of every microbatch must be \[2, 5\] torch.int64, .*got \[3, 5\] torch.int64"
INPUTS = r"must have one shape, \[\[2, 5, 16\]\], .* got \[\[3, 5, 16\]\] in microbatch 0; pad"
OUTPUTS = (
    r"the output of stage 0 must be \[2, 5, 16\] torch.float64, as the next "
    r"stage expects of every microbatch, got \[3, 5, 16\] torch.float64; pad"
)
WRONG: dict[str, Wrong] = {
    "another batch": Wrong(another_batch, {FIRST: INPUTS, LAST: TARGETS}),
    "another batch later": Wrong(
        another_batch_later, {FIRST: OUTPUTS, LAST: TARGETS}, Setup(static=False)
    ),
    "uneven batch": Wrong(
        uneven_batch,
        {FIRST: r"\[\[3, 5, 16\]\], .*got \[\[2, 5, 16\]\] in microbatch 3", LAST: TARGETS},
        Setup(static=False),
    ),
    "no target": Wrong(no_target, {LAST: "target must be given to the schedule .*, got None"}),
    "targets of another dtype": Wrong(
        targets_of_another_dtype, {LAST: r"torch.int64, .* got \[2, 5\] torch.int32"}
    ),
    "tokens by keyword": Wrong(
        tokens_by_keyword, {FIRST: "tokens must be the first positional"}, Setup(tied=True)
    ),
    "loss_kwargs": Wrong(loss_kwargs, {LAST: r"loss_kwargs must be empty, got \['softcap'\]"}),
    # Else the next stage's buffers would keep in part what they had.
    "autocast": Wrong(
        autocast,
        {FIRST: r"5, 16\] torch.float32, .* got .* torch.bfloat16; give the stages output_args"},
        Setup(dtype=torch.float32),
    ),
    "autocast of the last stage": Wrong(
        autocast_of_the_last_stage,
        {LAST: "torch.bfloat16; the last stage's output, .* must have weight's dtype"},
        Setup(dtype=torch.float32),
    ),
    "unknown inference": Wrong(
        unknown_inference,
        {LAST: "loss_fn was called 1 times, for 0 of 8 microbatches .*give every stage input_args"},
        Setup(static=False),
        kind="RuntimeError",
    ),
    # By torch, from the user's KeyError.
    "failing stage": Wrong(failing_stage, {LAST: "failed to run forward"}, kind="RuntimeError"),
    "two steps": Wrong(
        two_steps,
        dict.fromkeys((FIRST, LAST), "must be around one step or eval, got a second"),
        kind="RuntimeError",
    ),
    "no step": Wrong(
        no_step,
        dict.fromkeys((FIRST, LAST), "must be around one step or eval, got none"),
        kind="RuntimeError",
    ),
}


def misgiven(group: Any, name: str, schedule: str) -> dict[str, Any]:
    """Returns: of which stages this rank is, and what it raised."""
    own = dist.new_group(dist.get_process_group_ranks(group), timeout=TIMEOUT)
    found = run_misgiven(own, WRONG[name], schedule)
    # Who is told ends its connections, as a process that ends does: a peer that waits learns of it.
    dist.destroy_process_group(own)
    del own
    gc.collect()
    return found


def run_misgiven(own: Any, wrong: Wrong, schedule: str) -> dict[str, Any]:
    job = make_job(own, replace(wrong.setup, schedule=schedule), timeout=TIMEOUT)
    place = {FIRST: bool(job.args), LAST: bool(job.kwargs)}
    error: BaseException | None = None
    try:
        wrong.run(job)
    except Exception as found:
        error = found
    job.close()
    cause = None if error is None else error.__cause__
    return {
        **place,
        "error": str(error),
        "kind": type(error).__name__,
        "cause": type(cause).__name__,
    }


def other_heads(group: Any, **of_the_last: Any) -> str:
    """The last rank makes another head than the others."""
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    setup = Setup("1f1b")
    model = Model.make(setup, dist.get_world_size(group))
    if last and "options" in of_the_last:
        setup = replace(setup, options=of_the_last.pop("options"))
    try:
        make_head(setup, model, group, timeout=TIMEOUT, **(of_the_last if last else {})).close()
    except ValueError as error:
        return str(error)
    return ""


def other_numbers(group: Any, schedule: str, tensor: int) -> str:
    """Ranks have different numbers of microbatches."""
    fewer = dist.get_rank(group) % 2 == 0
    setup = Setup(schedule, microbatches=6 if fewer else 8, tensor=tensor)
    job = make_job(group, setup, timeout=TIMEOUT)
    try:
        job.step()
    except ValueError as error:
        return str(error)
    finally:
        job.close()
    return ""
