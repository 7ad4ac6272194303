"""What test_megatron_pipeline.py checks of a model on two stages. Each raises if not so."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import megatron_patch
from megatron_patch import PatchError, PatchOptions
from megatron_patch.pipeline import stages as pipeline
from tests.megatron.megatron_head import Checks, changed, run_in
from tests.megatron.megatron_jobs import build, forward_step, make_config, wrap
from tests.megatron.megatron_setup import CLASSES, HIDDEN, SEQUENCE, Setup, destroy_others
from tests.megatron.pipeline.megatron_pipeline_refusals import CHECKS as OF_REFUSALS
from tests.megatron.pipeline.megatron_stages import OPTIONS, SETUP, is_last, make, schedule

CHECKS = check = Checks(OF_REFUSALS)
# By the other rank: reset, where it leaves unread what was sent to it.
ENDED = "[Cc]losed|[Cc]onnection reset"


def run_check(_: Any, name: str) -> None:
    # A step that one stage refuses has sent what nobody takes.
    run_in(SETUP, CHECKS[name], keeps=False)


@check
def weights_come_and_go() -> None:
    for tied in (False, True):
        setup = Setup(pp=2, tied=tied)
        theirs, ours = make(setup, ours=False), make(setup)
        weight = ours.output_layer.weight
        assert list(weight.shape) == [CLASSES // 2, HIDDEN] and weight.tensor_model_parallel
        found = megatron_patch.gather_output_weight(ours)
        if is_last():
            assert found is not None and torch.equal(found, theirs.output_layer.weight)
            found = found + 1
        before = weight.detach().clone()
        megatron_patch.scatter_output_weight(ours, found)
        assert torch.equal(ours.output_layer.weight, before + 1)
        if is_last():
            with pytest.raises(ValueError, match=r"weight must be \[96, 32\] on the last stage"):
                megatron_patch.scatter_output_weight(ours, before)
        with pytest.raises(PatchError, match="output layer over the pipeline, got GPTModel"):
            megatron_patch.gather_output_weight(theirs)


def saved(model: Any) -> dict[str, tuple[tuple[int, ...], list[Any]]]:
    """What a distributed checkpoint has of all ranks' model: a tensor's shape, and each part's
    offset, values and whether it is the copy that is written, by the tensor's key."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    parts = []
    for x in model.sharded_state_dict().values():
        if isinstance(x, ShardedTensor):
            assert x.data is not None
            part = x.global_offset, x.data.detach().clone(), is_main_replica(x.replica_id)
            parts.append((x.key, x.global_shape, part))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    found: dict[str, Any] = {}
    for key, shape, part in [each for of_rank in everyone for each in of_rank]:
        assert found.setdefault(key, (shape, []))[0] == shape, key
        found[key][1].append(part)
    return found


def whole(shape: tuple[int, ...], parts: list[Any]) -> torch.Tensor:
    values = torch.full(shape, float("nan"))
    for offset, data, is_written in parts:
        if is_written:
            # Layers are stacked: an axis before those of the data.
            axes = len(offset) - data.ndim
            slices = (slice(o, o + n) for o, n in zip(offset[axes:], data.shape, strict=True))
            at = (*offset[:axes], *slices)
            assert bool(values[at].isnan().all())
            values[at] = data
    return values


@check
def checkpoints_are_megatrons() -> None:
    for tied in (False, True):
        setup = Setup(pp=2, tied=tied)
        theirs, ours = (saved(make(setup, ours=patched)) for patched in (False, True))
        assert theirs.keys() == ours.keys()
        for key, (shape, parts) in theirs.items():
            assert ours[key][0] == shape
            assert torch.equal(whole(*ours[key]), whole(shape, parts)), key


@check
def remove_leaves_no_trace() -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import schedules

    owner = GPTModel.__mro__[1]
    before = [dict(vars(x)) for x in (GPTModel, owner, schedules)]
    megatron_patch.apply(**OPTIONS)
    megatron_patch.apply(**OPTIONS)
    found = megatron_patch.status()
    assert found.options == PatchOptions(**OPTIONS) and found.over_pipeline == ()
    model = build(SETUP, make_config(SETUP))[0]
    assert megatron_patch.status().over_pipeline == ("GPTModel",)
    with pytest.raises(PatchError, match=r"has been called with .* now with"):
        megatron_patch.apply()
    megatron_patch.remove()
    assert [dict(vars(x)) for x in (GPTModel, owner, schedules)] == before
    assert megatron_patch.status() == megatron_patch.Status(None, (), None, None)
    assert make(ours=False).state_dict().keys() != model.state_dict().keys() or is_last()
    # Who has its rows there already gets the schedule back, and another model's is Megatron's.
    megatron_patch.apply(model, **OPTIONS)
    for _ in range(2):
        assert bool(schedule(wrap(SETUP, model.config, [model])[0])) == is_last()
        with megatron_patch.patched():
            pass
        assert megatron_patch.status().over_pipeline == ("GPTModel",)
    theirs = make(ours=False)
    assert bool(schedule(wrap(SETUP, theirs.config, [theirs])[0])) == is_last()


