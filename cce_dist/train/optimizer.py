"""AdamW, its learning rate, and one gradient step over sharded and replicated parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from cce_dist.train.config.schema import OptimizerConfig, TrainConfig
from cce_dist.train.model.decoder import Decoder
from cce_dist.train.model.fsdp import local_shard

from .collectives import sum_gradients, sum_over_world
from .errors import JobError
from .ranks import Ranks

# So many numbers have a float64 copy at a time: a copy of the whole head would exceed the head.
NORM_CHUNK = 2**24


def make_optimizer(
    model: Decoder, config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Makes AdamW; matrices decay, norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, fused=device.type == "cuda"
    )
    # AdamW would make its state in the first step; loading a checkpoint needs the state before.
    for parameter in parameters:
        step_device = device if device.type == "cuda" else "cpu"
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=step_device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def learning_rate(step: int, config: TrainConfig) -> float:
    """Returns the rate: linear warmup, then constant or a cosine to a tenth. Steps count from 1."""
    optimizer = config.optimizer
    if step <= optimizer.warmup:
        return optimizer.lr * step / optimizer.warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    done = (step - optimizer.warmup) / max(1, config.steps - optimizer.warmup)
    return optimizer.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def sync_gradients(model: Decoder, ranks: Ranks, *, sequence_parallel: bool) -> None:
    """Makes every gradient the gradient of the mean loss over the global batch.

    Each tp rank's loss is the mean over its dp rank's tokens, so dp ranks average. After that the
    gradients of the vocabulary's shards are complete. So are the body's gradients, unless the tp
    ranks saw different sequences: then each rank holds a part, and the parts are summed. FSDP has
    averaged over dp in the backward.
    """
    body = _local_grads(model.body_parameters().values())
    if isinstance(model, FSDPModule):
        if sequence_parallel:
            sum_gradients(body, ranks.tp_group, 1.0)
        return
    average = 1.0 / ranks.dp
    sum_gradients(_local_grads(model.sharded_parameters().values()), ranks.dp_group, average)
    body_group = ranks.stage_group if sequence_parallel else ranks.dp_group
    sum_gradients(body, body_group, average)


@dataclass(frozen=True)
class StepTotals:
    """Totals over all ranks at the end of a step."""

    loss: float
    grad_norm: float
    stop: bool
    peaks: list[int]  # each rank's peak memory in bytes


def agree(
    model: Decoder, ranks: Ranks, loss: Tensor, stop: bool, peak_memory: int, step: int
) -> StepTotals:
    """Exchanges loss, gradient norm, the wish to stop, memory and step in one small all-reduce.

    Every element of the gradient counts once in its norm. Several ranks have the same elements: all
    tp ranks have the body's, all dp ranks have the same without FSDP, and two ranks of a pipeline
    may have a tied weight.

    Args:
        loss: this rank's part; the sum over all ranks is the mean over the global batch.
    Raises:
        JobError: on every rank, if ranks are in different steps.
    """
    vocabulary = _squared_norm(model.sharded_parameters().values()) / (1 + model.is_copied)
    body = _squared_norm(model.body_parameters().values()) / ranks.tp
    squared_norm_here = (vocabulary + body) / (1 if isinstance(model, FSDPModule) else ranks.dp)
    # Each rank adds to its own place, so that the sum also gives each rank's number.
    each = torch.zeros(2, ranks.world_size, dtype=torch.float64)
    each[0, ranks.rank], each[1, ranks.rank] = peak_memory, step
    total_loss, squared_norm, num_stops, *of_ranks = sum_over_world(
        [loss.detach(), squared_norm_here, float(stop), each], ranks.device
    )
    peaks, steps = of_ranks[: ranks.world_size], [int(x) for x in of_ranks[ranks.world_size :]]
    if len(set(steps)) > 1:
        raise JobError(f"every rank must be in the same step, got by rank: {steps}")
    return StepTotals(
        total_loss, math.sqrt(squared_norm), num_stops > 0, [int(peak) for peak in peaks]
    )


def clip_gradients(model: Decoder, grad_norm: float, limit: float | None) -> None:
    if limit is None or grad_norm <= limit:
        return
    for grad in _local_grads(model.parameters()):
        grad.mul_(limit / grad_norm)


def _local_grads(parameters: Iterable[torch.nn.Parameter]) -> list[Tensor]:
    return [local_shard(p.grad) for p in parameters if p.grad is not None]


def _squared_norm(parameters: Iterable[torch.nn.Parameter]) -> Tensor:
    squares = [
        torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
        for grad in _local_grads(parameters)
        for chunk in grad.flatten().split(NORM_CHUNK)
    ]
    # A rank of a pipeline may have no rows of the vocabulary, or no layer.
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
