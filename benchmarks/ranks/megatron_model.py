"""A GPT of megatron-core's own modules, whose head gets the input of a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist.bench.inputs import BenchInputs


@dataclass(frozen=True)
class Sizes:
    """A decoder: RMSNorm, rotary positions, grouped queries, gated MLP, no bias."""

    vocab_size: int
    dim: int
    mlp_dim: int
    layers: int
    heads: int
    query_groups: int
    head_dim: int
    tied: bool  # whether embedding and head share their weight


MODELS = {
    "gemma2-2b": Sizes(256000, 2304, 9216, 26, 8, 4, 256, tied=True),
    # 16 of the 32 layers: a GPU of 141 GB holds no more, with the optimizer's states.
    "llama3-8b": Sizes(128256, 4096, 14336, 16, 32, 8, 128, tied=False),
    # To try a command on CPU ranks.
    "tiny": Sizes(1031, 32, 128, 5, 8, 4, 4, tied=True),
}


class HeadInput(torch.autograd.Function):
    """Replacement of the last norm's output by `hidden`; its gradient goes to the norm's output."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor) -> Tensor:
        if output.shape != hidden.shape:
            raise ValueError(
                f"hidden must have shape {list(output.shape)}, got {list(hidden.shape)}"
            )
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Norm(nn.RMSNorm):
    """RMSNorm under sequence parallelism, which Megatron's own has only with its extensions."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel


class Attention(nn.Module):
    """Attention by torch's fused kernel; Megatron's own module would keep the scores."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        # [s, b, heads, head_dim]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


@contextmanager
def megatron_groups() -> Iterator[None]:
    """Makes Megatron's groups, with all ranks of this job tensor-parallel, and removes them."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def make_config(
    sizes: Sizes, ranks: int, sequence_parallel: bool, on_gpu: bool, recompute: bool
) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.dim,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.query_groups,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.mlp_dim,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not on_gpu,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_fusion_impl="native",
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def build(sizes: Sizes, config: Any, sequence: int, inputs: BenchInputs, device: Any) -> Any:
    """Returns this rank's GPTModel, whose head has the weight of `inputs`."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    norm: Any = Norm
    layer: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.submodules.core_attention = Attention
    block: Any = TransformerBlockSubmodules([layer] * sizes.layers, layer_norm=norm)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=sizes.vocab_size,
        max_sequence_length=sequence,
        share_embeddings_and_output_weights=sizes.tied,
        position_embedding_type="rope",
    ).to(device)
    tied, untied = model.shared_embedding_or_output_weight(), model.output_layer.weight
    head: Any = tied if sizes.tied else untied
    first = parallel_state.get_tensor_model_parallel_rank() * len(head)
    with torch.no_grad():
        head.copy_(inputs.weight[first : first + len(head)])
    return model


def wrap(config: Any, model: Any) -> tuple[Any, Any]:
    """Returns the model in Float16Module and DDP, and an optimizer.

    The optimizer's steps change nothing, so that all steps have the same inputs.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    in_fp32 = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = DistributedDataParallel(config, in_fp32, Float16Module(config, model))
    steps = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        weight_decay=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        clip_grad=1.0,
    )
    return wrapped, get_megatron_optimizer(steps, [wrapped])
