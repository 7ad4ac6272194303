"""AdamW, its learning rate, and one gradient step over sharded and replicated parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import sum_gradients, sum_over_world
from .config import OptimizerConfig, TrainConfig
from .model import Decoder
from .ranks import Ranks


def make_optimizer(
    model: Decoder, config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Matrices decay, norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, fused=device.type == "cuda"
    )
    # AdamW makes its state in the first step; a checkpoint must find it before that.
    for parameter in parameters:
        step_device = device if device.type == "cuda" else "cpu"
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=step_device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warmup, then constant or a cosine down to a tenth. Steps count from 1."""
    optimizer = config.optimizer
    if step <= optimizer.warmup:
        return optimizer.lr * step / optimizer.warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    done = (step - optimizer.warmup) / max(1, config.steps - optimizer.warmup)
    return optimizer.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def sync_gradients(model: Decoder, ranks: Ranks, *, sequence_parallel: bool) -> None:
    """Make every gradient that of the mean loss over the global batch.

    Each tp rank's loss is the mean over its dp rank's tokens, so dp ranks average. The shards
    of the vocabulary are complete after that. The body's gradients are, too, unless the tp
    ranks saw different sequences: then each holds a part, and the parts add up.
    """
    average = 1.0 / ranks.dp
    sum_gradients(model.sharded_parameters().values(), ranks.dp_group, average)
    body_group = dist.group.WORLD if sequence_parallel else ranks.dp_group
    assert body_group is not None
    sum_gradients(model.body_parameters().values(), body_group, average)


@dataclass(frozen=True)
class StepTotals:
    """What all ranks agree on at the end of a step."""

    loss: float
    grad_norm: float
    stop: bool


def agree(model: Decoder, ranks: Ranks, loss: Tensor, stop: bool) -> StepTotals:
    """Loss, gradient norm and the wish to stop, in the step's one small all-reduce.

    Shards are summed over tp (and counted once: each of dp copies adds 1/dp); replicated
    gradients are the same on every rank and need no sum.
    """
    sharded = _squared_norm(model.sharded_parameters().values())
    total_loss, sharded_total, num_stops = sum_over_world(
        [loss.detach() / ranks.world_size, sharded / ranks.dp, float(stop)], ranks.device
    )
    replicated = float(_squared_norm(model.body_parameters().values()))
    return StepTotals(total_loss, math.sqrt(sharded_total + replicated), num_stops > 0)


def clip_gradients(model: Decoder, grad_norm: float, limit: float | None) -> None:
    if limit is None or grad_norm <= limit:
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(limit / grad_norm)


def _squared_norm(parameters: Iterable[torch.nn.Parameter]) -> Tensor:
    squares = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
        for p in parameters
        if p.grad is not None
    ]
    return torch.stack(squares).sum()
