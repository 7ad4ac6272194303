"""Which heads the patch leaves alone, and what to change so that it need not."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from megatron_patch.options import PatchOptions
from megatron_patch.seams import Seams

# Forward hooks of these only gather or free parameters.
HARMLESS = ("megatron.core.distributed", "torch.distributed")


def why_not(model: Any, layer: Any, seams: Seams, options: PatchOptions) -> str | None:
    """Why this model's head cannot be patched; None: it can."""
    config = model.config
    if _class_of(layer) is not seams.head:
        return (
            f"output_layer is a {type(layer).__qualname__}, not Megatron's ColumnParallelLinear: "
            "switch off what replaces the head (--fp8-output-proj, quantization, a custom layer)"
        )
    if layer.bias is not None:
        return (
            "output_layer has a bias, as T5's tied head: use "
            "--untie-embeddings-and-output-weights or run T5 without the patch"
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        return (
            "defer_embedding_wgrad_compute keeps the gradient of logits, which are never made: "
            "drop --defer-embedding-wgrad-compute"
        )
    if max(getattr(x, "gtp_remat_size", None) or 1 for x in (config, layer)) > 1:
        return "gtp_remat_size splits the head's rows once more: set it to 1"
    implementation = getattr(config, "cross_entropy_fusion_impl", "native")
    if getattr(config, "cross_entropy_loss_fusion", False) and implementation != "native":
        return (
            f"cross_entropy_fusion_impl={implementation!r} asks for another loss: drop "
            "--cross-entropy-loss-fusion and --cross-entropy-fusion-impl"
        )
    if options.logits == "screened" and _is_of_fp32(config):
        return (
            "logits='screened' has not the digits of an fp32 model (params_dtype): set --bf16 or "
            "--fp16, or drop --logits"
        )
    if layer.disable_grad_reduce:
        return "disable_grad_reduce leaves the hidden gradient's sum to others: not supported"
    if "compute_language_model_loss" in vars(model):
        return (
            "compute_language_model_loss of this model is replaced already, as for distillation, "
            "which needs logits: run one of the two"
        )
    if "forward" in vars(layer):
        return "forward of this output_layer is replaced already: run one of the two"
    return why_hooked(layer)


def _is_of_fp32(config: Any) -> bool:
    """Models are cast after they are built, or within autocast."""
    sixteen = any(getattr(config, name, False) for name in ("bf16", "fp16", "enable_autocast"))
    return config.params_dtype == torch.float32 and not sixteen


def _class_of(layer: Any) -> type:
    """Without what torch's fully_shard has put before it."""
    found = type(layer)
    return found.__bases__[1] if found.__bases__[0] is FSDPModule else found


def why_hooked(layer: Any) -> str | None:
    """A forward hook of someone else's reads logits."""
    for hook in layer._forward_hooks.values():
        owner = getattr(hook, "func", hook)
        if not str(getattr(owner, "__module__", "")).startswith(HARMLESS):
            name = getattr(owner, "__qualname__", type(owner).__qualname__)
            return (
                f"output_layer has the forward hook {owner.__module__}.{name}, which would read "
                "logits that are never made, as for distillation: remove it, or run without the "
                "patch"
            )
    return None
