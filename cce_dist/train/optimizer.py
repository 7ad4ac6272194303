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
from .fsdp import is_fully_sharded, local_part
from .model import Decoder
from .ranks import Ranks

# Numbers whose fp64 copy exists at a time: the whole head's would be larger than the head.
NORM_CHUNK = 2**24


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
    ranks saw different sequences: then each holds a part, and the parts add up. FSDP has
    averaged over dp in the backward.
    """
    body = _local_grads(model.body_parameters().values())
    if is_fully_sharded(model):
        if sequence_parallel:
            sum_gradients(body, ranks.tp_group, 1.0)
        return
    average = 1.0 / ranks.dp
    sum_gradients(_local_grads(model.sharded_parameters().values()), ranks.dp_group, average)
    body_group = dist.group.WORLD if sequence_parallel else ranks.dp_group
    assert body_group is not None
    sum_gradients(body, body_group, average)


@dataclass(frozen=True)
class StepTotals:
    """What all ranks agree on at the end of a step."""

    loss: float
    grad_norm: float
    stop: bool
    peak_memory: int  # bytes, of the rank with the most


def agree(model: Decoder, ranks: Ranks, loss: Tensor, stop: bool, peak_memory: int) -> StepTotals:
    """Loss, gradient norm, the wish to stop and memory, in the step's one small all-reduce.

    Every number of the gradient counts once in its norm. Rows of the vocabulary are summed over
    tp, and each of dp copies adds 1/dp; FSDP leaves no copies over dp, but tp of the body.
    Without it the body's gradients are the same on every rank and need no sum.
    """
    vocabulary = _squared_norm(model.sharded_parameters().values())
    body = _squared_norm(model.body_parameters().values())
    is_split = is_fully_sharded(model)
    part = vocabulary + body / ranks.tp if is_split else vocabulary / ranks.dp
    # A maximum within a sum: each rank adds to a place of its own.
    peaks = torch.zeros(ranks.world_size, dtype=torch.float64)
    peaks[ranks.rank] = peak_memory
    total_loss, squared_norm, num_stops, *all_peaks = sum_over_world(
        [loss.detach() / ranks.world_size, part, float(stop), peaks], ranks.device
    )
    if not is_split:
        squared_norm += float(body)
    return StepTotals(total_loss, math.sqrt(squared_norm), num_stops > 0, int(max(all_peaks)))


def clip_gradients(model: Decoder, grad_norm: float, limit: float | None) -> None:
    if limit is None or grad_norm <= limit:
        return
    for grad in _local_grads(model.parameters()):
        grad.mul_(limit / grad_norm)


def _local_grads(parameters: Iterable[torch.nn.Parameter]) -> list[Tensor]:
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def _squared_norm(parameters: Iterable[torch.nn.Parameter]) -> Tensor:
    squares = [
        torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
        for grad in _local_grads(parameters)
        for chunk in grad.flatten().split(NORM_CHUNK)
    ]
    return torch.stack(squares).sum()
