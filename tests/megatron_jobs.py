"""A small pretraining with real megatron-core: over NCCL; or on a CPU, over gloo, with what stands
in for torch.cuda there.

In ranks of their own (`megatron_pools`), which nothing else uses: the stand-ins stay in a process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from benchmarks.ranks.megatron_model import Attention

SEQUENCE, BATCH, HIDDEN, CLASSES = 16, 2, 32, 96


@dataclass(frozen=True)
class Setup:
    """A small job of Megatron's."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False
    tied: bool = False
    mtp: bool = False
    experts: bool = False
    recompute: bool = False
    fusion: bool = False  # gradient accumulation fusion
    reduces_in_fp32: bool = True  # main_grad's dtype in 16-bit models
    distributed_optimizer: bool = False
    overlap: bool = False  # of gradients' reduction and parameters' gathering
    per_token: bool = False
    bf16: bool = False
    fp16: bool = False
    native: bool = False  # Megatron's fused loss
    layout: str | None = None
    fsdp: str | None = None  # torch's, the head in the "root" group or its own ("head"); "megatron"
    frozen_head: bool = False
    ignored: bool = False  # every fourth microbatch has no label that counts
    layers: int = 2
    microbatches: int = 2
    steps: int = 20
    device: str = "cpu"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def dtype(self) -> torch.dtype:
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32


class _OnCpu(TorchFunctionMode):
    """device="cuda" means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        elif "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.device and str(args[0]).startswith("cuda"):
            args = ("cpu",)
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Stream()


@functools.cache
def import_megatron(device: str) -> None:
    """Without two extensions: one has a stand-in, the other is looked for in vain."""
    extension: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    extension.wgrad_gemm_accum_fp32 = lambda x, grad, main: main.add_(grad.t().float() @ x.float())
    extension.wgrad_gemm_accum_fp16 = extension.wgrad_gemm_accum_fp32
    sys.modules["fused_weight_gradient_mlp_cuda"] = extension
    if device == "cpu":
        stand_in_for_cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.optimizer  # noqa: F401
        import megatron.core.tensor_parallel.random as random
        from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401
        from megatron.core.transformer import multi_token_prediction
        from megatron.core.transformer.moe import moe_utils

    if device == "cpu":
        random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
        random._set_cuda_rng_state = lambda *_, **__: None
    # Not defined where TransformerEngine is absent, and asked for all the same.
    vars(moe_utils).setdefault("te_general_gemm", None)
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        multi_token_prediction.is_inference_column_parallel_linear = lambda layer: False


def stand_in_for_cuda() -> None:
    """For the rest of this process, before megatron is imported: what it calls of torch.cuda."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda *_, **__: None
    from_group: Any = DeviceMesh.from_group
    DeviceMesh.from_group = lambda group, device_type, **more: from_group(group, "cpu", **more)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    original = tensor.type

    # The optimisers compare names of types.
    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        if not isinstance(name, str) or name.startswith("torch.cuda."):
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    tensor.type = type_of
    for name in ("FloatTensor", "IntTensor", "BFloat16Tensor", "HalfTensor"):
        setattr(cuda, name, getattr(torch, name))


@contextlib.contextmanager
def megatron(setup: Setup, timeout_s: float = 1800) -> Iterator[None]:
    """Megatron's groups over all ranks of this process's job."""
    import_megatron(setup.device)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    before = set(c10d._world.pg_map)
    on_cpu = _OnCpu() if setup.device == "cpu" else contextlib.nullcontext()
    # Megatron's own fusions are compiled else, each by gcc for seconds.
    compiling = torch.compiler.set_stance("default" if setup.device == "cuda" else "force_eager")
    with warnings.catch_warnings(), on_cpu, compiling:
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=setup.tp,
            pipeline_model_parallel_size=setup.pp,
            virtual_pipeline_model_parallel_size=setup.vpp,
            context_parallel_size=setup.cp,
            distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]
        )
        if setup.device == "cuda":
            model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            # It forgets its some twenty groups, whose threads would stay.
            for group in [x for x in c10d._world.pg_map if x not in before]:
                c10d.destroy_process_group(group)
            # A group's threads stay as long as its object, which models hold that hold themselves.
            gc.collect()


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
    """This rank's tokens. Some labels are no class, and masked, as documents' ends are."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(number)
    shape = (BATCH, SEQUENCE)
    # A few ids, so that there is something to learn.
    tokens, labels = (torch.randint(0, 24, shape, generator=generator) for _ in range(2))
    labels[:, :: 1 if setup.ignored and number % 4 == 1 else 5] = -100
    batch = {"tokens": tokens, "labels": labels, "mask": (labels >= 0).float()}
    rank = parallel_state.get_context_parallel_rank()
    return {name: x.chunk(setup.cp, 1)[rank].to(setup.device) for name, x in batch.items()}


def pretrain(setup: Setup, patch: dict[str, Any] | None, when: str = "before") -> dict[str, Any]:
    """Megatron's schedule, DDP and optimiser over real steps.

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
                lr=3e-3,
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
