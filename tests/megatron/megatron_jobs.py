"""A small pretraining with real megatron-core: its model, its data, its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.ranks.megatron_model import Attention
from tests.megatron.megatron_setup import BATCH, CLASSES, HIDDEN, SEQUENCE, Setup, megatron


def make_config(setup: Setup) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = {}
    if setup.recompute:
        more = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=setup.layers,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=2 * HIDDEN,
        use_cpu_initialization=True,
        params_dtype=setup.dtype,
        pipeline_dtype=setup.dtype,
        bf16=setup.bf16,
        fp16=setup.fp16,
        tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp,
        virtual_pipeline_model_parallel_size=setup.vpp,
        context_parallel_size=setup.cp,
        pipeline_model_parallel_layout=setup.layout,
        sequence_parallel=setup.sequence_parallel,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=setup.fusion,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        cross_entropy_loss_fusion=setup.native,
        cross_entropy_fusion_impl="native",
        calculate_per_token_loss=setup.per_token,
        mtp_num_layers=1 if setup.mtp else None,
        mtp_loss_scaling_factor=0.1,
        transformer_impl="local" if setup.fsdp else "transformer_engine",
        num_moe_experts=2 if setup.experts else None,
        add_bias_linear=not setup.experts,
        **more,
    )


def make_norm() -> type[torch.nn.LayerNorm]:
    class Norm(torch.nn.LayerNorm):
        """Megatron's own one knows no sequence parallelism without its extensions."""

        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
            for parameter in self.parameters():
                parameter.sequence_parallel = config.sequence_parallel

    return Norm


def build(setup: Setup, config: Any) -> list[Any]:
    """This rank's GPTModels: one, or one of each virtual stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    norm = make_norm()
    layer = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=2 if setup.experts else None)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if setup.cp > 1:
        # Megatron's own knows no context parallelism; this one stays within a rank's tokens.
        layer.submodules.self_attention.submodules.core_attention = Attention
    mtp = None
    if setup.mtp:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
        for spec in mtp.layer_specs:
            for name in ("enorm", "hnorm", "layer_norm"):
                setattr(spec.submodules, name, norm)
    models = []
    torch.manual_seed(1234 + parallel_state.get_pipeline_model_parallel_rank())
    for stage in range(setup.vpp or 1):
        where = {"vp_stage": stage if setup.vpp else None}
        layers = [layer] * get_num_layers_to_build(config, **where)
        models.append(
            GPTModel(
                config=config,
                transformer_layer_spec=TransformerBlockSubmodules(layers, layer_norm=norm),
                vocab_size=CLASSES,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **where),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **where),
                share_embeddings_and_output_weights=setup.tied,
                position_embedding_type="learned_absolute",
                mtp_block_spec=mtp,
                **where,
            ).to(setup.device)
        )
    if setup.frozen_head:
        for model in models:
            if hasattr(model, "output_layer"):
                model.output_layer.weight.requires_grad_(False)
    return models


def wrap(setup: Setup, config: Any, models: list[Any]) -> list[Any]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    if setup.bf16 or setup.fp16:
        models = [Float16Module(config, model) for model in models]
    if setup.fsdp is not None:
        return [shard(setup, config, model) for model in models]
    how = DistributedDataParallelConfig(
        grad_reduce_in_fp32=setup.reduces_in_fp32,
        use_distributed_optimizer=setup.distributed_optimizer,
        overlap_grad_reduce=setup.overlap,
        overlap_param_gather=setup.overlap,
    )
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [DistributedDataParallel(config, how, model) for model in models]
    if setup.overlap:
        # As Megatron's training: gradients travel with the last microbatch.
        waits = [model.no_sync for model in wrapped]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return wrapped


def shard(setup: Setup, config: Any, model: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
        FullyShardedDataParallel,
        finalize_model_grads,
    )
    from megatron.core.distributed.torch_fully_sharded_data_parallel import (
        TorchFullyShardedDataParallel,
    )

    if setup.fsdp == "megatron":
        config.finalize_model_grads_func = finalize_model_grads
        how = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            data_parallel_sharding_strategy="optim_grads_params",
        )
        device = torch.device("cpu") if setup.device == "cpu" else None
        return FullyShardedDataParallel(config, how, model, device=device)
    if setup.fsdp == "head":
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        mesh = DeviceMesh.from_group(group, setup.device)
        fully_shard(model.output_layer, mesh=mesh)
    # config.finalize_model_grads_func stays unset: 0.16's calls this wrapper with an argument that
    # it does not have, and here there is nothing to do.
    return TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), model)


def microbatch(number: int, setup: Setup) -> dict[str, Tensor]:
    """This rank's tokens. Some labels are no class, and masked, as documents' ends are. Every other
    batch has labels of int32, which Megatron's losses take, too."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(number)
    shape = (BATCH, SEQUENCE)
    # A few ids, so that there is something to learn.
    tokens, labels = (torch.randint(0, 24, shape, generator=generator) for _ in range(2))
    labels[:, :: 1 if setup.ignored and number % 4 == 1 else 5] = -100
    dtype = torch.int32 if number % 2 else torch.int64
    batch = {"tokens": tokens, "labels": labels.to(dtype), "mask": (labels >= 0).float()}
    rank = parallel_state.get_context_parallel_rank()
    return {name: x.chunk(setup.cp, 1)[rank].to(setup.device) for name, x in batch.items()}


