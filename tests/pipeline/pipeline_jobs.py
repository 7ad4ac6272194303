"""What ranks of a pipeline do in test_pipelining, beside the same model in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist.backends.triton.launch import replay
from cce_dist.backends.triton.launch.steps import Recording
from cce_dist.pipeline.schedules.last_stage import LastStageLoss
from cce_dist.pipeline.warm_up import run_every_phase
from tests.pipeline.pipeline_promises import Promise
from tests.pipeline.pipeline_setup import (
    MICROBATCH,
    Model,
    Setup,
    arguments,
    grid_of,
    make_job,
    make_schedule,
    make_stages,
    require_close,
    shards,
    stage_indices,
)


def train(group: Any, setup: Setup, rel: float | None, steps: int = 2) -> dict[str, Any]:
    """Steps over pipeline ranks: each one's losses and gradients are those of one process.

    Args: rel: how near; None: as the project promises of 16 bits.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    job = make_job(group, setup)
    model, head, indices = job.model, job.head, [stage.stage_index for stage in job.stages]
    right, divisor = model.whole(setup), setup.microbatches if setup.scale_grads else 1
    promise = Promise(model, setup, divisor) if rel is None else None
    scaled = {key: value / divisor for key, value in right.items()} | {"losses": right["losses"]}
    of_schedule: list[Tensor] = []
    for _ in range(steps):
        for parameter in [p for block in model.blocks for p in block.parameters()]:
            parameter.grad = None
        head.weight.grad = None
        if head.bias is not None:
            head.bias.grad = None
        of_schedule.clear()
        job.step(of_schedule)
        found: dict[str, Tensor | None] = {"losses": job.losses}
        if of_schedule:
            assert torch.equal(torch.stack(of_schedule).detach(), found["losses"])  # pyright: ignore
        for index in indices:
            for name, parameter in model.blocks[index].named_parameters():
                if setup.sequence_parallel:
                    dist.all_reduce(parameter.grad, group=head.tensor_group)
                found[f"{index}.{name}"] = parameter.grad
        if rel is not None:
            require_close(found, scaled, rel)
        if promise is not None:
            promise.require("losses", found["losses"])  # pyright: ignore
            for index in indices:
                promise.require_block(index, found)
        shard = shards(setup.vocab_size, size)[rank]
        rows = slice(shard.start, shard.stop)
        owned = shard.stop - shard.start
        for name, parameter in (("weight", head.weight), ("bias", head.bias)):
            if parameter is not None:
                assert parameter.grad is not None
                assert not parameter.grad[owned:].any()
                grad = parameter.grad[:owned]
                if promise is not None:
                    promise.require(name, grad, rows)
                if rel is not None:
                    # Some ranks' rows may have next to no gradient: relative to the whole one's.
                    off = (grad - scaled[name][rows]).norm()
                    assert float(off) <= rel * float(scaled[name].norm()), (name, float(off))
    job.close()
    return {"losses": job.losses, "weight_grad": head.weight.grad}


def evaluate(group: Any, setup: Setup, rel: float = 1e-12) -> None:
    """`schedule.eval` makes no gradient, a step then does."""
    job = make_job(group, setup)
    right = job.model.whole(setup)
    job.evaluate()
    with job.serving(backward=False):
        job.schedule.eval(*job.args, **job.kwargs)
    require_close({"losses": job.losses}, right, rel)
    assert job.head.weight.grad is None
    job.step()
    assert job.head.weight.grad is not None
    require_close({"losses": job.losses}, right, rel)
    job.close()