class Timers:
    """As strict as Megatron's: what is started is stopped before it is started again."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.stopped: list[str] = []

    def __call__(self, name: str, log_level: int = 0) -> Any:
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        assert self._name not in self.running
        self.running.append(self._name)

    def stop(self, barrier: bool = False) -> None:
        self.running.remove(self._name)
        self.stopped.append(self._name)


@check
def an_existing_model() -> None:
    theirs, ours = make(ours=False), make(ours=False)
    expected = schedule(wrap(SETUP, theirs.config, [theirs])[0])
    megatron_patch.apply(ours, **OPTIONS)
    timers = Timers()
    with changed(ours.config, timers=timers):
        found = schedule(wrap(SETUP, ours.config, [ours])[0])
    assert timers.stopped.count("forward-compute") == (4 if is_last() else 2)
    assert timers.stopped[-1] == "forward-backward" and not timers.running
    assert [float(x["loss"]) for x in found] == pytest.approx([float(x["loss"]) for x in expected])


@check
def a_loss_that_is_changed_on_its_way() -> None:
    for change in (lambda losses: losses * 2, lambda losses: losses.mul_(2)):
        _change_losses(change)
        megatron_patch.remove()


def _change_losses(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = make()
    megatron_patch.apply(model, **OPTIONS)

    def changes(batches: Any, model: Any) -> Any:
        output, loss_func = forward_step(batches, model)
        return change(output) if is_last() else output, loss_func

    # The other stage waits no longer than its groups do.
    message = "must return the model's losses as the model" if is_last() else f"imed? ?out|{ENDED}"
    with (
        changed(pipeline, timeout_of=lambda *_: datetime.timedelta(seconds=2)),
        pytest.raises(PatchError if is_last() else RuntimeError, match=message),
    ):
        schedule(model, changes)
    with pytest.raises(RuntimeError, match="an earlier step failed and left ranks at"):
        schedule(model)


@check
def a_microbatch_of_another_shape() -> None:
    for what, message in (
        ("tokens", r"states of every microbatch must be \[16, 2, 32\] .*, by .* \[8, 2, 32\]"),
        ("dtype", r"\[16, 2, 32\] torch.float32, by .* pipeline_dtype, got .* torch.bfloat16"),
        ("labels", r"targets of every microbatch must be \[16, 2\] torch.int64, .* \[8, 2\]"),
    ):
        model = make()
        megatron_patch.apply(model, **OPTIONS)

        def shorter(batches: Any, model: Any, what: str = what) -> Any:
            batch = next(batches)
            names = {"tokens": tuple(batch), "labels": ("labels",)}.get(what, ())
            batch = batch | {name: batch[name][:, : SEQUENCE // 2] for name in names}
            output, loss_func = forward_step(iter([batch]), model)
            if what == "dtype" and not is_last():
                output = output.bfloat16()
            return output, loss_func

        told, before = is_last() == (what == "labels"), set(c10d._world.pg_map)
        with pytest.raises((RuntimeError, ValueError), match=message if told else ENDED):
            schedule(model, shorter)
        # The stage that is told ends its connections, as a process that ends does: the other one
        # waits for no timeout.
        megatron_patch.remove()
        del model
        destroy_others(before)


@check
def a_loss_function_that_writes_into_losses() -> None:
    def writes(batches: Any, model: Any) -> Any:
        batch = next(batches)
        output, loss_func = forward_step(iter([batch]), model)

        def masked(losses: torch.Tensor) -> Any:
            losses.mul_(2)
            losses[:, ::2] = 0
            return loss_func(losses)

        return output, masked

    found = []
    for patched in (False, True):
        model = make(ours=patched)
        if patched:
            megatron_patch.apply(model, **OPTIONS)
        (wrapped,) = wrap(SETUP, model.config, [model])
        losses = [float(x["loss"]) for x in schedule(wrapped, writes, forward_only=False)]
        found.append((losses, model.decoder.layers[0].mlp.linear_fc1.weight.main_grad.clone()))
    assert found[0][0] == pytest.approx(found[1][0]) and bool(found[0][0]) == is_last()
    torch.testing.assert_close(found[0][1], found[1][1])
    assert found[0][1].any()


@check
def rows_that_are_frozen_on_one_stage() -> None:
    model = make()
    megatron_patch.apply(model, **OPTIONS)
    model.output_layer.weight.requires_grad_(is_last())
    with pytest.raises(PatchError, match=r"frozen on the stages \[0\] alone"):
        schedule(model)