def pretrain(setup: Setup, patch: dict[str, Any] | None, when: str = "before") -> dict[str, Any]:
    """Megatron's schedule, DDP and optimizer over real steps.

    Args:
        patch: options of the loss; None: Megatron's.
        when: the patch is applied, "before" the models are built, "after", or once they are
            "wrapped".
    Returns: the last stage's "losses" of each step, every parameter's gradient in the first step as
        "grads", by name, and how often our loss was computed and logits were made.
    """
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import megatron_patch

    config = make_config(setup)
    with contextlib.ExitStack() as stack:
        counted = stack.enter_context(counting_calls())
        if patch is not None and when == "before":
            stack.enter_context(megatron_patch.patched(**patch))
        models = build(setup, config)
        if patch is not None and when == "after":
            stack.enter_context(megatron_patch.patched(models, **patch))
        wrapped = wrap(setup, config, models)
        if patch is not None and when == "wrapped":
            stack.enter_context(megatron_patch.patched(wrapped, **patch))
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=6e-3,
                bf16=setup.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=setup.distributed_optimizer,
                overlap_param_gather=setup.overlap,
                clip_grad=1.0,
            ),
            wrapped,
        )
        run = get_forward_backward_func()
        losses, grads = [], {}
        for step in range(setup.steps):
            for model in wrapped:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            # The same two batches again and again: the loss falls.
            first = step % 2 * 10 + 100 * parallel_state.get_data_parallel_rank()
            batches = [microbatch(first + i, setup) for i in range(setup.microbatches)]
            several = len(wrapped) > 1
            found = run(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in wrapped] if several else iter(batches),
                model=wrapped if several else wrapped[0],
                num_microbatches=setup.microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            losses += [float(x["loss"]) for x in found]
            if step == 0:
                grads = grads_of(models)
            optimizer.step()
    return {"losses": losses, "grads": grads, **counted}


@contextlib.contextmanager
def counting_calls() -> Iterator[dict[str, int]]:
    from megatron_patch import replaced
    from megatron_patch.deferred import DeferredLogits

    counted = {"losses_of_ours": 0, "logits_made": 0}
    targets = {
        "losses_of_ours": (replaced, "head_loss"),
        "logits_made": (DeferredLogits, "materialize"),
    }
    originals = {key: getattr(*target) for key, target in targets.items()}

    def counting(key: str) -> Any:
        def count(*args: Any) -> Any:
            counted[key] += 1
            return originals[key](*args)

        return count

    for key, (owner, name) in targets.items():
        setattr(owner, name, counting(key))
    try:
        yield counted
    finally:
        for key, (owner, name) in targets.items():
            setattr(owner, name, originals[key])


def grads_of(models: list[Any]) -> dict[str, Tensor]:
    def grad_of(parameter: Any) -> Tensor:
        if isinstance(parameter, DTensor):
            # This rank's part, maybe none; both runs split alike.
            return torch.zeros(0) if parameter.grad is None else parameter.grad.to_local()
        return parameter.main_grad.detach()

    return {
        f"{number}.{name}": grad_of(parameter).cpu().clone()
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Any, Any]:
    batch = next(batches)
    tokens = batch["tokens"]
    position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
    future = torch.ones_like(position[0], dtype=torch.bool).expand(len(position[0]), -1).triu(1)
    how = {"labels": batch["labels"], "loss_mask": batch["mask"]}
    output = model(tokens, position, future[None, None], **how)

    def masked(losses: Tensor) -> tuple[Any, ...]:
        total = (losses.float() * batch["mask"]).sum()
        count = batch["mask"].sum().int()
        report = {"loss": total.detach() / count.clamp_min(1)}
        per_token = model.config.calculate_per_token_loss
        return (total, count, report) if per_token else (total / count, report)

    return output, masked


def compare(_: Any, setup: Setup, patch: dict[str, Any], when: str = "before") -> dict[str, Any]:
    """On a rank: the same job by Megatron's loss and by ours."""
    with megatron(setup):
        return {"theirs": pretrain(setup, None), "ours": pretrain(setup, patch, when)}
