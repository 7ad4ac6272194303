"""The LM head: this library's sharded loss, and a dense loss to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cce_dist import LinearCrossEntropy, LossOptions, LossOutput, VocabShard
from cce_dist.train.collectives import GatherRows, SumPartials
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.ranks import Ranks

# Number of held-out tokens whose float64 logits exist at a time.
DENSE_CHUNK_TOKENS = 256

# The statistics that the job requests.
Stat = Literal["tail_mass", "screened"]
# hidden of this rank's tokens, weight shard, targets of all tokens, stats -> loss and stats
HeadLoss = Callable[[Tensor, Tensor, Tensor, Sequence[Stat]], LossOutput]


@dataclass(frozen=True)
class HeadLayout:
    """The ranks that share the vocabulary, for both losses."""

    group: dist.ProcessGroup
    vocab_size: int
    sequence_parallel: bool

    @property
    def shard(self) -> VocabShard:
        return VocabShard.chunked(self.vocab_size, self.group.rank(), self.group.size())


def head_layout(config: TrainConfig, ranks: Ranks) -> HeadLayout:
    """Returns the layout of the head without a pipeline, or on its last stage."""
    return HeadLayout(ranks.tp_group, config.data.vocab_size, config.parallel.sequence_parallel)


def make_head_loss(config: TrainConfig, layout: HeadLayout, kind: str) -> HeadLoss:
    """Makes the head's loss. Both kinds, "cce" and "dense", compute the same objective."""
    compute = _dense_loss if kind == "dense" else _cce_loss

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor, stats: Sequence[Stat]) -> Any:
        return compute(hidden, weight, targets, replace(config.loss, stats=tuple(stats)), layout)

    return _in_dtype(loss, getattr(torch, config.dtype))


def head_loss_of(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor | LossOutput], dtype: torch.dtype
) -> HeadLoss:
    """Wraps another loss of hidden, weight and targets for a training run.

    The run requests no statistics from `loss`, and logs the statistics that `loss` returns.
    """
    return _in_dtype(lambda hidden, weight, targets, stats: loss(hidden, weight, targets), dtype)


def make_token_nll(config: TrainConfig, layout: HeadLayout) -> HeadLoss:
    """Makes a function whose `loss` is each token's nll, [N] fp32, in nats.

    The softmax is that of training's logits; the objective's further terms are left out.
    """
    options = options_of_nll(config.loss)
    return _in_dtype(
        lambda hidden, weight, targets, stats: _cce_loss(hidden, weight, targets, options, layout),
        getattr(torch, config.dtype),
    )


def options_of_nll(loss: LossOptions) -> LossOptions:
    """Returns the options of `make_token_nll`, for training's."""
    return LossOptions(
        reduction="none",
        softcap=loss.softcap,
        logit_scale=loss.logit_scale,
        gradient="exact",
        backend=loss.backend,
        workspace_bytes=loss.workspace_bytes,
    )


def _in_dtype(
    loss: Callable[[Tensor, Tensor, Tensor, Sequence[Stat]], Tensor | LossOutput],
    dtype: torch.dtype,
) -> HeadLoss:
    def head_loss(
        hidden: Tensor, weight: Tensor, targets: Tensor, stats: Sequence[Stat] = ()
    ) -> LossOutput:
        with torch.autocast(hidden.device.type, enabled=False):
            output = loss(hidden.to(dtype), weight.to(dtype), targets, stats)
        return output if isinstance(output, LossOutput) else LossOutput(loss=output)

    return head_loss


def _cce_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions, layout: HeadLayout
) -> Tensor | LossOutput:
    options = replace(options, sequence_parallel=layout.sequence_parallel)
    loss = LinearCrossEntropy(group=layout.group, vocab_shard=layout.shard, **vars(options))
    return loss(hidden, weight, targets)


def _dense_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions, layout: HeadLayout
) -> Tensor:
    """Computes the loss by the usual recipe: gather the head, all logits, softmax in fp32."""
    slices = layout.sequence_parallel
    gathered = GatherRows.apply(weight, layout.group, layout.shard, slices)
    here = targets.chunk(layout.group.size())[layout.group.rank()] if slices else targets
    logits = _transform_logits(hidden @ gathered.T, options)
    total = _objective(logits, here, options).sum() / targets.numel()
    return SumPartials.apply(total, layout.group) if slices else total


def _transform_logits(logits: Tensor, options: LossOptions) -> Tensor:
    if logits.dtype != torch.float64:
        logits = logits.float()
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    return options.logit_scale * logits


def _objective(logits: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
    smoothing = options.label_smoothing
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    if options.z_loss:
        loss = loss + options.z_loss * logits.logsumexp(-1).square()
    return loss


@torch.no_grad()
def golden_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, config: TrainConfig, layout: HeadLayout
) -> float:
    """Computes the same objective from dense float64 logits, a few tokens at a time.

    hidden and weight are rounded to the training dtype first, as they are for the loss.
    Collectives: one all-gather of the weight; with sequence parallelism another one, of hidden.
    """
    dtype = getattr(torch, config.dtype)
    gathered = GatherRows.apply(weight.to(dtype), layout.group, layout.shard, False).double()
    if layout.sequence_parallel:
        slices = [torch.empty_like(hidden) for _ in range(layout.group.size())]
        dist.all_gather(slices, hidden, group=layout.group)
        hidden = torch.cat(slices)
    total = 0.0
    for first in range(0, targets.numel(), DENSE_CHUNK_TOKENS):
        tokens = slice(first, first + DENSE_CHUNK_TOKENS)
        logits = _transform_logits(hidden[tokens].to(dtype).double() @ gathered.T, config.loss)
        total += _objective(logits, targets[tokens], config.loss).sum().item()
    return total / targets.numel()
