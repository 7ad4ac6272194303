"""Comparison of Megatron's head and loss with the patch that replaces them.

A name and a signature tell nothing about a fork with edited files, or about functions that other
code has wrapped. So Megatron's functions and the patch both run on a few tokens, once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patch.seams import Seams, describe

TOKENS = (2, 4)  # s, b
# Standard deviation and mean of the probe's logits: their log-sum-exp is far from 0.
DEVIATION, MEAN = 3.0, 4.0
# fp32 losses near 20 round by 2e-6; a z-loss of 1e-6 log-sum-exp^2 exceeds this tolerance.
LOSS_TOLERANCE = 1e-4
# Megatron's fused loss rounds this gradient to bf16.
GRADIENT_TOLERANCE = 2**-7
# The head's probe has logits up to this, which a softcap would change; bf16 gives them 8 bits.
LARGEST, LOGITS_TOLERANCE = 100.0, 2**-6
FORK = (
    "A fork has another function, or one that it calls is replaced; the patch leaves that out: "
    "run without megatron_patch"
)


def why_not_stock(model: Any, layer: Any, weight: Tensor, seams: Seams) -> str | None:
    """Tells how this model's head or loss differs from the patch; None: both give the same values.

    All ranks of the layer's tensor-parallel group call it.

    Args: weight: [V / tp, h], on a device whose tensors that group can send.
    Collectives: those of Megatron's loss on TOKENS; one of a number; under sequence parallelism an
        all-gather of TOKENS.
    """
    # A compiled model calls it once, too.
    head: Any = torch.compiler.disable(_why_another_head)
    loss: Any = torch.compiler.disable(_why_another_loss)
    return head(layer, weight, seams) or loss(model, layer.tp_group, weight, seams)


def _why_another_loss(model: Any, group: Any, weight: Tensor, seams: Seams) -> str | None:
    device, rank, columns = weight.device, group.rank(), len(weight)
    other = f"{describe(seams.loss)} is not the cross-entropy of its logits"
    generator = torch.Generator().manual_seed(0)
    size = group.size() * columns
    # The probe is the same on all ranks, so the reference needs no other rank.
    every = torch.randn(*TOKENS, size, generator=generator) * DEVIATION + MEAN
    labels = torch.randint(size, TOKENS, generator=generator).to(device)
    upstream = torch.rand(TOKENS, generator=generator).to(device)
    # Otherwise torch would compile fusions, for seconds.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.compiler.set_stance("force_eager"),
    ):
        logits = every.to(device).requires_grad_()
        right = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        ).view(TOKENS)
        (expected,) = torch.autograd.grad(right, logits, upstream)
        mine = slice(rank * columns, (rank + 1) * columns)
        # Megatron's loss writes into its logits: it takes them for a head's output.
        leaf = logits.detach()[..., mine].clone().requires_grad_()
        grad = torch.zeros_like(leaf)
        try:
            loss = seams.loss(model, labels.T.contiguous(), leaf.clone()).T
            if loss.requires_grad:
                (grad,) = torch.autograd.grad(loss, leaf, upstream)
        except RuntimeError as error:
            return f"{other}: for fp32 logits it raises {type(error).__name__}: {error}"
    off = (loss - right).detach().abs().max()
    grad_off = (grad - expected[..., mine]).abs().max()
    if off <= LOSS_TOLERANCE and grad_off <= GRADIENT_TOLERANCE:
        return None
    return (
        f"{other}: for the same logits it gives {float(loss.mean()):.6f}, cross-entropy "
        f"{float(right.mean()):.6f}, and their gradients differ by {float(grad_off):.2e}. {FORK}"
    )


def _why_another_head(layer: Any, weight: Tensor, seams: Seams) -> str | None:
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(weight.device.type, enabled=False),
    ):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, TOKENS[1], weight.shape[1], generator=generator)
        hidden = hidden.to(weight.device, weight.dtype)
        largest = torch.nn.functional.linear(hidden, weight).abs().amax().clamp_min(1e-3)
        if layer.tp_group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=layer.tp_group)
        hidden = hidden * (LARGEST / largest)
        expected = torch.nn.functional.linear(hidden, weight)
        output, bias = seams.forward(layer, hidden, weight, False)
        off = (output - expected).abs().max()
    if bias is None and off <= LOGITS_TOLERANCE * LARGEST:
        return None
    return (
        f"{describe(seams.forward)} does not give its input times the weight: logits up to "
        f"{LARGEST:g} are off by {float(off):.3g}. {FORK}"
    )


def device_of(group: Any) -> torch.device:
    """Returns a device whose tensors the group can send."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
