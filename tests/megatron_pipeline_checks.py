"""What tests/test_megatron_pipeline.py checks of a model on two stages. Each raises if not so."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_checks import changed
from megatron_jobs import (
    BATCH,
    CLASSES,
    HIDDEN,
    SEQUENCE,
    Setup,
    build,
    forward_step,
    make_config,
    megatron,
    microbatch,
    wrap,
)

import megatron_patch
from megatron_patch import PatchError, PatchOptions, pipeline

SETUP = Setup(pp=2)
OPTIONS: dict[str, Any] = {"vocab_over_pipeline": True, "gradient": "exact", "backend": "torch"}
Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def run_check(_: Any, name: str) -> None:
    with megatron(SETUP):
        try:
            CHECKS[name]()
        finally:
            megatron_patch.remove()


def make(setup: Setup = SETUP, *, ours: bool = True) -> Any:
    with megatron_patch.patched(**OPTIONS) if ours else nullcontext():
        return build(setup, make_config(setup))[0]


def is_last() -> bool:
    return dist.get_rank() == 1


def schedule(model: Any, step: Any = forward_step, **given: Any) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([microbatch(i, SETUP) for i in range(2)]),
        model=[model],
        **{
            "num_microbatches": 2,
            "seq_length": SEQUENCE,
            "micro_batch_size": BATCH,
            "forward_only": True,
            **given,
        },
    )


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
    assert bool(schedule(wrap(SETUP, model.config, [model])[0])) == is_last()
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
def models_that_are_refused() -> None:
    model = make(ours=False)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("drop --mtp-num-layers", {"mtp_num_layers": 1}),
        ("drop --variable-seq-lengths", {"variable_seq_lengths": True}),
        ("drop --num-layers-per-virtual", {"virtual_pipeline_model_parallel_size": 2}),
        (
            "activation-checkpoints",
            {"num_microbatches_with_partial_activation_checkpoints": 1},
        ),
    ]
    for message, values in wrong:
        with changed(model.config, **values), pytest.raises(PatchError, match=message):
            megatron_patch.apply(model, **OPTIONS)
    with (
        changed(model, vocab_size=97),
        pytest.raises(PatchError, match=r"97 rows does not divide by pp \* tp = 2"),
    ):
        megatron_patch.apply(model, **OPTIONS)
    # One stage's reason is every stage's error.
    if is_last():
        model.output_layer.bias = torch.nn.Parameter(torch.zeros(CLASSES))
    with pytest.raises(PatchError, match="over the pipeline: output_layer has a bias"):
        megatron_patch.apply(model, **OPTIONS)
    if is_last():
        model.output_layer.bias = None
    wrapped = wrap(SETUP, model.config, [model])
    with pytest.raises(PatchError, match="apply the patch before DDP"):
        megatron_patch.apply(wrapped, **OPTIONS)
    for name in ("keep_logits", "check_ranks"):
        with pytest.raises(ValueError, match=f"{name} is not supported with vocab_over_pipeline"):
            PatchOptions(**{**OPTIONS, name: True})
    assert megatron_patch.status() == megatron_patch.Status(None, (), None, None)


@check
def code_that_is_not_megatrons() -> None:
    """One stage's reason is every stage's error, before anything is changed."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    def other(self: Any, *_: Any, **__: Any) -> Any: ...

    def refused(model: Any, message: str) -> None:
        with pytest.raises(PatchError, match=message):
            megatron_patch.apply(model, **OPTIONS)
        assert megatron_patch.status().over_pipeline == ()

    for setup, name in (
        (SETUP, "compute_language_model_loss"),
        (Setup(pp=2, tied=True), "shared_embedding_or_output_weight"),
        (Setup(pp=2, tied=True), "tie_embeddings_and_output_weights_state_dict"),
    ):
        model = make(setup, ours=False)
        model.__class__ = type("Mine", (type(model),), {name: other})
        refused(model, rf"Mine overrides {name} by megatron_pipeline_checks.code.*other \(")
    model = make(ours=False)
    if is_last():
        handle = model.output_layer.register_forward_pre_hook(other)
    refused(model, "output_layer has the forward pre-hook .*other")
    if is_last():
        handle.remove()
    cross_entropy = tensor_parallel.vocab_parallel_cross_entropy

    def larger(*given: Any, **named: Any) -> torch.Tensor:
        return cross_entropy(*given, **named) * 1.01

    with changed(tensor_parallel, vocab_parallel_cross_entropy=larger):
        refused(model, "is not the cross-entropy of its logits")
    tied = make(Setup(pp=2, tied=True), ours=False)
    if not is_last():
        words = tied.embedding.word_embeddings
        handle = words.register_forward_hook(other)
    refused(tied, "word_embeddings has the hook .*other")
    if not is_last():
        handle.remove()
        words.__class__ = type("Scaled", (VocabParallelEmbedding,), {})
    refused(tied, "word_embeddings is a Scaled")


