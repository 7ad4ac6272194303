"""What ranks of a pipeline do in test_pipelining besides whole steps: mistakes, autocast."""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import LossOptions
from cce_dist.pipeline.head import PipelineHead
from cce_dist.pipeline.schedules import torch_schedules as pipelining
from cce_dist.pipeline.schedules.last_stage import LastStageLoss
from cce_dist.pipeline.schedules.torch_schedules import VocabOverPipeline
from cce_dist.pipeline.schedules.vocab_1f1b import ScheduleVocab1F1B
from tests.pipeline.pipeline_jobs import train
from tests.pipeline.pipeline_promises import BUGS
from tests.pipeline.pipeline_setup import (
    DIM,
    MICROBATCH,
    PLANNED,
    Model,
    Setup,
    arguments,
    make_head,
    make_job,
    make_schedule,
    make_served,
    make_stages,
    require_close,
    shards,
)


def _head(group: Any, **values: Any) -> PipelineHead:
    given: dict[str, Any] = {"group": group, "hidden_shape": (2, 5, DIM)}
    return PipelineHead(torch.randn(8, DIM), **(given | values))


def _hooked(group: Any) -> None:
    weight = torch.randn(8, DIM, requires_grad=True)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    PipelineHead(weight, group=group, hidden_shape=(2, 5, DIM))


MISTAKES: dict[str, tuple[str, Any]] = {
    "no group": ("group must be the pipeline's ranks, got None", lambda g: _head(None)),
    "hidden_shape": (
        r"hidden_shape must be \[..., D\] with D = 16 of weight, got \(2, 5, 3\)",
        lambda g: _head(g, hidden_shape=(2, 5, 3)),
    ),
    "reduction": (
        "options.reduction must be 'mean' or 'sum' under a schedule .*, got 'none'",
        lambda g: VocabOverPipeline(_head(g, options=LossOptions(reduction="none"))),
    ),
    "gradient": (
        "options.gradient is not supported over pipeline ranks, got 'in_forward'",
        lambda g: _head(g, options=LossOptions(gradient="in_forward")),
    ),
    "stats": (
        r"options.stats is not supported over pipeline ranks, got \('lse',\)",
        lambda g: _head(g, options=LossOptions(stats=("lse",))),
    ),
    "vocab_group": (
        "vocab_group must have as many ranks as group times tensor_group, 2 x 2, got 2",
        lambda g: _head(g, tensor_group=g),
    ),
    "sequence_parallel": (
        "sequence_parallel=True needs tensor_group, got None",
        lambda g: _head(g, sequence_parallel=True),
    ),
    "hooks": ("weight must have no gradient hooks", _hooked),
    "last stage's reduction": (
        "reduction must be 'mean' or 'sum' and stats empty",
        lambda g: LastStageLoss(torch.randn(8, DIM), reduction="none"),
    ),
    "last stage's grad_weight_into": (
        "grad_weight_into must be None",
        lambda g: LastStageLoss(torch.randn(8, DIM), grad_weight_into=torch.zeros(8, DIM)),
    ),
}


def mistake(group: Any, name: str) -> None:
    message, make = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        make(group)


def ids(group: Any) -> None:
    """Microbatches are known by numbers that need not be in order; wrong ones are refused."""
    setup = Setup(microbatches=2)
    model = Model.make(setup, 2)
    head = make_head(setup, model, group)
    rank, root = dist.get_rank(group), 1
    both = list(zip(model.x.split(MICROBATCH), model.targets.split(MICROBATCH), strict=True))
    given = dict(zip((7, 3), both, strict=True))
    for index, pair in given.items():
        head.post(index, root, *(pair if rank == root else ()))
    with pytest.raises(ValueError, match="that is not under way, got 7"):
        head.post(7, root, *both[0])
    for phase in (head.statistics, head.value, head.losses, head.take):
        with pytest.raises(ValueError, match="of a microbatch that is under way, got 0"):
            phase(0)
    # What ranks without the last stage have got, which nobody else holds.
    held = [weakref.ref(head._microbatches[index].posted[0]) for index in given]  # pyright: ignore
    for index in given:
        head.statistics(index)
    with pytest.raises(RuntimeError, match="called once a microbatch, got 7 again"):
        head.statistics(7)
    losses = [head.gradients(index, root) for index in given]
    assert rank == root or not any(ref() is not None for ref in held)
    head.take(7)
    with pytest.raises(RuntimeError, match=r"microbatches \[3\] were begun and not finished"):
        head.finish_step()
    head.take(3)
    head.finish_step()
    for loss, (x, targets) in zip(losses, both, strict=True):
        logits = (x @ model.weight.T).flatten(0, 1)
        expected = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        torch.testing.assert_close(loss, expected)
    head.close()