def on_last_stage(group: Any, setup: Setup, rel: float, *, distils: bool = False) -> None:
    """The head on the last stage's ranks, which share its rows."""
    pipeline, tensor = grid_of(group, setup)
    rank, size = dist.get_rank(pipeline), dist.get_world_size(pipeline)
    model = Model.make(setup, size * setup.stages_of_a_rank)
    right = distilled_whole(model) if distils else model.whole(setup)
    stages = make_stages(setup, model, pipeline)
    every = shards(setup.vocab_size, setup.tensor)
    shard = every[0 if tensor is None else dist.get_rank(tensor)]
    rows = slice(shard.start, shard.stop)
    weight = nn.Parameter(model.weight[rows].clone())
    options: dict[str, Any] = {"vocab_shard": shard, "reduction": setup.options.reduction}
    if distils:
        options |= {"teacher": teacher_of, "teacher_weight": teacher_head(model)[rows], **DISTILS}
    loss = LastStageLoss(weight, group=tensor, **options)
    schedule = make_schedule(setup, stages, loss)
    args, kwargs = arguments(stages, model)
    if setup.schedule in ("zero_bubble", "zbv"):
        last = [stage for stage in stages if stage.is_last]
        if last:
            # Also if it has been called before, without a schedule.
            loss(model.x[:MICROBATCH], model.targets[:MICROBATCH])
            lost = "weight must be a parameter of the last stage's module under Schedule"
            with pytest.raises(ValueError, match=lost):
                schedule._compute_loss(model.x[:MICROBATCH], model.targets[:MICROBATCH])
            last[0].submod.register_parameter("head", weight)
            bias = nn.Parameter(torch.zeros(shard.num_rows))
            own, schedule._loss_fn = schedule._loss_fn, LastStageLoss(weight, bias=bias)
            with pytest.raises(ValueError, match=lost.replace("weight", "bias")):
                schedule._compute_loss(model.x[:MICROBATCH], model.targets[:MICROBATCH])
            schedule._loss_fn = own
    losses: list[Tensor] = []
    schedule.step(*args, losses=losses, **kwargs)
    found: dict[str, Tensor | None] = {}
    for index in stage_indices(setup, rank, size):
        for name, parameter in model.blocks[index].named_parameters():
            if parameter is not weight:
                found[f"{index}.{name}"] = parameter.grad
    if losses:
        found |= {"losses": torch.stack(losses).detach(), "weight": weight.grad}
    require_close(found, {**right, "weight": right["weight"][rows]}, rel)


DISTILS = {"temperature": 2.0, "alpha": 0.3}


def teacher_of(targets: Tensor) -> Tensor:
    assert not torch.is_grad_enabled()
    frequencies = torch.arange(1, 9, device=targets.device, dtype=torch.float64)
    return (targets[..., None] * frequencies).cos()


def teacher_head(model: Model) -> Tensor:
    return model.weight[:, :8].cos()


def distilled_whole(model: Model) -> dict[str, Tensor]:
    """As `Model.whole`, of a sum of each microbatch's distillation from `teacher_of`."""
    blocks, weight = copy.deepcopy(model.blocks), model.weight.clone().requires_grad_()
    T, alpha, losses = DISTILS["temperature"], DISTILS["alpha"], []
    for x, targets in zip(model.x.split(MICROBATCH), model.targets.split(MICROBATCH), strict=True):
        for block in blocks:
            x = block(x)
        with torch.no_grad():
            p = (teacher_of(targets) @ teacher_head(model).T / T).softmax(-1)
        z, counts = x @ weight.T, targets >= 0
        nll = -z.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        kl = (p * (p.log() - (z / T).log_softmax(-1))).sum(-1)
        loss = ((1 - alpha) * kl + alpha * nll)[counts].sum()
        loss.backward()
        losses.append(loss.detach())
    grads = {f"{i}.{n}": p.grad for i, b in enumerate(blocks) for n, p in b.named_parameters()}
    return {"losses": torch.stack(losses), "weight": weight.grad, **grads}  # pyright: ignore


def many_steps(group: Any, setup: Setup, steps: int) -> None:
    """Losses and gradients of every step are the first one's: no rank is ever behind or ahead."""
    job, first = make_job(group, setup), []
    for number in range(steps):
        job.head.weight.grad = None
        job.step()
        assert job.head.weight.grad is not None
        found = [job.losses, job.head.weight.grad]
        if number == 0 and setup.device == "cuda":
            continue  # it starts slowly
        first = first or found
        for a, b in zip(first, found, strict=True):
            assert torch.equal(a, b)
    job.close()


def evaluate_between(group: Any, setup: Setup) -> None:
    """Two steps and an evaluation between them: the same bits, and every gradient stays what it was
    in the latter."""
    job = make_job(group, setup)
    found: list[tuple[Tensor, ...]] = []
    mine = [job.head.weight, *(p for stage in job.stages for p in stage.submod.parameters())]
    for _ in range(2):
        for parameter in mine:
            parameter.grad = None
        job.step()
        grads = [p.grad for p in mine if p.grad is not None]
        assert len(grads) == len(mine)
        found.append((job.losses, *(x.clone() for x in grads)))
        job.evaluate()
        for one, other in zip((job.losses, *grads), found[-1], strict=True):
            assert torch.equal(one, other)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    job.close()


def play_from_the_start(group: Any, setup: Setup) -> int:
    """A warmed-up head's first steps and evaluations have no new kind of call: each is played.

    Returns: the number of kinds.
    """
    replay.forget_recordings()
    job = make_job(group, setup)
    run_every_phase(job.head)
    assert job.head.weight.grad is None and job.head.grads._rows is None
    warm = [dict(function.kinds) for function in replay._functions]
    job.step()
    job.evaluate()
    for function, before in zip(replay._functions, warm, strict=True):
        for kind in function.kinds:
            assert isinstance(before.get(kind), Recording), (function.__name__, kind)
    job.close()
    return sum(map(len, warm))
