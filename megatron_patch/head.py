"""The loss and the largest logits of a head's input, in Megatron's conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import LossOptions, VocabShard, linear_cross_entropy
from cce_dist import largest_logits as _largest_logits
from megatron_patch.options import PatchOptions
from megatron_patch.quantized import quantizer_of

# layer, hidden, weight, labels, scale, options -> result; as `head_loss`.
HeadFunction = Callable[[Any, Tensor, Tensor, Tensor, float, PatchOptions], Any]

# A patched head keeps its state under this name.
MARK = "megatron_patch"
IGNORED = -100
# Logits that stay from the forward to the backward get this multiple of the loss's own workspace.
# With it no measured step was more than 2 % longer than with Megatron's fused loss:
# docs/notebook/2026-11-23/megatron.md.
WORKSPACES_OF_KEPT = 2


def head_loss(
    layer: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, options: PatchOptions
) -> Tensor:
    """Computes each token's cross-entropy: [s, b] fp32, contiguous, the same bits on every rank.

    Args:
        layer: the ColumnParallelLinear in whose forward the loss runs.
        hidden: [s, b, h]; under sequence parallelism this rank's [s / tp, b, h].
        weight: [V / tp, h].
        labels: [s, b]. A label that is no class, such as -100, gets loss and gradient 0: Megatron
            masks it later.
        scale: a factor of the logits.
    Collectives: those of `linear_cross_entropy` over the layer's tensor-parallel group.
    """
    group = layer.tp_group
    size, rank = group.size(), group.rank()
    shard = VocabShard.even(weight.shape[0], rank, size, options.vocab_size)
    into = main_grad_of(layer, weight)
    keeps = keeps_logits(hidden, options)
    once = options.logits == "screened" and options.quantize_once
    workspace_bytes = options.workspace_bytes
    if workspace_bytes is None and keeps and options.gradient == "exact":
        workspace_bytes = WORKSPACES_OF_KEPT * LossOptions().workspace_for(labels.numel())
    loss = linear_cross_entropy(
        hidden,
        weight if into is None else _IntoMainGrad.apply(weight),
        classes_of(labels, shard),
        group=group if size > 1 else None,
        vocab_shard=shard,
        sequence_parallel=layer.sequence_parallel,
        ignore_index=IGNORED,
        reduction="none",
        softcap=options.softcap,
        logit_scale=scale,
        gradient=options.loss.gradient,
        logits=options.loss.logits,
        quantized_weight=quantizer_of(layer) if once else None,
        grad_weight_into=into,
        backend=options.loss.backend,
        workspace_bytes=workspace_bytes,
        keep_logits=keeps,
        check_ranks=options.check_ranks,
    )
    assert isinstance(loss, Tensor)
    return loss.contiguous()


def classes_of(labels: Tensor, shard: VocabShard) -> Tensor:
    """Returns labels as targets of our losses: IGNORED where a label is no class.

    Megatron's losses take int32 and int64, ours int64. Ours refuse every other dtype by name.
    """
    inside = (labels >= 0) & (labels < shard.vocab_size)
    targets = torch.where(inside, labels, IGNORED)
    return targets.long() if targets.dtype == torch.int32 else targets


def largest_logits(
    layer: Any, hidden: Tensor, weight: Tensor, scale: float, options: PatchOptions
) -> tuple[Tensor, Tensor]:
    """Returns each token's largest logit over this rank's columns, and its local index: [s, b].

    Values have hidden's dtype. The result is that of `logits.max(dim=-1)` on fp32 logits.
    Megatron's logits may round to equal 16-bit numbers: the first of these need not be the largest.
    Not differentiable.
    Collectives: under sequence parallelism one all-gather of hidden.
    """
    if layer.sequence_parallel:
        size = layer.tp_group.size()
        gathered = hidden.new_empty(size * hidden.shape[0], *hidden.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, hidden.contiguous(), group=layer.tp_group)
        hidden = gathered
    largest = _largest_logits(
        hidden,
        weight,
        logit_scale=scale,
        backend=options.loss.backend,
        workspace_bytes=options.workspace_bytes,
    )
    return largest.value.to(hidden.dtype), largest.index


def keeps_logits(hidden: Tensor, options: PatchOptions) -> bool | None:
    """Tells whether logits stay from the forward to the backward; None: the loss's default."""
    if options.keep_logits is not None or options.logits == "screened":
        return options.keep_logits
    if options.gradient != "exact" or options.backend == "torch" or not hidden.is_cuda:
        return False
    # The Triton kernels need this compute capability.
    return torch.cuda.get_device_capability(hidden.device) >= (8, 0)


def main_grad_of(layer: Any, weight: Tensor) -> Tensor | None:
    """Returns the fp32 buffer that sums the weight's gradient under gradient accumulation fusion.

    None: autograd hands the gradient on, and DDP's hook adds it. So it is for Megatron-FSDP, which
    copies the gradient into a buffer that it makes later; and for a 16-bit buffer, which would
    round every microbatch's sum.
    """
    if not (layer.gradient_accumulation_fusion and weight.requires_grad):
        return None
    if not torch.is_grad_enabled() or hasattr(weight, "__fsdp_param__"):
        return None
    main_grad = getattr(weight, "main_grad", None)
    return main_grad if main_grad is not None and main_grad.dtype == torch.float32 else None


def add_to_main_grad(layer: Any, weight: Tensor) -> Tensor:
    """Returns the weight for a loss that hands its gradient to autograd.

    Under gradient accumulation fusion the gradient is added to main_grad there. DDP's hook would
    skip it in a step where another microbatch's loss has added its own.
    """
    return weight if main_grad_of(layer, weight) is None else _IntoMainGrad.apply(weight)


class _IntoMainGrad(torch.autograd.Function):
    """The weight, whose gradient is in main_grad already, or is added to it here.

    Autograd gets a stand-in for the gradient, so that hooks that wait for it run. Megatron's own
    linear layer does the same.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        weight = ctx.weight
        if grads[0] is not None:
            weight.main_grad.add_(grads[0])
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        # Autograd adds the stand-in to the gradient of a shared weight's other use.
        zeros = getattr(weight, "zero_out_wgrad", False)
        return torch.zeros_like(weight) if zeros else torch.empty_like(weight)
