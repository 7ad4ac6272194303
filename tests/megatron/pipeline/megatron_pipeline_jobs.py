"""Pretraining with the vocabulary over Megatron's pipeline, beside Megatron's own schedule."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import megatron_patch
from tests.megatron.megatron_jobs import (
    build,
    forward_step,
    grads_of,
    make_config,
    microbatch,
    wrap,
)
from tests.megatron.megatron_setup import BATCH, SEQUENCE, Setup, megatron

ROWS = "0.output_layer.weight"
LOSS_SCALE = 128.0  # of 16-bit jobs


def pretrain(
    setup: Setup, patch: dict[str, Any] | None, initial: dict[str, Tensor] | None = None
) -> dict[str, Any]:
    """Megatron's DDP and optimizer over real steps, and evaluations between them.

    Args:
        patch: options; None: Megatron's loss and its schedule.
        initial: parameters by name, in place of the model's own.
    Returns: what the last stage reports of each microbatch as "losses" and, after every other step,
        as "evaluated"; gradients of the first step, and parameters before and after all, by name.
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = make_config(setup)
    config.deallocate_pipeline_outputs = True  # as Megatron's training
    patching = contextlib.nullcontext() if patch is None else megatron_patch.patched(**patch)
    with patching:
        models = build(setup, config)
        if initial is not None:
            with torch.no_grad():
                for name, parameter in models[0].named_parameters():
                    parameter.copy_(initial[f"0.{name}"])
        began = parameters_of(models[0])
        (model,) = wrap(setup, config, models)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=3e-3,
                # Without it a gradient of the size of a rounding makes a step of the learning rate,
                # which is another one on another CPU.
                adam_eps=1e-5,
                bf16=setup.bf16,
                fp16=setup.fp16,
                loss_scale=LOSS_SCALE if setup.bf16 or setup.fp16 else None,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=setup.distributed_optimizer,
                overlap_param_gather=setup.overlap,
                clip_grad=1.0,
            ),
            [model],
        )
        config.grad_scale_func = optimizer.scale_loss

        def run(first: int, count: int, size: int = BATCH, **how: Any) -> list[float]:
            batches = [
                {name: x[:size] for name, x in microbatch(first + i, setup).items()}
                for i in range(count)
            ]
            found = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=model,
                num_microbatches=count,
                seq_length=SEQUENCE,
                micro_batch_size=size,
                **how,
            )
            return [float(x["loss"]) for x in found]

        losses, grads, evaluated = [], {}, []
        for step in range(setup.steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            first = step % 2 * 10 + 100 * parallel_state.get_data_parallel_rank()
            losses += run(first, setup.microbatches)
            if step == 0 and not setup.distributed_optimizer:
                # There a rank has those of its shard alone.
                grads = grads_of(models)
            optimizer.step()
            if step % 2:
                # Other batches, and of another size.
                with torch.no_grad():
                    evaluated += run(50, setup.microbatches + 1, size=1, forward_only=True)
        found = {"began": began, "grads": grads, "parameters": parameters_of(models[0])}
    return {"losses": losses, "evaluated": evaluated, **found}


def parameters_of(model: Any) -> dict[str, Tensor]:
    return {
        f"0.{name}": parameter.detach().float().cpu().clone()
        for name, parameter in model.named_parameters()
    }


def compare(_: Any, setup: Setup, patch: dict[str, Any]) -> dict[str, Any]:
    """On a rank: the same job with Megatron's schedule and with the vocabulary over the stages."""
    with megatron(setup):
        from megatron.core import parallel_state as state

        place = {
            "stage": state.get_pipeline_model_parallel_rank(),
            "tensor": state.get_tensor_model_parallel_rank(),
            "data": state.get_data_parallel_rank(with_context_parallel=True),
        }
        theirs = pretrain(setup, None)
        ours = pretrain(setup, {"vocab_over_pipeline": True, **patch})
        found = {"theirs": theirs, "ours": ours, "place": place}
        if setup.dtype != torch.float32:
            # From the same 16-bit parameters, computed in 32.
            found["golden"] = pretrain(
                replace(setup, bf16=False, fp16=False), None, theirs["began"]
            )
        return found


def expected_of(
    found: list[dict[str, Any]], rank: int, what: str, setup: Setup, of: str = "theirs"
) -> dict[str, Tensor]:
    """What Megatron has on a rank, of its output layer the rows that are there in ours."""
    place, theirs = found[rank]["place"], dict(found[rank][of][what])
    (last,) = (x for x in found if x["place"] == {**place, "stage": setup.pp - 1})
    if ROWS in last[of][what]:
        theirs[ROWS] = last[of][what][ROWS].chunk(setup.pp)[place["stage"]]
    if setup.tied:
        # The same rows.
        theirs.pop("0.embedding.word_embeddings.weight", None)
    return theirs