def fail_once(group: Any) -> None:
    """The last stage's rank gets a microbatch of another shape, and targets of none; a scaled
    loss is refused. Other ranks do not wait longer than their groups do."""
    rank = dist.get_rank(group)
    setup = Setup(microbatches=2)
    model = Model.make(setup, 2)
    head = make_head(setup, model, group, timeout=timedelta(seconds=2))
    loss = VocabOverPipeline(head)
    hidden, targets = model.x[:MICROBATCH], model.targets[:MICROBATCH]
    for wrong, message in (
        ((hidden[:, :3], targets[:, :3]), r"hidden of every microbatch must be \[2, 5, 16\]"),
        ((hidden.float(), targets), r"which the other ranks expect, got .* torch.float32"),
        ((hidden, targets[:1]), r"targets of every microbatch must be \[2, 5\] torch.int64"),
        ((hidden, targets.int()), r"got \[2, 5\] torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            head.post(0, rank, *wrong)
    with pytest.raises(RuntimeError, match="outside of `with loss"):
        loss(hidden, targets)
    unknown = "schedule must be one of torch"
    with pytest.raises(ValueError, match=unknown), loss.serving(object()):
        pass
    stages = make_stages(setup, model, group)
    schedule = make_schedule(setup, stages, loss)
    stages[0].has_backward = True  # as `schedule.step` says
    with loss.serving(schedule):
        for x, y in zip(model.x.split(MICROBATCH), model.targets.split(MICROBATCH), strict=True):
            # As if a microbatch had gone through this rank's stage.
            loss._server.forwarded()  # pyright: ignore
            if rank == 1:
                output = x.clone().requires_grad_()
                with pytest.raises(ValueError, match=r"as loss_fn returned it.* got 2\.0"):
                    (2 * loss(output, y)).backward()
    if rank == 1:
        # The other rank's broadcast then waits until its group's timeout.
        with pytest.raises(KeyError), loss.serving(schedule):
            raise KeyError
        # Of whoever runs the head's steps.
        for other in (loss, VocabOverPipeline(head)):
            left = pytest.raises(RuntimeError, match="an earlier step failed")
            with left, other.serving(schedule):
                pass
        with pytest.raises(RuntimeError, match="an earlier step failed"):
            ScheduleVocab1F1B(stages[0], 2, head).step()
    else:
        with pytest.raises(RuntimeError), loss.serving(schedule):
            pass
    head.close()


def go_on_after_failure(group: Any) -> None:
    """Every rank raises at once, and a tensor that was sent stays unreceived in the stages' group:
    a new head does not go on with the old stages, and new stages over a new group do."""
    ranks, timeout = dist.get_process_group_ranks(group), timedelta(seconds=5)
    job = make_job(dist.new_group(ranks), Setup(PLANNED), timeout=timeout)
    if job.kwargs:
        job.kwargs["target"] = job.kwargs["target"].clone()
        job.kwargs["target"][2 * MICROBATCH] = 999
    with pytest.raises(ValueError, match="targets must lie in"):
        job.step()
    job.head.close()
    head = make_head(job.setup, job.model, dist.new_group(ranks), timeout=timeout)
    schedule, _, _ = make_served(job.setup, job.stages, head)
    with pytest.raises(RuntimeError, match="make a new head and new stages over a new group"):
        schedule.step(*job.args, **job.kwargs)
    head.close()
    again = make_job(dist.new_group(ranks), job.setup, timeout=timeout)
    again.step()
    right = again.model.whole(again.setup)
    (stage,) = again.stages
    grads = {f"{stage.stage_index}.{k}": p.grad for k, p in stage.submod.named_parameters()}
    require_close({"losses": again.losses, **grads}, right, 1e-12)
    again.close()


def die(group: Any, setup: Setup, rank: int, phase: str, backward: bool = True) -> None:
    """Process `rank` is gone in a phase of the third microbatch, of a step or an evaluation that
    would have more; a tied embedding's phases are looked for first."""
    job = make_job(group, setup, timeout=timedelta(seconds=5))
    if dist.get_rank(group) == rank:
        dying: Any = job.embedding if hasattr(job.embedding, phase) else job.head
        as_it_was = getattr(dying, phase)

        def run(index: int, *args: Any, **kwargs: Any) -> Any:
            if index == 2:
                os._exit(1)
            return as_it_was(index, *args, **kwargs)

        setattr(dying, phase, run)
    with job.serving(backward=backward):
        (job.schedule.step if backward else job.schedule.eval)(*job.args, **job.kwargs)


def phases_under_autocast(group: Any) -> None:
    """fp32 products stay fp32's: the same bits as without."""
    setup = Setup(microbatches=2, dtype=torch.float32)
    model = Model.make(setup, 2)
    head = make_head(setup, model, group)
    rank, root = dist.get_rank(group), 1
    given = (model.x[:MICROBATCH], model.targets[:MICROBATCH]) if rank == root else ()
    found = []
    for autocast in (False, True):
        head.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            head.post(0, root, *given)
            head.statistics(0)
            loss = head.gradients(0, root)
            grad = head.take(0)
            head.finish_step()
        # Elsewhere the gradient is nothing of use.
        found.append((loss, grad if rank == root else loss, head.weight.grad))
    for plain, cast in zip(*found, strict=True):
        assert plain is not None and cast is not None and torch.equal(plain, cast)
    head.close()


class ByKeyword(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *, x: Tensor) -> Tensor:
        return self.module(x)


def inputs_by_keyword(group: Any, setup: Setup) -> None:
    """Which torch does not compare with a stage's input_args."""
    job = make_job(group, setup)
    if job.args:
        (job.kwargs["x"],), job.args = job.args, ()
        (first,) = (stage for stage in job.stages if stage.is_first)
        first.submod = ByKeyword(first.submod)
    job.step()
    require_close({"losses": job.losses}, job.model.whole(setup), 1e-12)
    job.close()


def fail_before_the_thread(group: Any) -> None:
    """What has failed is said, not that there is no thread to wait for."""
    setup = Setup(microbatches=2)
    model = Model.make(setup, 2)
    head = make_head(setup, model, group, timeout=timedelta(seconds=2))
    loss = VocabOverPipeline(head)
    schedule = make_schedule(setup, make_stages(setup, model, group), loss)
    with (
        mock.patch.object(pipelining, "connect_stages", side_effect=KeyError("planted")),
        pytest.raises(KeyError, match="planted"),
        loss.serving(schedule),
    ):
        pass
    head.close()


def mix_up(group: Any) -> None:
    """An evaluation in a step's context, which would add to gradients; each rank says so."""
    setup = Setup("gpipe", microbatches=1)
    model = Model.make(setup, 2)
    stages = make_stages(setup, model, group)
    head = make_head(setup, model, group, timeout=timedelta(seconds=2))
    loss = VocabOverPipeline(head)
    schedule = make_schedule(setup, stages, loss)
    args, kwargs = arguments(stages, model)
    wrong = r"serving\(schedule, backward=True\) must be around schedule.step, got the other"
    with pytest.raises(RuntimeError, match=wrong), loss.serving(schedule), torch.no_grad():
        schedule.eval(*args, **kwargs)
    assert head.weight.grad is None


def class_weights(group: Any) -> None:
    """Beside torch's own loss, with label smoothing: each class's weight counts twice then."""
    setup = Setup(dtype=torch.float64, options=LossOptions(reduction="sum", label_smoothing=0.1))
    model = Model.make(setup, 2)
    factors = torch.rand(setup.vocab_size, dtype=torch.float64)
    head = make_head(setup, model, group, class_weight=factors)
    rank, root = dist.get_rank(group), 1
    hidden, targets = model.x[:MICROBATCH], model.targets[:MICROBATCH]
    head.post(0, root, *((hidden, targets) if rank == root else ()))
    head.statistics(0)
    loss, grad = head.gradients(0, root), head.take(0)
    head.finish_step()
    hidden, whole = hidden.clone().requires_grad_(), model.weight.clone().requires_grad_()
    z = (hidden @ whole.T).flatten(0, 1)
    right = F.cross_entropy(
        z, targets.flatten(), weight=factors, reduction="sum", label_smoothing=0.1
    )
    right.backward()
    torch.testing.assert_close(loss, right.detach())
    if rank == root:
        torch.testing.assert_close(grad, hidden.grad)
    shard = shards(setup.vocab_size, 2)[rank]
    assert head.weight.grad is not None and whole.grad is not None
    rows = whole.grad[shard.start : shard.stop]
    torch.testing.assert_close(head.weight.grad[: len(rows)], rows)
    head.close()


def train_wrongly(group: Any, setup: Setup, bug: str) -> None:
    """Every rank is told that it breaks the promise of 16 bits, which it keeps without the bug."""
    train(group, setup, None, 1)
    with BUGS[bug](), pytest.raises(AssertionError, match=r"promise|gate"):
        train(group, setup, None, 1)
