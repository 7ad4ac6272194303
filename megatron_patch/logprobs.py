"""Per-token log-probabilities of a patched model: an output processor of Megatron's GPTModel.

    model(ids, positions, mask, labels=targets, output_processor=megatron_patch.logprobs,
          output_processor_context=megatron_patch.LogprobOptions(temperature=0.8))

GPTModel calls an output processor in place of its own head and loss, and returns its result.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cce_dist import TokenLogprobs, TokenSupport, VocabShard, token_logprobs
from megatron_patch.deferred import DeferredLogits
from megatron_patch.errors import PatchError
from megatron_patch.head import MARK, add_to_main_grad, classes_of
from megatron_patch.options import PatchOptions

Stat = Literal["entropy", "sum_p2", "correct", "mean_logit"]


@dataclass(frozen=True)
class LogprobOptions:
    """Arguments of `cce_dist.token_logprobs`, in the shape of labels [b, s]."""

    temperature: float | Tensor = 1.0  # a Tensor: [b, s]
    stats: tuple[Stat, ...] = ()
    support: TokenSupport | None = None  # rows in the order of labels [b, s] flattened
    candidates: Tensor | None = None  # [b, s, K]
    top_k: int | None = None


def logprobs(
    *,
    hidden_states: Tensor,  # [s, b, h]; under sequence parallelism [s / tp, b, h]
    output_layer: Any,
    output_weight: Tensor | None,  # [V / tp, h]; None: the layer's own
    labels: Tensor | None,  # [b, s] ids, each at the position that predicts it
    compute_language_model_loss: Any,
    context: LogprobOptions | None = None,
    scale_logits: Any = None,
    **_: object,  # GPTModel passes more, which has no part in log-probabilities
) -> TokenLogprobs:
    """Computes log-probabilities of labels by the patched head; no rank makes logits.

    softcap, vocab_size, gradient, backend and workspace_bytes are those of `apply`. Tokens whose
    label is no class, such as -100, cost nothing and have 0. loss_mask is not read.
    Returns: fields [b, s], candidates and top_ids [b, s, K], the same bits on every rank.
    Raises:
        PatchError: the model is not patched; or options of `apply` have no meaning here.
        ValueError: an argument does not fit; the message says which.
    Collectives: those of `token_logprobs` over the layer's tensor-parallel group.
    """
    options = LogprobOptions() if context is None else context
    if not isinstance(options, LogprobOptions):
        raise ValueError(
            f"output_processor_context must be a LogprobOptions or None, got {type(options)}"
        )
    if labels is None:
        raise ValueError("labels must be given to megatron_patch.logprobs, got None")
    model = getattr(compute_language_model_loss, "__self__", None)
    if MARK not in vars(output_layer):
        raise PatchError(
            "megatron_patch.logprobs needs a patched model: call megatron_patch.apply(model), or "
            "apply() before it is built, without vocab_over_pipeline; got "
            f"{type(output_layer).__qualname__} without the patch"
        )
    scale = 1.0
    if scale_logits is not None:
        scaled = scale_logits(DeferredLogits.of(output_layer, hidden_states, output_weight, None))
        if not isinstance(scaled, DeferredLogits) or scaled.is_computed:
            raise PatchError(
                f"{type(model).__name__}: _scale_logits must multiply logits by a number, and did "
                "something else"
            )
        scale = scaled.call.scale
    result, _ = output_layer(
        hidden_states,
        weight=output_weight,
        labels=labels.transpose(0, 1).contiguous(),
        logit_scale=scale,
        model=model,
        compute=functools.partial(head_logprobs, wanted=options),
    )
    of_tokens = {name: x for name, x in result._asdict().items() if x is not None and x.dim() > 1}
    return result._replace(
        **{name: x.transpose(0, 1).contiguous() for name, x in of_tokens.items()}
    )


def head_logprobs(
    layer: Any,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,  # [s, b]
    scale: float,
    options: PatchOptions,
    *,
    wanted: LogprobOptions,
) -> TokenLogprobs:
    """Computes `logprobs` with fields [s, b, ...]. Args: as in `head_loss`."""
    if options.logits != "full" or options.check_ranks:
        name = "check_ranks" if options.check_ranks else "logits"
        raise PatchError(
            f"{name}={getattr(options, name)!r} has no log-probabilities: apply the patch without "
            "it, or read the losses"
        )
    size, rank = layer.tp_group.size(), layer.tp_group.rank()
    shard = VocabShard.even(weight.shape[0], rank, size, options.vocab_size)
    temperature, support = wanted.temperature, wanted.support
    if isinstance(temperature, Tensor) and temperature.dim() == 2:
        temperature = temperature.transpose(0, 1)
    candidates = wanted.candidates
    return token_logprobs(
        hidden,
        add_to_main_grad(layer, weight),
        classes_of(labels, shard),
        temperature=temperature,
        support=None if support is None else turn_support(support, labels.shape),
        candidates=None if candidates is None else candidates.transpose(0, 1),
        top_k=wanted.top_k,
        stats=wanted.stats,
        group=layer.tp_group if size > 1 else None,
        vocab_shard=shard,
        sequence_parallel=layer.sequence_parallel,
        softcap=options.softcap,
        logit_scale=scale,
        gradient=options.gradient,  # pyright: ignore[reportArgumentType]
        backend=options.loss.backend,
        workspace_bytes=options.workspace_bytes,
    )


def turn_support(support: TokenSupport, shape: torch.Size) -> TokenSupport:
    """Brings the rows of a support from the order of [b, s] flattened to that of [s, b]."""
    (length, batch), (offsets, ids) = shape, support
    if offsets.shape != (length * batch + 1,):
        return support  # token_logprobs refuses it by name
    rows = torch.arange(length * batch, device=ids.device).view(batch, length).T.reshape(-1)
    counts = offsets.diff()[rows]
    turned = torch.cat([offsets[:1], counts.cumsum(0)])
    # Each id moves by as much as its row's start.
    moved = (offsets[:-1][rows] - turned[:-1]).repeat_interleave(counts, output_size=ids.shape[0])
    return TokenSupport(turned, ids[moved + torch.arange(ids.shape[0], device=ids.device)])
