"""Models, schedules and calls that the patch refuses with the vocabulary over the pipeline."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import megatron_patch
from megatron_patch import PatchError, PatchOptions
from tests.megatron.megatron_head import Checks, changed
from tests.megatron.megatron_jobs import microbatch, wrap
from tests.megatron.megatron_setup import BATCH, CLASSES, HIDDEN, SEQUENCE, Setup
from tests.megatron.pipeline.megatron_stages import OPTIONS, SETUP, is_last, make, schedule

CHECKS = check = Checks()


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
        refused(model, rf"Mine overrides {name} by .*megatron_pipeline_refusals.code.*other \(")
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
        pytest.raises(
            PatchError, match=rf"{name} must be Megatron's own .*, got .* \(.*\.py:\d+\)"
        ),
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
    with pytest.raises(PatchError, match=r"output_layer of the model was replaced after apply\(\)"):
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
def another_release() -> None:
    from megatron.core.pipeline_parallel import schedules

    def forward_step(step: Any, *, more: Any = None) -> None: ...

    with (
        changed(schedules, forward_step=forward_step),
        pytest.raises(
            PatchError,
            match=r"schedules.forward_step must take \(forward_step_func, .* got \(step, more\) ",
        ),
    ):
        megatron_patch.apply(**OPTIONS)
    assert megatron_patch.status().options is None
