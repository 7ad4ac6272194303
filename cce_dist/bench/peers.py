"""Other implementations, each behind one signature: (hidden, weight, targets) -> mean loss.

A peer is imported when it is built. If that fails, a row of the results says why.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .golden import LossFunction, dense_loss
from .inputs import IGNORE_INDEX

# Tokens in a chunk: QuACK's own default.
QUACK_CHUNK = 4096


def compiled_dense(softcap: float | None = None) -> LossFunction:
    return torch.compile(functools.partial(dense_loss, softcap=softcap), dynamic=False)


def compiled_sum() -> LossFunction:
    """Returns the compiled dense recipe, which sums the loss of a chunk's tokens."""

    def loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = (hidden @ weight.T).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")

    return torch.compile(loss_sum, dynamic=False)


def num_counted(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum().clamp(min=1)


def mean_of(nll: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of per-token losses over the tokens that are not ignored."""
    counted = targets != IGNORE_INDEX
    return torch.where(counted, nll.float(), 0.0).sum() / num_counted(targets)


def chunked_by_autograd(num_chunks: int) -> LossFunction:
    """Returns a loss in chunks of tokens, like torchtune's; autograd keeps the logits."""
    loss_sum = compiled_sum()

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunks = zip(hidden.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
        total = torch.stack([loss_sum(rows, weight, ids) for rows, ids in chunks]).sum()
        return total / num_counted(targets)

    return loss


def chunked_in_forward(num_chunks: int) -> LossFunction:
    """Returns a loss in chunks of tokens, like torchtitan's; a chunk's backward follows at once."""
    loss_sum = compiled_sum()

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _ChunkedInForward.apply(hidden, weight, targets, loss_sum, num_chunks)
        chunks = zip(hidden.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
        total = torch.stack([loss_sum(rows, weight, ids) for rows, ids in chunks]).sum()
        return total / num_counted(targets)

    return loss


class _ChunkedInForward(torch.autograd.Function):
    """A loss in chunks whose forward computes both gradients.

    The hidden gradient is kept in fp32; the weight gradient adds up in its own dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss_sum: Callable[..., Tensor],
        num_chunks: int,
    ) -> Tensor:
        count = num_counted(targets)
        total = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        leaf = weight.detach().requires_grad_()
        chunks = zip(
            hidden.detach().chunk(num_chunks),
            targets.chunk(num_chunks),
            grad_hidden.chunk(num_chunks),
            strict=True,
        )
        for chunk, ids, grad in chunks:
            with torch.enable_grad():
                rows = chunk.detach().requires_grad_()
                loss = loss_sum(rows, leaf, ids) / count
            loss.backward()
            total += loss.detach()
            assert rows.grad is not None
            grad.copy_(rows.grad)
        ctx.save_for_backward(grad_hidden.to(hidden.dtype), leaf.grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight.mul_(grad_loss), None, None, None


def torch_chunked() -> LossFunction:
    """Returns torch 2.13's F.linear_cross_entropy with its default chunks."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:
        raise ImportError(f"torch {torch.__version__} has no LinearCrossEntropyOptions")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.linear_cross_entropy(  # pyright: ignore[reportAttributeAccessIssue]
            hidden, weight, targets, options=options()
        )

    return loss


def apple(impl: str, softcap: float | None = None) -> LossFunction:
    """Returns Apple's Cut Cross-Entropy with one of its presets."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return functools.partial(function, ignore_index=IGNORE_INDEX, impl=impl, softcap=softcap)


def liger(chunk_factor: int | None, softcap: float | None = None) -> LossFunction:
    """Returns Liger's Triton kernel with chunks of `chunk_factor` times its default.

    Its default chunk has about N D / V tokens.
    """
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    function = module.LigerFusedLinearCrossEntropyFunction
    parameters = list(inspect.signature(function.forward).parameters.values())[1:]
    options: dict[str, object] = {"ignore_index": IGNORE_INDEX, "reduction": "mean"}
    if chunk_factor is not None:
        options["chunk_mem_const"] = chunk_factor
    if softcap is not None:
        options["softcap"] = softcap
    unknown = sorted(set(options) - {parameter.name for parameter in parameters})
    if unknown:
        raise ImportError(f"this version of Liger takes no {unknown}")
    # An autograd function takes no keywords; its first three arguments are hidden, weight, targets.
    other_args = [options.get(parameter.name, parameter.default) for parameter in parameters[3:]]

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return function.apply(hidden, weight, targets, *other_args)[0]

    return loss


def liger_sm90(keeps_logits: bool) -> LossFunction:
    """Returns Liger's Hopper kernels, with the 16-bit logits of all tokens or without logits."""
    folder = "liger_kernel.ops.cutedsl.ops"
    if keeps_logits:
        module = importlib.import_module(f"{folder}.fused_linear_cross_entropy_sm90")
        function = module.LigerFusedLinearCrossEntropySM90Function

        def with_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            output = function.apply(hidden, weight, targets, IGNORE_INDEX, "mean")
            return output[0] if isinstance(output, tuple) else output

        return with_logits
    # Switch off Liger's check of the targets, which waits for the device.
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"
    module = importlib.import_module(f"{folder}.fused_scaled_cross_entropy_sm90")
    scaled = module.LigerFusedScaledCrossEntropySM90Function

    def without_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        output = scaled.apply(hidden, weight, targets, 1.0, IGNORE_INDEX)
        return mean_of(output[0] if isinstance(output, tuple) else output, targets)

    return without_logits


def quack() -> LossFunction:
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return functools.partial(
        function, chunk_size=QUACK_CHUNK, ignore_index=IGNORE_INDEX, tuned=False
    )


def fla(fp32: bool) -> LossFunction:
    """Returns flash-linear-attention's loss in 8 chunks.

    With `fp32` the weight gradient adds up in fp32.
    """
    module = importlib.import_module("fla.modules.fused_linear_cross_entropy")
    loss = module.FusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX, num_chunks=8, accumulate_grad_in_fp32=fp32
    )
    return lambda hidden, weight, targets: loss(hidden, targets, weight)


def unsloth() -> LossFunction:
    module = importlib.import_module("unsloth_zoo.fused_losses.cross_entropy_loss")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return module.unsloth_fused_ce_loss(
            None,
            hidden[None],
            weight,
            None,
            targets[None],
            n_items=(targets != IGNORE_INDEX).sum(),
            shift_labels=False,
        )

    return loss


def mgmalek() -> LossFunction:
    """Returns the loss of github.com/mgmalek/efficient_cross_entropy in 8 chunks.

    The folder that contains its checkout must be on Python's path.
    """
    function = importlib.import_module(
        "efficient_cross_entropy.modules"
    ).FusedCrossEntropyLossFunction
    return lambda hidden, weight, targets: function.apply(
        hidden, weight, targets, 8, IGNORE_INDEX, "mean"
    )


def verl() -> LossFunction:
    """Returns verl's Triton kernel.

    It knows no ignored targets, so these cost as much as others.
    """
    function = importlib.import_module(
        "verl.utils.kernel.linear_cross_entropy"
    ).linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_p, _ = function(hidden, weight, targets.clamp(min=0), 1.0, "none", None)
        return mean_of(-log_p, targets)

    return loss


def flash_attention() -> LossFunction:
    """Returns flash-attn's Triton kernel on full logits."""
    function = importlib.import_module("flash_attn.ops.triton.cross_entropy").cross_entropy_loss

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = hidden @ weight.T
        nll, _ = function(logits, targets, ignore_index=IGNORE_INDEX, inplace_backward=True)
        return mean_of(nll, targets)

    return loss


def transformer_engine() -> LossFunction:
    """Returns TransformerEngine's Triton kernel on full logits."""
    module = importlib.import_module("transformer_engine.pytorch.cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = (hidden @ weight.T)[None]
        nll = module.parallel_cross_entropy(logits, targets[None], 0.0, False, None, IGNORE_INDEX)
        return mean_of(nll.flatten(), targets)

    return loss


def megatron() -> LossFunction:
    """Returns Megatron-core's fused cross-entropy on full logits, with a group of one rank."""
    function = importlib.import_module(
        "megatron.core.fusions.fused_cross_entropy"
    ).fused_vocab_parallel_cross_entropy
    group = _one_rank()

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = (hidden @ weight.T)[:, None]
        nll = function(logits, targets.clamp(min=0)[:, None], group)
        return mean_of(nll.flatten(), targets)

    return loss


def _one_rank() -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)
    return dist.group.WORLD


# Peers with a compiler of their own come last: they are the likeliest to end a process.
PEERS: dict[str, Callable[[], LossFunction]] = {
    "torch-compile": compiled_dense,
    "cce": lambda: apple("cce"),
    "cce-kahan-full-c": lambda: apple("cce_kahan_full_c"),
    "cce-exact": lambda: apple("cce_exact"),
    "flash-attn": flash_attention,
    "liger-8": lambda: liger(8),
    "liger": lambda: liger(None),
    "fla-16bit": lambda: fla(False),
    "fla": lambda: fla(True),
    "torchtune-8": lambda: chunked_by_autograd(8),
    "torchtitan-8": lambda: chunked_in_forward(8),
    "unsloth": unsloth,
    "mgmalek-8": mgmalek,
    "verl": verl,
    "transformer-engine": transformer_engine,
    "megatron": megatron,
    "torch-chunked": torch_chunked,
    "liger-sm90-logits": lambda: liger_sm90(True),
    "liger-sm90": lambda: liger_sm90(False),
    "quack": quack,
}

# Peers that take a softcap.
SOFTCAPPED: dict[str, Callable[[float], LossFunction]] = {
    "torch-compile": compiled_dense,
    "cce": lambda softcap: apple("cce", softcap),
    "cce-kahan-full-c": lambda softcap: apple("cce_kahan_full_c", softcap),
    "cce-exact": lambda softcap: apple("cce_exact", softcap),
    "liger-8": lambda softcap: liger(8, softcap),
    "liger": lambda softcap: liger(None, softcap),
}


def build_peer(name: str, softcap: float | None) -> LossFunction:
    """Builds the loss of a peer.

    Raises:
        NotImplementedError: the peer takes no softcap.
    """
    if softcap is None:
        return PEERS[name]()
    if name not in SOFTCAPPED:
        raise NotImplementedError(f"{name} takes no softcap, as the benchmark calls it")
    return SOFTCAPPED[name](softcap)
