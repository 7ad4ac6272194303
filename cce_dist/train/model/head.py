"""The LM head: this library's sharded loss, and a dense loss to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cce_dist import Filter, LossOptions, LossOutput, Screen, VocabShard, linear_cross_entropy
from cce_dist.train.collectives import GatherRows, SumPartials
from cce_dist.train.config.schema import LossConfig, TrainConfig
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

    @property
    def bounds(self) -> list[tuple[int, int]]:
        ranks = range(self.group.size())
        shards = [VocabShard.chunked(self.vocab_size, rank, len(ranks)) for rank in ranks]
        return [(shard.start, shard.stop) for shard in shards]


def head_layout(config: TrainConfig, ranks: Ranks) -> HeadLayout:
    """Returns the layout of the head without a pipeline, or on its last stage."""
    return HeadLayout(ranks.tp_group, config.data.vocab_size, config.parallel.sequence_parallel)


def make_head_loss(config: TrainConfig, layout: HeadLayout, kind: str) -> HeadLoss:
    """Makes the head's loss. Both kinds, "cce" and "dense", compute the same objective."""
    dtype = getattr(torch, config.dtype)
    compute = _dense_loss if kind == "dense" else _cce_loss

    def head_loss(
        hidden: Tensor, weight: Tensor, targets: Tensor, stats: Sequence[Stat] = ()
    ) -> LossOutput:
        with torch.autocast(hidden.device.type, enabled=False):
            return compute(
                hidden.to(dtype), weight.to(dtype), targets, config.loss, layout, tuple(stats)
            )

    return head_loss


def head_loss_of(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor | LossOutput], dtype: torch.dtype
) -> HeadLoss:
    """Wraps another loss of hidden, weight and targets for a training run.

    The run requests no statistics from `loss`, and logs the statistics that `loss` returns.
    """

    def head_loss(
        hidden: Tensor, weight: Tensor, targets: Tensor, stats: Sequence[Stat] = ()
    ) -> LossOutput:
        with torch.autocast(hidden.device.type, enabled=False):
            output = loss(hidden.to(dtype), weight.to(dtype), targets)
            return output if isinstance(output, LossOutput) else LossOutput(loss=output)

    return head_loss


def _cce_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    config: LossConfig,
    layout: HeadLayout,
    stats: tuple[Stat, ...],
) -> LossOutput:
    options = loss_options(config)
    out = linear_cross_entropy(
        hidden,
        weight,
        targets,
        group=layout.group,
        vocab_shard=layout.shard,
        sequence_parallel=layout.sequence_parallel,
        stats=stats,
        softcap=options.softcap,
        logit_scale=options.logit_scale,
        label_smoothing=options.label_smoothing,
        z_loss=options.z_loss,
        gradient=options.gradient,
        filter=options.filter,
        logits=options.logits,
        screen=options.screen,
        backend=options.backend,
        workspace_bytes=options.workspace_bytes,
    )
    return LossOutput(loss=out) if isinstance(out, Tensor) else out


def make_token_nll(
    config: TrainConfig, layout: HeadLayout
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Makes a function: hidden, weight shard, targets -> nll [N] fp32, in nats.

    The softmax is that of training's logits; the objective's further terms are left out.
    """
    dtype, loss = getattr(torch, config.dtype), config.loss

    def token_nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            nll = linear_cross_entropy(
                hidden.to(dtype),
                weight.to(dtype),
                targets,
                group=layout.group,
                vocab_shard=layout.shard,
                sequence_parallel=layout.sequence_parallel,
                reduction="none",
                softcap=loss.softcap,
                logit_scale=loss.logit_scale,
                gradient="exact",
                backend=loss.backend,
                workspace_bytes=loss.workspace_bytes,
            )
        assert isinstance(nll, Tensor)
        return nll

    return token_nll


def loss_options(config: LossConfig) -> LossOptions:
    """Returns the configuration's options of `linear_cross_entropy`."""
    return LossOptions(
        softcap=config.softcap,
        logit_scale=config.logit_scale,
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
        gradient=config.gradient,
        filter=Filter(keep=config.filter.keep, tail=config.filter.tail, eps=config.filter.eps),
        logits=config.logits,
        screen=Screen(
            dtype=config.screen.dtype,
            max_kept=config.screen.max_kept,
            max_error=config.screen.max_error,
        ),
        backend=config.backend,
        workspace_bytes=config.workspace_bytes,
    )


def _dense_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    config: LossConfig,
    layout: HeadLayout,
    stats: tuple[Stat, ...],
) -> LossOutput:
    """Computes the loss by the usual recipe: gather the head, all logits, softmax in fp32."""
    slices = layout.sequence_parallel
    gathered = GatherRows.apply(weight, layout.group, layout.bounds, slices)
    if slices:
        rank, size = layout.group.rank(), layout.group.size()
        targets_here = targets.chunk(size)[rank]
    else:
        targets_here = targets
    logits = _transform_logits(hidden @ gathered.T, config)
    total = _objective(logits, targets_here, config).sum() / targets.numel()
    if slices:
        total = SumPartials.apply(total, layout.group)
    return LossOutput(loss=total)


def _transform_logits(logits: Tensor, config: LossConfig) -> Tensor:
    if logits.dtype != torch.float64:
        logits = logits.float()
    if config.softcap is not None:
        logits = config.softcap * torch.tanh(logits / config.softcap)
    return config.logit_scale * logits


def _objective(logits: Tensor, targets: Tensor, config: LossConfig) -> Tensor:
    loss = F.cross_entropy(
        logits, targets, label_smoothing=config.label_smoothing, reduction="none"
    )
    if config.z_loss:
        loss = loss + config.z_loss * logits.logsumexp(-1).square()
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
    gathered = GatherRows.apply(weight.to(dtype), layout.group, layout.bounds, False).double()
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
