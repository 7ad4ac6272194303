"""Heads that the patch refuses, and the change that each needs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as modules

from megatron_patch.options import PatchOptions
from megatron_patch.seams import LOSS, Seams, describe

# Hooks of these modules only gather or free parameters, or note which module runs.
HARMLESS = ("megatron.core.distributed", "torch.distributed", "torch.utils.module_tracker")
_LOGITS = (
    "which would read logits that the patch does not compute, as for distillation: remove it (use "
    "megatron_patch.distillation_loss), or run without the patch"
)
_GRADIENT = (
    "which would read the gradient of logits that the patch does not compute: remove it, or run "
    "without the patch"
)
_COPY = (
    "which may write the weight between two microbatches, and one 8-bit copy serves both: set "
    "quantize_once=False"
)


def why_not(model: Any, layer: Any, seams: Seams, options: PatchOptions) -> str | None:
    """Returns the reason why a model's head cannot be patched; None: it can."""
    config = model.config
    if _class_of(layer) is not seams.head:
        return why_changed(layer, seams, options)
    if getattr(config, "defer_embedding_wgrad_compute", False):
        return (
            "defer_embedding_wgrad_compute keeps the gradient of logits, which are not computed: "
            "drop --defer-embedding-wgrad-compute"
        )
    if max(getattr(x, "gtp_remat_size", None) or 1 for x in (config, layer)) > 1:
        return "gtp_remat_size splits the head's rows a second time: set it to 1"
    implementation = getattr(config, "cross_entropy_fusion_impl", "native")
    if getattr(config, "cross_entropy_loss_fusion", False) and implementation != "native":
        return (
            f"cross_entropy_fusion_impl={implementation!r} asks for another loss: drop "
            "--cross-entropy-loss-fusion and --cross-entropy-fusion-impl"
        )
    if options.logits == "screened" and _is_of_fp32(config):
        return (
            "logits='screened' has too few digits for an fp32 model (params_dtype): set --bf16 or "
            "--fp16, or drop --logits"
        )
    if layer.disable_grad_reduce:
        return "disable_grad_reduce of output_layer must be False: the loss sums hidden's gradient"
    if LOSS in vars(model):
        return (
            f"{LOSS} of this model is replaced already, by {describe(vars(model)[LOSS])}, as for "
            "distillation by logits: use megatron_patch.distillation_loss, or run without the patch"
        )
    if "forward" in vars(layer):
        return (
            f"forward of this output_layer is replaced already, by "
            f"{describe(vars(layer)['forward'])}: use either that or the patch"
        )
    return why_overridden(model, {LOSS: seams.loss}) or why_changed(layer, seams, options)


def why_overridden(model: Any, originals: dict[str, Any]) -> str | None:
    """Returns the method that a class of the model's MRO overrides; None: all are Megatron's.

    Args: originals: Megatron's functions, by name.
    """
    for name, function in originals.items():
        override = inspect.getattr_static(type(model), name, None)
        if override is not function:
            owner = next((each for each in type(model).__mro__ if name in vars(each)), type(model))
            return (
                f"{owner.__module__}.{owner.__qualname__} overrides {name} by "
                f"{describe(override)}, which the patch would leave out: run this model without "
                "the patch"
            )
    return None


def why_changed(layer: Any, seams: Seams, options: PatchOptions) -> str | None:
    """Returns the difference between a head and the head that Megatron built; None: they agree.

    Every use of the head calls this function: models may change after they are built.
    """
    if _class_of(layer) is not seams.head:
        return (
            f"output_layer is a {type(layer).__qualname__}, not Megatron's ColumnParallelLinear: "
            "drop the option that replaces the head (--fp8-output-proj, quantization, a custom "
            "layer)"
        )
    if seams.head.forward is not seams.forward:
        return (
            f"ColumnParallelLinear.forward has been replaced by {describe(seams.head.forward)}: "
            "use either that or the patch"
        )
    if layer.bias is not None:
        return (
            "output_layer has a bias, as T5's tied head: use "
            "--untie-embeddings-and-output-weights or run T5 without the patch"
        )
    return why_hooked(layer, options)


def _is_of_fp32(config: Any) -> bool:
    """Tells whether a model computes in fp32. A 16-bit model is cast later, or by autocast."""
    sixteen = any(getattr(config, name, False) for name in ("bf16", "fp16", "enable_autocast"))
    return config.params_dtype == torch.float32 and not sixteen


def _class_of(layer: Any) -> type:
    """Returns a layer's class without the class that torch's fully_shard adds."""
    layer_type = type(layer)
    return layer_type.__bases__[1] if layer_type.__bases__[0] is FSDPModule else layer_type


def why_hooked(layer: Any, options: PatchOptions) -> str | None:
    """Returns the reason against the first foreign hook of a layer; None: it has no such hook.

    A forward or backward hook reads logits or their gradient. A forward pre-hook may write the
    weight, whose 8-bit copy would then be old.
    """
    kinds = readers_of_logits(layer)
    if options.logits == "screened" and options.quantize_once:
        kinds += [("forward pre-hook", layer._forward_pre_hooks, _COPY)]
    return foreign_hook("output_layer", kinds)


def readers_of_logits(layer: Any) -> list[tuple[str, Any, str]]:
    """Lists the kinds of hooks that get a layer's output or its gradient, for `foreign_hook`."""
    return [
        ("forward hook", layer._forward_hooks, _LOGITS),
        ("backward hook", layer._backward_hooks, _GRADIENT),
        ("backward pre-hook", layer._backward_pre_hooks, _GRADIENT),
        ("forward hook of every module", modules._global_forward_hooks, _LOGITS),
        ("backward hook of every module", modules._global_backward_hooks, _GRADIENT),
        ("backward pre-hook of every module", modules._global_backward_pre_hooks, _GRADIENT),
    ]


def foreign_hook(of: str, kinds: list[tuple[str, Any, str]]) -> str | None:
    """Describes the first hook of a module that is not HARMLESS; None: there is none.

    Args:
        of: the module's name in the model.
        kinds: for each kind of hook its name, the hooks, and the reason against them.
    """
    for kind, hooks, why in kinds:
        for hook in hooks.values():
            owner = getattr(hook, "func", hook)
            if not str(getattr(owner, "__module__", "")).startswith(HARMLESS):
                return f"{of} has the {kind} {describe(owner)}, {why}"
    return None
