"""The training step over a pipeline, by torch's schedules or by `ScheduleVocab1F1B`.

docs/guide/training.md#pipelines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    schedules,
)

from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.pipeline.head import PipelineHead
from cce_dist.pipeline.schedules.torch_schedules import (
    VocabOverPipeline,
    forwards_alone,
    prepare_mode,
)
from cce_dist.pipeline.schedules.vocab_1f1b import ScheduleVocab1F1B
from cce_dist.planner.orders.vocab_1f1b import Times
from cce_dist.train.collectives import sum_gradients
from cce_dist.train.config.pipeline import ONE_STAGE, SPLIT_BACKWARD, Layout, ScheduleName
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.errors import ConfigError
from cce_dist.train.model.decoder import Decoder, count_parameters
from cce_dist.train.model.head import head_layout, make_head_loss
from cce_dist.train.ranks import Ranks, own_group

from .stages import Stage

SCHEDULES: dict[ScheduleName, type] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "looped": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def check_split_backward(config: TrainConfig) -> None:
    """Checks that torch can split the backward as the schedule does.

    Raises:
        ConfigError: the schedule computes the weights' gradients apart from the others. torch
            before 2.13 cannot do so for an autograd.Function (torch issue 166577).
    """
    parallel = config.parallel
    version = tuple(int(number) for number in torch.__version__.split(".")[:2])
    splits = parallel.schedule in SPLIT_BACKWARD and not parallel.vocab_over_pipeline
    if splits and version < (2, 13):
        raise ConfigError(
            f"parallel.schedule={parallel.schedule} with the head on the last stage needs torch "
            f"2.13, got {torch.__version__}, which cannot make the weights' gradients of an "
            "autograd.Function by themselves: use parallel.vocab_over_pipeline=true, or another "
            "schedule"
        )


class Pipeline:
    """A rank's stages and its part of the head, under the schedule of the configuration.

    Args:
        model: the rank's part of the decoder, on its device.
        head: "cce", or "dense", which is on the last stage.
    Collectives: makes the head's groups. Every rank of the job makes its `Pipeline`, and calls each
        method, at the same time.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, model: Decoder, head: str) -> None:
        assert ranks.pp_group is not None
        if head == "cce":
            check_split_backward(config)
        self.config, self.ranks, self.model = config, ranks, model
        self.layout, self.group = model.layout, ranks.pp_group
        self.head: PipelineHead | None = None
        # The head's own weight in 16 bits, a copy of the master weight.
        self._copied: nn.Parameter | None = None
        self._embedding: TiedEmbedding | None = None
        self._copies = _group_of_copies(ranks, model)
        # If a pass fails, torch logs the passes of all ranks, and the error would be hard to find.
        logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)
        _connect([ranks.tp_group, ranks.pp_group, self._copies], ranks.device)
        if self.layout.over_pipeline:
            weight, dtype = model.head_weight, getattr(torch, config.dtype)
            if weight.dtype != dtype:
                weight = self._copied = nn.Parameter(weight.detach().to(dtype))
            self.head = self._make_head(weight)
            if config.model.tied:
                self._embedding = TiedEmbedding(self.head, timeout=ranks.timeout)
        self._loss: VocabOverPipeline | None = None
        self.schedule = self._make_schedule(self._make_stages(), head)

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Runs forward and backward of all microbatches, [batch, sequence] int64 each.

        Returns: the loss [] on the ranks of the last stage, 0 elsewhere: the sum over the ranks of
            a data-parallel rank is tp times its loss.
        """
        losses: list[Tensor] = []
        self._copy_head()
        arguments, keywords = self._arguments(ids, targets)
        with self._in_mode(backward=True):
            self.schedule.step(*arguments, losses=losses, return_outputs=False, **keywords)
        self._take_head_gradient()
        if self._copies is not None:
            grad = self.model.head_weight.grad
            assert grad is not None
            sum_gradients([grad], self._copies, 1.0)
        return self._mean(losses)

    @torch.no_grad()
    def evaluate(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Runs a forward on every rank of the pipeline, without gradients.

        Returns:
            loss: [], mean over the batch.
            hidden: [batch, sequence, dim], the head's input.
        """
        losses: list[Tensor] = []
        self._copy_head()
        arguments, keywords = self._arguments(ids, targets)
        with self._in_mode(backward=False):
            hidden = self.schedule.eval(*arguments, losses=losses, **keywords)
        loss = self._mean(losses).float()
        if not self.model.has_last:
            shape = (ids.shape[0] // self._slices, ids.shape[1], self.config.model.dim)
            hidden = ids.new_empty(shape, dtype=getattr(torch, self.config.dtype))
        hidden = hidden.contiguous()
        for tensor in (loss, hidden):
            dist.broadcast(tensor, group=self.group, group_src=self.layout.last_rank)
        return loss, self._gather_sequences(hidden)

    def close(self) -> None:
        """Destroys the groups that the constructor made."""
        if self._embedding is not None:
            self._embedding.close()
        if self.head is not None:
            self.head.close()
        if self._copies is not None:
            dist.destroy_process_group(self._copies)

    @property
    def _slices(self) -> int:
        return self.ranks.tp if self.config.parallel.sequence_parallel else 1

    def _make_head(self, weight: nn.Parameter) -> PipelineHead:
        """Makes a head with rows over pp x tp ranks; its loss is a microbatch's mean."""
        config, ranks, count = self.config, self.ranks, self.layout.microbatches
        sequences = config.batch // (count * self._slices)
        return PipelineHead(
            weight,
            group=self.group,
            vocab_group=ranks.vocab_group,
            tensor_group=ranks.tp_group if ranks.tp > 1 else None,
            sequence_parallel=self._slices > 1,
            hidden_shape=(sequences, config.data.sequence_length, config.model.dim),
            vocab_shard=self.model.shards[self.model.head_name],
            options=config.loss,
            loss_scale=1 / count,
            timeout=ranks.timeout,
        )

    def _make_stages(self) -> list[PipelineStage]:
        stages = []
        for index in self.model.held:
            module = Stage(self.model, index, embedding=self._embedding, has_head=self.head is None)
            input, output = self._examples(index)
            stages.append(
                PipelineStage(
                    module.to(self.ranks.device),
                    index,
                    self.layout.num_stages,
                    self.ranks.device,
                    input_args=input,
                    output_args=output,
                    group=self.group,
                )
            )
        return stages

    def _examples(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns a stage's example input and output; without them torch runs it once more."""
        config, device = self.config, self.ranks.device
        sequences = config.batch // self.layout.microbatches
        length = config.data.sequence_length
        hidden = torch.zeros(sequences // self._slices, length, config.model.dim, device=device)
        input, output = hidden.clone().requires_grad_(), hidden
        if index == 0:
            input = torch.zeros(sequences, length, dtype=torch.int64, device=device)
        if index == self.layout.num_stages - 1:
            output = hidden.to(getattr(torch, config.dtype))
        return input, output.clone().requires_grad_()

    def _make_schedule(self, stages: list[PipelineStage], head: str) -> Any:
        name, count = self.layout.schedule, self.layout.microbatches
        if self.head is not None and name == "vocab_1f1b":
            times, embedding = planned_times(self.config, self.layout), self._embedding
            return ScheduleVocab1F1B(
                stages[0], count, self.head, embedding=embedding, times=times, scale_grads=False
            )
        loss: Any = self._loss_of_last_stage(head)
        if self.head is not None:
            loss = self._loss = VocabOverPipeline(self.head, embedding=self._embedding)
        stage_or_stages = stages[0] if name in ONE_STAGE else stages
        return SCHEDULES[name](stage_or_stages, count, loss_fn=loss, scale_grads=False)

    def _in_mode(self, *, backward: bool) -> AbstractContextManager[None]:
        """Returns the context of a step, or of an evaluation: in it every rank serves the head."""
        if self._loss is not None:
            return self._loss.serving(self.schedule, backward=backward)
        prepare_mode(self.schedule, backward=backward)
        return nullcontext() if backward else forwards_alone(self.schedule)

    def _loss_of_last_stage(self, head: str) -> Callable[[Tensor, Tensor], Tensor]:
        head_loss = make_head_loss(self.config, head_layout(self.config, self.ranks), head)

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            weight = self.model.head_weight
            out = head_loss(hidden.flatten(0, 1), weight, targets.flatten(), ())
            return out.loss / self.layout.microbatches

        return loss

    def _arguments(
        self, ids: Tensor, targets: Tensor
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Returns the schedule's arguments on this rank."""
        model = self.model
        return (ids,) if model.has_first else (), {"target": targets} if model.has_last else {}

    def _mean(self, losses: list[Tensor]) -> Tensor:
        if not self.model.has_last:
            return torch.zeros((), device=self.ranks.device)
        total = torch.stack(losses).detach().sum()
        return total if self.head is None else total / self.layout.microbatches

    @torch.no_grad()
    def _copy_head(self) -> None:
        if self._copied is not None:
            self._copied.copy_(self.model.head_weight)

    def _take_head_gradient(self) -> None:
        if self._copied is not None and self._copied.grad is not None:
            self.model.head_weight.grad = self._copied.grad.to(self.model.head_weight.dtype)
            self._copied.grad = None

    def _gather_sequences(self, hidden: Tensor) -> Tensor:
        """Gathers the sequences of all tp ranks, each of which has a slice of every microbatch."""
        if self._slices == 1:
            return hidden
        slices = [torch.empty_like(hidden) for _ in range(self._slices)]
        dist.all_gather(slices, hidden, group=self.ranks.tp_group)
        split = [each.unflatten(0, (self.layout.microbatches, -1)) for each in slices]
        return torch.cat(split, 1).flatten(0, 1)


def planned_times(config: TrainConfig, layout: Layout) -> Times:
    """Returns times of a token's passes on a rank, in multiplications of the forward."""
    size, dim = count_parameters(config), config.model.dim
    layers = config.model.layers
    # Keys and values of half a sequence on average.
    body = size.total - size.vocabulary + layers * config.data.sequence_length * dim
    parallel = config.parallel
    forward = body / layout.num_stages / (parallel.tp if parallel.sequence_parallel else 1)
    statistics = config.data.vocab_size * dim / (layout.pp * parallel.tp)
    return Times(forward, 2 * forward, statistics, 3 * statistics)


def _connect(groups: list[dist.ProcessGroup | None], device: torch.device) -> None:
    """Makes NCCL's communicators now; their first use is in a step, beside a second thread."""
    for group in groups:
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def _group_of_copies(ranks: Ranks, model: Decoder) -> dist.ProcessGroup | None:
    """Returns the group of the first and the last stage's ranks, if both hold a tied weight.

    Other ranks get None.
    """
    if not model.is_copied:
        return None
    grid = torch.arange(ranks.world_size).view(ranks.dp, ranks.pp, ranks.tp)
    ends = grid[:, [0, model.layout.last_rank]].transpose(1, 2).flatten(0, 1)
    return own_group(ranks.rank, ends.tolist(), ranks.timeout)
