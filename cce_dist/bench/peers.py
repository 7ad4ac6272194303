"""Other implementations, each behind one signature: (hidden, weight, targets) -> mean loss.

A peer is imported when it is built. If that fails, a row of the results says why.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .golden import LossFunction, dense_loss, mean_of, num_counted
from .inputs import IGNORE_INDEX
from .rank_methods import Setup, all_tokens, logits_of

# Tokens in a chunk: QuACK's own default.
QUACK_CHUNK = 4096
# Chunks of the peers whose caller chooses the number.
NUM_CHUNKS = 8


def compiled_dense(setup: Setup) -> LossFunction:
    recipe = functools.partial(dense_loss, softcap=setup.softcap, entropy_bonus=setup.entropy_bonus)
    return torch.compile(recipe, dynamic=False)


def compiled_sum() -> LossFunction:
    """Returns the compiled dense recipe, which sums the loss of a chunk's tokens."""

    def loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = (hidden @ weight.T).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")

    return torch.compile(loss_sum, dynamic=False)


def chunked_by_autograd(_: Setup) -> LossFunction:
    """Returns a loss in chunks of tokens, like torchtune's; autograd keeps the logits."""
    return functools.partial(_sum_chunks, compiled_sum())


def _sum_chunks(loss_sum: LossFunction, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    chunks = zip(hidden.chunk(NUM_CHUNKS), targets.chunk(NUM_CHUNKS), strict=True)
    total = torch.stack([loss_sum(rows, weight, ids) for rows, ids in chunks]).sum()
    return total / num_counted(targets)


def chunked_in_forward(_: Setup) -> LossFunction:
    """Returns a loss in chunks of tokens, like torchtitan's; a chunk's backward follows at once."""
    loss_sum = compiled_sum()

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _ChunkedInForward.apply(hidden, weight, targets, loss_sum)
        return _sum_chunks(loss_sum, hidden, weight, targets)

    return loss


class _ChunkedInForward(torch.autograd.Function):
    """A loss in chunks whose forward computes both gradients.

    The hidden gradient is kept in fp32; the weight gradient adds up in its own dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, loss_sum: Callable[..., Tensor]
    ) -> Tensor:
        count = num_counted(targets)
        total = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        leaf = weight.detach().requires_grad_()
        tensors = (hidden.detach(), targets, grad_hidden)
        for chunk, ids, grad in zip(*(x.chunk(NUM_CHUNKS) for x in tensors), strict=True):
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
        return grad_hidden * grad_loss, grad_weight.mul_(grad_loss), None, None


def torch_chunked(_: Setup) -> LossFunction:
    """Returns torch 2.13's F.linear_cross_entropy with its default chunks."""
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:
        raise ImportError(f"torch {torch.__version__} has no LinearCrossEntropyOptions")
    function = F.linear_cross_entropy  # pyright: ignore[reportAttributeAccessIssue]
    return lambda hidden, weight, targets: function(hidden, weight, targets, options=options())


def apple(impl: str, setup: Setup) -> LossFunction:
    """Returns Apple's Cut Cross-Entropy with one of its presets."""
    options: dict[str, Any] = {"impl": impl, "softcap": setup.softcap}
    if (place := setup.place) is not None:
        split = resolve_name("cut_cross_entropy.vocab_parallel:VocabParallelOptions")
        options["vocab_parallel_options"] = split(place.rows.start, place.rows.stop, place.group)
    function = resolve_name("cut_cross_entropy:linear_cross_entropy")
    return functools.partial(function, ignore_index=IGNORE_INDEX, **options)


def liger(chunk_factor: int | None, setup: Setup) -> LossFunction:
    """Returns Liger's Triton kernel with chunks of `chunk_factor` times its default.

    Its default chunk has about N D / V tokens.
    """
    folder = "liger_kernel.ops.fused_linear_cross_entropy"
    function = resolve_name(f"{folder}:LigerFusedLinearCrossEntropyFunction")
    parameters = list(inspect.signature(function.forward).parameters.values())[1:]
    options: dict[str, object] = {"ignore_index": IGNORE_INDEX, "reduction": "mean"}
    if chunk_factor is not None:
        options["chunk_mem_const"] = chunk_factor
    if setup.softcap is not None:
        options["softcap"] = setup.softcap
    unknown = sorted(set(options) - {parameter.name for parameter in parameters})
    if unknown:
        raise ImportError(f"this version of Liger takes no {unknown}")
    # An autograd function takes no keywords; its first three arguments are hidden, weight, targets.
    other_args = [options.get(parameter.name, parameter.default) for parameter in parameters[3:]]
    return lambda *tensors: function.apply(*tensors, *other_args)[0]


def liger_sm90_logits(_: Setup) -> LossFunction:
    """Returns Liger's Hopper kernels with the 16-bit logits of all tokens."""
    folder = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    function = resolve_name(f"{folder}:LigerFusedLinearCrossEntropySM90Function")
    return lambda *tensors: _first(function.apply(*tensors, IGNORE_INDEX, "mean"))


def liger_sm90(_: Setup) -> LossFunction:
    """Returns Liger's Hopper kernels without logits."""
    # Switch off Liger's check of the targets, which waits for the device.
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"
    folder = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    function = resolve_name(f"{folder}:LigerFusedScaledCrossEntropySM90Function")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        nll = _first(function.apply(hidden, weight, targets, 1.0, IGNORE_INDEX))
        return mean_of(nll, targets)

    return loss


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def liger_tp(setup: Setup) -> LossFunction:
    """Returns Liger's tensor-parallel loss, for an install without its native kernels."""
    folder = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    function = resolve_name(f"{folder}:LigerFusedLinearScaledCrossEntropyTPFunction")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return mean_of(function.apply(hidden, weight, targets, setup.group), targets)

    return loss


def liger_logits(setup: Setup) -> LossFunction:
    """Returns Liger's vocab-parallel kernel on a rank's logits."""
    folder = "liger_kernel.transformers.vocab_parallel_cross_entropy"
    make = resolve_name(f"{folder}:LigerVocabParallelCrossEntropy")
    cross_entropy = make(ignore_index=IGNORE_INDEX, reduction="none")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = logits_of(hidden, weight, setup.place)[:, None]
        return mean_of(cross_entropy(logits, targets[:, None], setup.group).flatten(), targets)

    return loss


def quack(_: Setup) -> LossFunction:
    function = resolve_name("quack.linear_cross_entropy:chunked_linear_cross_entropy")
    return functools.partial(
        function, chunk_size=QUACK_CHUNK, ignore_index=IGNORE_INDEX, tuned=False
    )


def trl(logits: str | None, setup: Setup) -> LossFunction:
    """Returns what TRL's SFTTrainer computes after the layers: loss, entropy and accuracy.

    Args: logits: option of `cce_dist.integrations.trl`; None: TRL's own chunks.
    """
    from cce_dist.integrations.trl import patched

    layers: Any = _Layers(setup.softcap)
    add_head = resolve_name("trl.trainer.utils:add_fused_lm_head")
    add_head(layers, outputs=("log_probs", "entropy", "is_top1"))

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        layers.hidden, layers.weight = hidden, weight
        ours = {"backend": setup.backend, "logits": logits}
        with contextlib.nullcontext() if logits is None else patched(**ours):
            return layers.forward(shift_labels=targets[None], fused_lm_head=True).loss

    return loss


class _Layers:
    """A transformers model whose layers are done, as TRL's fused head sees it."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]

    def __init__(self, softcap: float | None) -> None:
        self.config = SimpleNamespace(final_logit_softcapping=softcap)
        self.config.get_text_config = lambda: self.config

    def forward(self) -> None:
        """The fused head takes its place."""

    def base_model(self, use_cache: bool) -> SimpleNamespace:
        del use_cache
        return SimpleNamespace(last_hidden_state=self.hidden[None])

    def get_output_embeddings(self) -> SimpleNamespace:
        return SimpleNamespace(weight=self.weight, bias=None)


def fla(fp32: bool, _: Setup) -> LossFunction:
    """Returns flash-linear-attention's loss in chunks.

    With `fp32` the weight gradient adds up in fp32.
    """
    make = resolve_name("fla.modules.fused_linear_cross_entropy:FusedLinearCrossEntropyLoss")
    loss = make(ignore_index=IGNORE_INDEX, num_chunks=NUM_CHUNKS, accumulate_grad_in_fp32=fp32)
    return lambda hidden, weight, targets: loss(hidden, targets, weight)


def unsloth(_: Setup) -> LossFunction:
    function = resolve_name("unsloth_zoo.fused_losses.cross_entropy_loss:unsloth_fused_ce_loss")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        count = (targets != IGNORE_INDEX).sum()
        tensors = (None, hidden[None], weight, None, targets[None])
        return function(*tensors, n_items=count, shift_labels=False)

    return loss


def mgmalek(_: Setup) -> LossFunction:
    """Returns the loss of github.com/mgmalek/efficient_cross_entropy in chunks.

    The folder that contains its checkout must be on Python's path.
    """
    function = resolve_name("efficient_cross_entropy.modules:FusedCrossEntropyLossFunction")
    return lambda *tensors: function.apply(*tensors, NUM_CHUNKS, IGNORE_INDEX, "mean")


def verl(setup: Setup) -> LossFunction:
    """Returns verl's Triton kernel.

    It knows no ignored targets, so these cost as much as others. It does not sum the hidden
    gradient over ranks; this loss does.
    """
    function = resolve_name("verl.utils.kernel.linear_cross_entropy:linear_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows = all_tokens(hidden, setup.place)
        log_p, _ = function(rows, weight, targets.clamp(min=0), 1.0, "none", setup.group)
        return mean_of(-log_p, targets)

    return loss


def flash_attention(_: Setup) -> LossFunction:
    """Returns flash-attn's Triton kernel on full logits."""
    function = resolve_name("flash_attn.ops.triton.cross_entropy:cross_entropy_loss")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = hidden @ weight.T
        nll, _ = function(logits, targets, ignore_index=IGNORE_INDEX, inplace_backward=True)
        return mean_of(nll, targets)

    return loss


def transformer_engine(setup: Setup) -> LossFunction:
    """Returns TransformerEngine's Triton kernel on a rank's logits."""
    function = resolve_name("transformer_engine.pytorch.cross_entropy:parallel_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = logits_of(hidden, weight, setup.place)[None]
        nll = function(logits, targets[None], 0.0, False, setup.group, IGNORE_INDEX)
        return mean_of(nll.flatten(), targets)

    return loss


def megatron_fused(setup: Setup) -> LossFunction:
    """Returns Megatron-core's fused cross-entropy on a rank's logits."""
    folder = "megatron.core.fusions.fused_cross_entropy"
    return _megatron(resolve_name(f"{folder}:fused_vocab_parallel_cross_entropy"), setup)


def megatron(setup: Setup) -> LossFunction:
    """Returns Megatron-core's cross-entropy on a rank's logits; the fused one on one rank alone."""
    if setup.place is None:
        return megatron_fused(setup)
    function = resolve_name(
        "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"
    )
    return _megatron(functools.partial(function, label_smoothing=0.0), setup)


def _megatron(function: Callable[..., Tensor], setup: Setup) -> LossFunction:
    group = _one_rank() if setup.place is None else setup.group

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = logits_of(hidden, weight, setup.place)[:, None]
        nll = function(logits, targets.clamp(min=0)[:, None], tp_group=group)
        return mean_of(nll.flatten(), targets)

    return loss


def _one_rank() -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(dist.destroy_process_group)
    return dist.group.WORLD
