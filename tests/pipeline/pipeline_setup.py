"""A small model on the ranks of a pipeline, and the same model in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from cce_dist import LossOptions, VocabShard
from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.pipeline.head import TIMEOUT, PipelineHead
from cce_dist.pipeline.schedules.torch_schedules import VocabOverPipeline
from cce_dist.pipeline.schedules.vocab_1f1b import ScheduleVocab1F1B
from cce_dist.train.pipeline import step as training

DIM, SEQUENCE, MICROBATCH = 16, 5, 2
SCHEDULES: dict[str, type] = {**training.SCHEDULES}
PLANNED = "planned"


@dataclass(frozen=True)
class Setup:
    schedule: str = "1f1b"
    microbatches: int = 8
    vocab_size: int = 67  # no multiple of any number of ranks
    options: LossOptions = field(default_factory=lambda: LossOptions(reduction="sum"))
    static: bool = True  # stages know shapes beforehand
    scale_grads: bool = False
    bias: bool = False
    tensor: int = 1  # tensor-parallel ranks of a stage
    sequence_parallel: bool = False
    tied: bool = False  # the input embedding is the head's weight
    slow_start: bool | None = None
    paced: bool | None = None
    ignored: bool = False  # all tokens of the first microbatch, and half of the second's
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def stages_of_a_rank(self) -> int:
        return 1 if self.schedule in ("gpipe", "1f1b", PLANNED) else 2


@dataclass
class Model:
    """The whole of it, on every rank."""

    blocks: list[nn.Module]
    weight: Tensor  # [V, D]
    bias: Tensor | None
    x: Tensor  # [M * MICROBATCH, SEQUENCE, D]
    targets: Tensor
    tokens: Tensor  # as targets

    @classmethod
    def make(cls, setup: Setup, stages: int) -> Model:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(stages)]
        weight = torch.randn(setup.vocab_size, DIM)
        bias = torch.randn(setup.vocab_size) if setup.bias else None
        batch = setup.microbatches * MICROBATCH
        x = torch.randn(batch, SEQUENCE, DIM)
        targets = torch.randint(0, setup.vocab_size, (batch, SEQUENCE))
        targets[torch.rand(targets.shape) < 0.1] = -100
        if setup.ignored:
            targets[: MICROBATCH + MICROBATCH // 2] = -100
        to: dict[str, Any] = {"device": setup.device, "dtype": setup.dtype}
        return cls(
            [block.to(**to) for block in blocks],
            weight.to(**to),
            None if bias is None else bias.to(**to),
            x.to(**to),
            targets.to(setup.device),
            torch.randint(0, setup.vocab_size, targets.shape).to(setup.device),
        )

    def in_dtype(self, dtype: torch.dtype) -> Model:
        return Model(
            [copy.deepcopy(block).to(dtype) for block in self.blocks],
            self.weight.to(dtype),
            None if self.bias is None else self.bias.to(dtype),
            self.x.to(dtype),
            self.targets,
            self.tokens,
        )

    def whole(self, setup: Setup, logits: torch.dtype | None = None) -> dict[str, Tensor]:
        """Losses of microbatches and gradients of their scaled sum, from dense logits of the
        model's dtype, or another, and a softmax in fp32 at least. Gradients of the head are summed
        over microbatches in fp32, as Megatron's main_grad."""
        blocks = copy.deepcopy(self.blocks)
        losses, of_tokens, weights, biases = [], [], [], []
        inputs = (self.tokens if setup.tied else self.x).split(MICROBATCH)
        for x, targets in zip(inputs, self.targets.split(MICROBATCH), strict=True):
            weights.append(weight := self.weight.clone().requires_grad_())
            # Of the last positions nothing is predicted.
            shift = setup.options.shift
            targets = F.pad(targets[:, shift:], (0, shift), value=-100)
            bias = None
            if self.bias is not None:
                biases.append(bias := self.bias.clone().requires_grad_())
            if setup.tied:
                x = 3 * F.embedding(x, weight)
            for block in blocks:
                x = block(x)
            into = logits or x.dtype
            z = F.linear(x.to(into), weight.to(into), None if bias is None else bias.to(into))
            z = z.to(torch.promote_types(z.dtype, torch.float32))
            if setup.options.softcap is not None:
                z = setup.options.softcap * torch.tanh(z / setup.options.softcap)
            z = setup.options.logit_scale * z
            each = F.cross_entropy(
                z.flatten(0, 1),
                targets.flatten(),
                reduction="none",
                label_smoothing=setup.options.label_smoothing,
            )
            counts = targets.flatten() != -100
            if setup.options.z_loss:
                squares = torch.logsumexp(z.flatten(0, 1), -1).square()
                each = each + setup.options.z_loss * squares * counts
            # Of no tokens the mean is 0.
            count = counts.sum().clamp_min(1) if setup.options.reduction == "mean" else 1
            loss = each.sum() / count
            # One after the other, as schedules do: sums in 16 bits depend on the order.
            loss.backward()
            losses.append(loss.detach())
            of_tokens.append(each.detach())
        found = {
            f"{i}.{name}": p.grad for i, b in enumerate(blocks) for name, p in b.named_parameters()
        }
        found |= {"losses": torch.stack(losses), "of tokens": torch.stack(of_tokens)}
        for name, each in (("weight", weights), ("bias", biases)):
            if each:
                wide = torch.promote_types(each[0].dtype, torch.float32)
                found[name] = sum(x.grad.to(wide) for x in each).to(each[0].dtype)
        return {key: value for key, value in found.items() if value is not None}