@check
def code_that_is_not_megatrons_once_it_is_patched() -> None:
    def hook(*_: Any) -> None: ...

    model = make()
    megatron_patch.apply(model, **OPTIONS)
    rows, own = model.output_layer, type(model)
    for register, message in (
        (rows.register_forward_hook, "has the forward hook .*hook"),
        (rows.register_full_backward_hook, "has the backward hook .*hook"),
    ):
        handle = register(hook)
        with pytest.raises(PatchError, match=f"vocab_over_pipeline: output_layer {message}"):
            schedule(model)
        handle.remove()
    model.__class__ = type("Mine", (own,), {"compute_language_model_loss": hook})
    with pytest.raises(PatchError, match="Mine overrides compute_language_model_loss"):
        schedule(model)
    model.__class__ = own
    with (
        changed(rows, forward=hook),
        pytest.raises(PatchError, match=r"forward of output_layer is replaced, by .*hook"),
    ):
        schedule(model)
    assert bool(schedule(model)) == is_last()


@check
def a_schedule_that_is_not_megatrons() -> None:
    from megatron.core.pipeline_parallel import schedules

    name = "forward_backward_pipelining_without_interleaving"
    own = getattr(schedules, name)

    @functools.wraps(own)
    def theirs(*args: Any, **given: Any) -> Any:
        return own(*args, **given)

    with (
        changed(schedules, **{name: theirs}),
        pytest.raises(PatchError, match=rf"{name} is .* \(.*\.py:\d+\), not Megatron's own in"),
    ):
        megatron_patch.apply(**OPTIONS)
    assert megatron_patch.status().options is None


@check
def calls_that_are_refused() -> None:
    model = make()
    megatron_patch.apply(model, **OPTIONS)
    with pytest.raises(PatchError, match="collect_non_loss_data=True: logits are asked for"):
        schedule(model, collect_non_loss_data=True)
    with pytest.raises(PatchError, match="adjust_tensor_shapes_fn"):
        schedule(model, adjust_tensor_shapes_fn=lambda *_: None)
    rows = model.output_layer
    model.output_layer = torch.nn.Sequential(rows)
    with pytest.raises(PatchError, match="output_layer of the model has been replaced since"):
        schedule(model)
    model.output_layer = rows
    batch = microbatch(0, SETUP)
    if is_last():
        model.set_input_tensor(torch.randn(SEQUENCE, BATCH, HIDDEN))
        given = batch["tokens"], batch["tokens"], None
        with pytest.raises(PatchError, match="logits are asked for, but with vocab_over_pipeline"):
            model(*given)
        model.set_input_tensor(torch.randn(SEQUENCE, BATCH, HIDDEN))
        with pytest.raises(PatchError, match="outside of get_forward_backward_func's function"):
            model(*given, labels=batch["labels"])


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
    message = "must return the model's losses as the model" if is_last() else "imed? ?out|clos"
    with (
        changed(pipeline, timeout_of=lambda *_: datetime.timedelta(seconds=2)),
        pytest.raises(PatchError if is_last() else RuntimeError, match=message),
    ):
        schedule(model, changes)
    with pytest.raises(RuntimeError, match="an earlier step failed and left ranks apart"):
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

        told = is_last() == (what == "labels")
        waits = "imed? ?out|clos"
        with (
            changed(pipeline, timeout_of=lambda *_: datetime.timedelta(seconds=2)),
            pytest.raises((RuntimeError, ValueError), match=message if told else waits),
        ):
            schedule(model, shorter)
        megatron_patch.remove()


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


@check
def another_release() -> None:
    from megatron.core.pipeline_parallel import schedules

    def forward_step(step: Any, *, more: Any = None) -> None: ...

    with (
        changed(schedules, forward_step=forward_step),
        pytest.raises(
            PatchError,
            match=r"schedules.forward_step must take \(forward_step_func, .* found \(step, more\) ",
        ),
    ):
        megatron_patch.apply(**OPTIONS)
    assert megatron_patch.status().options is None
