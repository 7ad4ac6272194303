"""Megatron's schedule without interleaving, with the vocabulary over the pipeline."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from megatron_patch.deferred import DeferredLogits
from megatron_patch.errors import PatchError, failing_in
from megatron_patch.pipeline.rows import NO_LOGITS, Rows
from megatron_patch.pipeline.stages import Pipeline
from megatron_patch.pipeline.step import Step
from megatron_patch.refusals import why_hooked, why_overridden
from megatron_patch.seams import LOSS, Arguments, PipelineSeams, describe, parallel_state


def forward_backward(seams: PipelineSeams, rows: Rows, arguments: Arguments) -> list[Any]:
    """Replaces forward_backward_pipelining_without_interleaving.

    Returns: the loss function's report of each microbatch on the last stage; elsewhere an empty
        list.
    Raises:
        PatchError: an argument or the model's configuration is not supported.
        RuntimeError: an earlier step failed; or another rank died or stayed away for longer than
            the timeout of Megatron's groups.
    """
    schedules = seams.schedules
    for name in ("model", "data_iterator"):
        value = getattr(arguments, name)
        if isinstance(value, list):
            if len(value) != 1:
                raise PatchError(f"{name} must be a list of 1 on each stage, got {len(value)}")
            setattr(arguments, name, value[0])
    config = schedules.get_model_config(arguments.model)
    _require(seams, rows, arguments, config)
    (shape,) = schedules.get_tensor_shapes(
        seq_length=arguments.seq_length,
        micro_batch_size=arguments.micro_batch_size,
        decoder_seq_length=arguments.decoder_seq_length,
        config=config,
        tp_group=parallel_state().get_tensor_model_parallel_group(),
        cp_group=parallel_state().get_context_parallel_group(),
    )
    if rows.pipeline is None:
        decoder = _unwrapped(arguments.model).decoder
        with failing_in("the making of groups, in the first step of every rank of the job"):
            rows.pipeline = Pipeline(rows, decoder, tuple(shape), config=config)
    pipeline: Pipeline = rows.pipeline
    if pipeline.is_broken:
        raise RuntimeError(
            "an earlier step failed and left ranks at different passes: start the job again"
        )
    pipeline.head.reshape(tuple(shape))
    step = Step(seams, rows, arguments)
    pipeline.is_broken, rows.step = True, step
    try:
        store = step.run()
    finally:
        rows.step = None
    pipeline.is_broken = False
    return store


def model_loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
    """Replaces compute_language_model_loss on the last stage.

    Returns: [b, s] fp32 of NaN for labels [b, s]: the losses are not known yet.
    """
    rows: Rows = self.output_layer
    if not isinstance(logits, DeferredLogits):
        raise PatchError(NO_LOGITS)
    if rows.step is None:
        raise PatchError(
            "the model's loss is asked for outside of get_forward_backward_func's function, where "
            "the other stages do not answer: with vocab_over_pipeline it has no value there"
        )
    call = logits.call
    call.require_same()
    if call.scale != 1:
        raise PatchError("logits with a multiplier are not supported with vocab_over_pipeline")
    return rows.step.accept(call.hidden, labels)


def _unwrapped(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def _require(seams: PipelineSeams, rows: Rows, arguments: Arguments, config: Any) -> None:
    reason = None
    if arguments.collect_non_loss_data:
        reason = f"collect_non_loss_data=True: {NO_LOGITS}"
    elif arguments.adjust_tensor_shapes_fn is not None:
        reason = "adjust_tensor_shapes_fn changes shapes between stages"
    elif config.overlap_p2p_comm:
        reason = "overlap_p2p_comm needs an interleaved schedule: drop it"
    elif type(rows.weight) is not nn.Parameter or hasattr(rows.weight, "__fsdp_param__"):
        reason = "FSDP shards the rows a second time: use DDP, with the distributed optimizer"
    elif _unwrapped(arguments.model).output_layer is not rows:
        reason = "output_layer of the model was replaced after apply()"
    elif "forward" in vars(rows):
        reason = f"forward of output_layer is replaced, by {describe(vars(rows)['forward'])}"
    else:
        reason = why_hooked(rows, rows.options) or why_overridden(
            _unwrapped(arguments.model), {LOSS: seams.language_model.loss}
        )
    stages = parallel_state().get_pipeline_model_parallel_group()
    for holder, name, known in (
        (arguments.p2p_communicator, "pp_group", stages),
        (arguments.pg_collection, "pp", stages),
        (arguments.pg_collection, "tp", parallel_state().get_tensor_model_parallel_group()),
    ):
        group = getattr(holder, name, known)
        if dist.get_process_group_ranks(group) != dist.get_process_group_ranks(known):
            reason = f"{name} has other ranks than the group of Megatron's parallel_state"
    if reason is not None:
        raise PatchError(f"vocab_over_pipeline: {reason}")