def stage_indices(setup: Setup, rank: int, size: int) -> list[int]:
    if setup.schedule == "zbv":
        return [rank, 2 * size - 1 - rank]
    return [rank + size * i for i in range(setup.stages_of_a_rank)]


def grid_of(group: Any, setup: Setup) -> tuple[Any, Any]:
    """This rank's pipeline and the tensor-parallel ranks of its stage: of ranks in rows of the
    latter."""
    if setup.tensor == 1:
        return group, None
    ranks, tensor = dist.get_process_group_ranks(group), setup.tensor
    columns = [dist.new_group(ranks[i::tensor]) for i in range(tensor)]
    rows = [dist.new_group(ranks[i : i + tensor]) for i in range(0, len(ranks), tensor)]
    rank = dist.get_rank(group)
    return columns[rank % tensor], rows[rank // tensor]


def slice_of(setup: Setup, x: Tensor, tensor_group: Any) -> Tensor:
    """Of every microbatch what this rank has under sequence parallelism."""
    if not setup.sequence_parallel:
        return x
    parts = x.view(setup.microbatches, MICROBATCH, *x.shape[1:]).chunk(setup.tensor, 1)
    # A microbatch of one sequence would be a view; torch 2.11's stages compare strides.
    return parts[dist.get_rank(tensor_group)].flatten(0, 1).contiguous()


def rows_of(setup: Setup) -> int:
    """Of a microbatch, on a rank."""
    return MICROBATCH // setup.tensor if setup.sequence_parallel else MICROBATCH


class First(nn.Module):
    """The first stage where the embedding is tied; scaled, as Gemma's is."""

    def __init__(self, embedding: TiedEmbedding, block: nn.Module) -> None:
        super().__init__()
        self.embedding, self.block = embedding, block

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(3 * self.embedding(tokens))


def make_stages(
    setup: Setup, model: Model, group: Any, embedding: TiedEmbedding | None = None
) -> list[Any]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = size * setup.stages_of_a_rank
    stages = []
    for index in stage_indices(setup, rank, size):
        how: dict[str, Any] = {}
        if setup.static:
            empty = model.x.new_zeros(rows_of(setup), SEQUENCE, DIM)
            how["input_args"] = empty.clone().requires_grad_(index > 0)
            if index == 0 and embedding is not None:
                how["input_args"] = model.tokens[:MICROBATCH]
            how["output_args"] = empty.clone().requires_grad_()
        device = model.x.device
        block = model.blocks[index]
        if index == 0 and embedding is not None:
            block = First(embedding, block)
        stages.append(PipelineStage(block, index, total, device, group=group, **how))
    return stages


def make_schedule(setup: Setup, stages: list[Any], loss: Any) -> Any:
    given = stages[0] if setup.stages_of_a_rank == 1 else stages
    kind = SCHEDULES[setup.schedule]
    return kind(given, setup.microbatches, loss_fn=loss, scale_grads=setup.scale_grads)


def make_served(
    setup: Setup, stages: list[Any], head: PipelineHead, embedding: TiedEmbedding | None = None
) -> tuple[Any, Any, Callable[..., Any]]:
    """A schedule, who has the losses of all microbatches, and the context of a step."""
    if setup.schedule == PLANNED:
        how: dict[str, Any] = {"slow_start": setup.slow_start, "scale_grads": setup.scale_grads}
        count = setup.microbatches
        schedule = ScheduleVocab1F1B(stages[0], count, head, embedding=embedding, **how)
        return schedule, schedule, lambda **_: contextlib.nullcontext()
    loss = VocabOverPipeline(head, embedding=embedding)
    schedule = make_schedule(setup, stages, loss)
    return schedule, loss, functools.partial(loss.serving, schedule)


def shards(vocab_size: int, size: int) -> list[VocabShard]:
    """Uneven, the first rank's the largest, and the last one's rows padded."""
    cuts = [
        0,
        *(vocab_size // 2 + i * (vocab_size // 2) // size for i in range(1, size)),
        vocab_size,
    ]
    return [VocabShard(a, b, vocab_size) for a, b in pairwise(cuts)]


def make_head(
    setup: Setup, model: Model, group: Any, pipeline: Any = None, tensor: Any = None, **more: Any
) -> PipelineHead:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shard = shards(setup.vocab_size, size)[rank]
    rows = slice(shard.start, shard.stop)
    weight = model.weight[rows].clone()
    bias = None if model.bias is None else model.bias[rows].clone().requires_grad_()
    if rank == size - 1:
        # Rows of padding.
        weight = torch.cat([weight, weight.new_full((3, DIM), 7.0)])
        shard = VocabShard(shard.start, shard.stop + 3, setup.vocab_size)
        if bias is not None:
            bias = torch.cat([bias.detach(), bias.new_full((3,), 7.0)]).requires_grad_()
    return PipelineHead(
        weight.requires_grad_(),
        group=pipeline or group,
        vocab_group=group,
        tensor_group=tensor,
        sequence_parallel=setup.sequence_parallel,
        hidden_shape=(rows_of(setup), SEQUENCE, DIM),
        vocab_shard=shard,
        bias=bias,
        options=setup.options,
        paced=setup.paced,
        **more,
    )


def arguments(
    stages: list[Any], model: Model, *, tied: bool = False
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Of `schedule.step`, on this rank."""
    given = model.tokens if tied else model.x
    args = (given,) if any(stage.is_first for stage in stages) else ()
    kwargs = {"target": model.targets} if any(stage.is_last for stage in stages) else {}
    return args, kwargs


@dataclass
class Job:
    """A rank's stages under a schedule that has the head, before a step."""

    setup: Setup
    model: Model
    head: PipelineHead
    embedding: TiedEmbedding | None
    stages: list[Any]
    schedule: Any
    loss: Any  # has the losses of all microbatches
    serving: Callable[..., Any]
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]

    def step(self, losses: list[Tensor] | None = None) -> None:
        with self.serving():
            self.schedule.step(*self.args, losses=losses, **self.kwargs)

    def evaluate(self) -> None:
        with self.serving(backward=False), torch.no_grad():
            self.schedule.eval(*self.args, **self.kwargs)

    @property
    def losses(self) -> Tensor:
        return torch.stack(self.loss.losses)

    def close(self) -> None:
        self.head.close()
        if self.embedding is not None:
            self.embedding.close()


def make_job(group: Any, setup: Setup, *, timeout: timedelta = TIMEOUT, **of_head: Any) -> Job:
    pipeline, tensor = grid_of(group, setup)
    model = Model.make(setup, dist.get_world_size(pipeline) * setup.stages_of_a_rank)
    head = make_head(setup, model, group, pipeline, tensor, timeout=timeout, **of_head)
    embedding = TiedEmbedding(head, timeout=timeout) if setup.tied else None
    stages = make_stages(setup, model, pipeline, embedding)
    served = make_served(setup, stages, head, embedding)
    mine = replace(model, x=slice_of(setup, model.x, tensor))
    given = arguments(stages, mine, tied=setup.tied)
    return Job(setup, model, head, embedding, stages, *served, *given)


def require_close(found: dict[str, Tensor | None], right: dict[str, Tensor], rel: float) -> None:
    for key, value in found.items():
        assert value is not None, key
        # Where no token counts both are 0.
        error, size = (value.double() - right[key].double()).norm(), right[key].double().norm()
        assert float(error) <= rel * float(size), (key, float(error), float(size))
