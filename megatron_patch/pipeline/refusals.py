"""Configurations that the vocabulary over the pipeline refuses, and the flag to drop."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch.distributed.tensor import DTensor

from megatron_patch.options import PatchOptions
from megatron_patch.pipeline.rows import place
from megatron_patch.refusals import foreign_hook, why_not, why_overridden
from megatron_patch.seams import LAYERS, PipelineSeams, parallel_state
from megatron_patch.stock import device_of, why_not_stock

# Methods of GPTModel that nothing calls once a tied weight's rows are over the pipeline.
OF_TIED = ("shared_embedding_or_output_weight", "tie_embeddings_and_output_weights_state_dict")
_GONE = "which the patch would leave out, since it replaces the module: remove it"

# A field of Megatron's configuration, the value that works, the advice for any other value.
PLAIN = (
    (
        "virtual_pipeline_model_parallel_size",
        None,
        "an interleaved schedule has another order: drop "
        "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank",
    ),
    ("mtp_num_layers", None, "there are further losses: drop --mtp-num-layers"),
    ("variable_seq_lengths", False, "microbatches need one shape: drop --variable-seq-lengths"),
    (
        "num_microbatches_with_partial_activation_checkpoints",
        None,
        "another number of microbatches is in flight: drop "
        "--num-microbatches-with-partial-activation-checkpoints",
    ),
    ("fine_grained_activation_offloading", False, "it follows Megatron's order: drop it"),
    ("cuda_graph_impl", "none", "graphs are captured in Megatron's order: drop --cuda-graph-impl"),
    ("enable_cuda_graph", False, "graphs are captured in Megatron's order: drop it"),
    ("external_cuda_graph", False, "graphs are captured in Megatron's order: drop it"),
    ("init_model_with_meta_device", False, "the weights have no values to scatter: drop it"),
    ("overlap_moe_expert_parallel_comm", False, "it needs another schedule: drop it"),
    ("delay_wgrad_compute", False, "it needs another schedule: drop --delay-wgrad-compute"),
    ("use_mup", False, "logits with a multiplier are not supported: drop --use-mup"),
)


def why_not_over_pipeline(model: Any, options: PatchOptions, pipeline: PipelineSeams) -> str | None:
    """Returns the reason against a stage's vocabulary over the pipeline; None: there is none."""
    if not isinstance(model, pipeline.gpt_model):
        return "only GPTModel is supported: run other models without it"
    config, state = model.config, parallel_state()
    if state.get_pipeline_model_parallel_world_size() == 1:
        return "there is one pipeline stage: drop the option, or set --pipeline-model-parallel-size"
    for name, works, advice in PLAIN:
        value = getattr(config, name, works)
        if value != works and value is not None:
            return f"{name}={value!r}, and {advice}"
    _, count = place()
    if model.vocab_size % count:
        return (
            f"the vocabulary of {model.vocab_size} rows does not divide by pp * tp = {count}: see "
            "--make-vocab-size-divisible-by"
        )
    if any(hasattr(x, "main_grad") or isinstance(x, DTensor) for x in model.parameters()):
        return "the model is wrapped already: apply the patch before DDP, and do not use FSDP"
    if model.share_embeddings_and_output_weights:
        reason = _why_not_tied(model, pipeline)
        if reason is not None:
            return reason
    if not model.post_process:
        return None
    layer, seams = model.output_layer, pipeline.language_model
    reason = why_not(model, layer, seams, options) or foreign_hook(
        "output_layer", [("forward pre-hook", layer._forward_pre_hooks, _GONE)]
    )
    if reason is not None:
        return reason
    return why_not_stock(model, layer, layer.weight.to(device_of(layer.tp_group)), seams)


def _why_not_tied(model: Any, pipeline: PipelineSeams) -> str | None:
    originals = {name: inspect.getattr_static(pipeline.gpt_model, name) for name in OF_TIED}
    reason = why_overridden(model, originals)
    if reason is not None or not model.pre_process:
        return reason
    if not model.embedding.scatter_to_sequence_parallel:
        return "scatter_embedding_sequence_parallel=False with a tied embedding is not supported"
    words = model.embedding.word_embeddings
    stock_class = importlib.import_module(LAYERS).VocabParallelEmbedding
    if type(words) is not stock_class or "forward" in vars(words):
        return (
            f"word_embeddings is a {type(words).__qualname__}, or its forward is replaced: with a "
            "tied embedding it must be Megatron's VocabParallelEmbedding"
        )
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return foreign_hook("word_embeddings", [("hook", getattr(words, x), _GONE) for x in kinds])
