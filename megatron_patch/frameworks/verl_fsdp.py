"""Our log-probabilities and entropy in verl's FSDP engine, for `verl.apply`."""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cce_dist import VocabShard, token_logprobs
from megatron_patch.errors import PatchError
from megatron_patch.frameworks.adapter import Seam
from megatron_patch.options import PatchOptions
from megatron_patch.refusals import foreign_hook, readers_of_logits
from megatron_patch.seams import describe

TORCH = "verl.utils.experimental.torch_functional"
TRITON = "verl.utils.kernel.linear_cross_entropy"
MODELS = "verl.models.transformers"
_VISION = "self input_ids labels temperature shift_labels"
# The arguments of forward_with_torch_backend and forward_with_triton_backend in verl's modules.
FORWARDS = {
    f"{MODELS}.dense_common": "self input_ids attention_mask position_ids past_key_values "
    "inputs_embeds labels use_cache output_attentions output_hidden_states return_dict "
    "cache_position logits_to_keep temperature shift_labels loss_kwargs",
    f"{MODELS}.qwen2_vl": f"{_VISION} kwargs",
    f"{MODELS}.qwen3_vl": f"{_VISION} kwargs",
    f"{MODELS}.glm4v": f"{_VISION} kwargs",
    f"{MODELS}.qwen3_5": f"{_VISION} cu_seqlens cu_seqlens_cpu kwargs",
}
# Entries of a model's configuration that change its logits, or the hidden states for them.
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
SCALES += ("logits_mup_width_multiplier",)

# The head of the forward that runs has been checked.
_CHECKED: ContextVar[bool] = ContextVar("checked", default=False)


def seams(options: PatchOptions) -> tuple[Seam, ...]:
    """Returns verl's functions of a head's weight, and the forwards that call them."""
    names = ("forward_with_torch_backend", "forward_with_triton_backend")
    forward = partial(_forward, options)
    return (
        Seam(
            TORCH,
            "FusedLinearForPPO.forward",
            "self hidden_states vocab_weights input_ids temperature",
            partial(_fused_linear, options),
        ),
        Seam(
            TRITON,
            "linear_cross_entropy",
            "ctx hidden weight labels temperature reduction dist_process_group",
            partial(_linear_cross_entropy, options),
        ),
        *(Seam(module, name, FORWARDS[module], forward) for module in FORWARDS for name in names),
    )


def _forward(options: PatchOptions, theirs: Any, model: Any, *args: Any, **keywords: object) -> Any:
    """Runs verl's forward of a model with the whole weight of its head.

    Collectives: an all-gather of the head, if `fully_shard` wraps it by itself.
    Raises:
        PatchError: logits are not hidden states times that weight.
    """
    head: Any = getattr(model, "lm_head", None)
    reason = _why_not(head, model.config, options)
    is_sharded = reason is None and issubclass(type(head), FSDPModule)
    was_whole = is_sharded and not isinstance(head.weight, DTensor)
    if was_whole:
        # An earlier forward waits for its backward, or never has one: the weight may be older than
        # an optimizer's step.
        head.reshard()
    if is_sharded:
        # verl does not call the head, whose hooks would gather the weight.
        head.unshard()
    if reason is None and isinstance(head.weight, DTensor):
        reason = f"lm_head.weight is a DTensor placed {head.weight.placements}, and must be whole"
    if reason is not None:
        raise PatchError(f"{type(model).__name__}: {reason}, or set use_fused_kernels=False")
    token = _CHECKED.set(True)
    try:
        return theirs(model, *args, **keywords)
    finally:
        _CHECKED.reset(token)
        if is_sharded and not was_whole and not torch.is_grad_enabled():
            # Else FSDP frees the weight after a backward, which reads it.
            head.reshard()


def _why_not(head: Any, config: Any, options: PatchOptions) -> str | None:
    """Returns the reason why logits are not hidden states times the head's weight; None: none."""
    forward = getattr(head, "forward", head)
    if getattr(forward, "__func__", None) is not nn.Linear.forward:
        return (
            f"lm_head must be a plain torch.nn.Linear, of which verl reads the weight alone, got "
            f"{describe(forward)}: leave lm_head out of LoRA and modules_to_save"
        )
    if head.bias is not None:
        return "lm_head has a bias, which verl leaves out: use a head without one"
    kinds = [*readers_of_logits(head), ("forward pre-hook", head._forward_pre_hooks, "")]
    hook = "which verl does not call: remove it"
    reason = foreign_hook("lm_head", [(kind, hooks, hook) for kind, hooks, _ in kinds])
    if reason is not None:
        return reason
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    wanted = {**dict.fromkeys(SCALES, 1.0), **dict.fromkeys(SOFTCAPS, options.softcap)}
    for name, value in wanted.items():
        has = getattr(config, name, None)
        if has is not None and has != value:
            return f"{name} must be {value}, got {has}, which verl leaves out"
    if options.softcap is not None and all(getattr(config, x, None) is None for x in SOFTCAPS):
        return f"softcap={options.softcap!r} of MEGATRON_PATCH_SOFTCAP is none of this model's"
    return None


def _fused_linear(
    options: PatchOptions,
    theirs: Any,
    module: Any,
    hidden_states: Tensor,  # [..., D]
    vocab_weights: Tensor,  # [V, D]
    input_ids: Tensor,  # [...]
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies [...] fp32; verl's entropies have hidden's dtype."""
    return _logprobs(options, hidden_states, vocab_weights, input_ids, temperature)


def _linear_cross_entropy(
    options: PatchOptions,
    theirs: Any,
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    labels: Tensor,  # [...]
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies [N] fp32 of N flattened tokens."""
    if dist_process_group is not None or reduction != "none":
        raise PatchError(
            f"linear_cross_entropy must have reduction 'none' and no dist_process_group, as verl's "
            f"FSDP engine has, got {reduction!r} and {dist_process_group}: set "
            "use_fused_kernels=False"
        )
    return _logprobs(options, hidden.flatten(0, -2), weight, labels.flatten(), temperature)


def _logprobs(
    options: PatchOptions, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    if not _CHECKED.get():
        raise PatchError(
            "verl's fused function must be called by a forward in which ours checks the head: call "
            "verl.apply() before verl builds its models, once in a process, or set "
            "use_fused_kernels=False"
        )
    result = token_logprobs(
        hidden,
        weight,
        ids.long(),
        temperature=temperature,
        entropy=True,
        vocab_shard=VocabShard.even(weight.shape[0], 0, 1, options.vocab_size),
        softcap=options.softcap,
        gradient=options.gradient,  # pyright: ignore[reportArgumentType]
        backend=options.loss.backend,
        workspace_bytes=options.workspace_bytes,
    )
    assert result.entropy is not None
    return result.logprobs, result.entropy
