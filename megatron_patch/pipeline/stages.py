"""Transfers between the stages of a pipeline whose vocabulary is over all of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.pipeline.comm.courier import Wait
from cce_dist.pipeline.comm.groups import timeout_of
from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.pipeline.head import PipelineHead
from cce_dist.planner.orders.circles import require_no_circle
from cce_dist.planner.orders.vocab_1f1b import Pass, Times, plan_slow_start, plan_vocab_order
from megatron_patch.errors import PatchError
from megatron_patch.pipeline.rows import Rows
from megatron_patch.pipeline.tied import AHEAD
from megatron_patch.seams import parallel_state

# A stage leaves this many sent hidden states unawaited: their receiver has begun with the one
# before by then.
_UNAWAITED = 2


class Pipeline:
    """The head over one pipeline, the order of its passes, and the transfers between neighbours.

    Args:
        decoder: this stage's layers. The ratio of their size to the rows' gives the order of
            passes; the result does not depend on it.
        hidden_shape: [s, b, h] of a microbatch on a rank.
    Collectives: makes groups: every rank of the job constructs its `Pipeline` at the same time.
    """

    def __init__(
        self, rows: Rows, decoder: Any, hidden_shape: tuple[int, ...], *, config: Any
    ) -> None:
        state, options = parallel_state(), rows.options
        group = state.get_pipeline_model_parallel_group()
        tensor = state.get_tensor_model_parallel_group()
        splits = tensor.size() > 1
        # Megatron's flag is --distributed-timeout-minutes.
        timeout = timeout_of(group, rows.weight.device)
        self.head = PipelineHead(
            rows.weight,
            group=group,
            vocab_group=state.get_model_parallel_group() if splits else None,
            tensor_group=tensor if splits else None,
            sequence_parallel=splits and config.sequence_parallel,
            hidden_shape=hidden_shape,
            vocab_shard=rows.shard,
            options=options.loss,
            timeout=timeout,
            quantize_once=options.quantize_once,
        )
        self.embedding = TiedEmbedding(self.head, timeout=timeout) if rows.is_tied else None
        self.rank, self.size = group.rank(), group.size()
        self.last = self.size - 1
        self._device = rows.weight.device
        self._dtype = config.pipeline_dtype or torch.get_default_dtype()
        # Megatron's own sends wait for the receiver, and the receiver may wait for a later pass of
        # this stage.
        self._neighbours = self.head.neighbours()
        self._sent: dict[bool, deque[tuple[Wait, Tensor]]] = {}
        # By direction, True for forward: the number of tensors to come, and the next tensor.
        self._to_come: dict[bool, int] = {}
        self._next: dict[bool, tuple[Tensor, Wait]] = {}
        self._times = _times_of(rows, decoder, group, config)
        self._orders: dict[tuple[int, bool], list[Pass]] = {}
        self._kinds: set[tuple[Any, ...]] = set()
        # After a failed step ranks are at different passes.
        self.is_broken = False

    @property
    def described(self) -> str:
        """Shape and dtype of the hidden states that stages send, for messages."""
        return f"{list(self.head.hidden_shape)} {self._dtype}"

    def order(self, num_microbatches: int, *, trains: bool) -> list[Pass]:
        """Returns the order of this rank's passes.

        A kernel or communicator comes to the device at its first use, and may wait there for all
        work that the device has begun. So the first step with these shapes, and the first
        evaluation, begin with microbatches whose passes wait for no rank that waits for this one.
        """
        kind = (trains, self.head.hidden_shape)
        key = (num_microbatches, kind not in self._kinds)
        self._kinds.add(kind)
        if key not in self._orders:
            embeds = self.embedding is not None
            plan = plan_slow_start if key[1] else plan_vocab_order
            orders = plan(self.size, num_microbatches, self._times, embeds=embeds, weighs=True)
            require_no_circle(orders, ahead=AHEAD, unawaited=_UNAWAITED)
            self._orders[key] = orders[self.rank]
        return self._orders[key]

    def start_step(self, num_microbatches: int, *, trains: bool) -> None:
        """Prepares for a step's passes."""
        self._to_come = {
            True: 0 if self.rank == 0 else num_microbatches,
            False: 0 if self.rank == self.last or not trains else num_microbatches,
        }

    def receive_forward(self) -> Tensor | None:
        return self._receive(forward=True)

    def receive_backward(self) -> Tensor | None:
        return self._receive(forward=False)

    def send_forward(self, hidden: Tensor) -> None:
        self._send(hidden, forward=True)

    def send_backward(self, grad: Tensor | None) -> None:
        self._send(grad, forward=False)

    def finish_sends(self) -> None:
        for sent in self._sent.values():
            _await(sent, 0)

    def _receive(self, *, forward: bool) -> Tensor | None:
        """Receives a tensor that requires grad; returns None without a neighbour on that side."""
        if self.rank == (0 if forward else self.last):
            return None
        tensor, wait = self._next.pop(forward, None) or self._expect(forward)
        wait()
        if self._to_come[forward]:
            # The tensor arrives while this stage computes.
            self._next[forward] = self._expect(forward)
        return tensor

    def _expect(self, forward: bool) -> tuple[Tensor, Wait]:
        self._to_come[forward] -= 1
        shape = self.head.hidden_shape
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device, requires_grad=True)
        return tensor, self._neighbours.receive(tensor.detach(), forward=forward)

    def _send(self, tensor: Tensor | None, *, forward: bool) -> None:
        if tensor is None or self.rank == (self.last if forward else 0):
            return
        # Megatron frees an output's memory by giving the tensor other data; this alias keeps it.
        tensor = tensor.detach().contiguous()
        sent = self._sent.setdefault(forward, deque())
        _await(sent, _UNAWAITED - 1)
        sent.append((self._neighbours.send(tensor, forward=forward), tensor))


def _await(sent: deque[tuple[Wait, Tensor]], at_most: int) -> None:
    """Waits for the oldest sends, until at most so many are left unawaited."""
    while len(sent) > at_most:
        wait, _ = sent.popleft()
        wait()


def _times_of(rows: Rows, decoder: Any, group: Any, config: Any) -> Times:
    """Estimates a pass's times from the largest stage's parameters; the same on every rank."""
    everyone: list[Any] = [None] * group.size()
    mine = sum(x.numel() for x in decoder.parameters()), rows.weight.requires_grad
    dist.all_gather_object(everyone, mine, group=group)
    sizes, trained = zip(*everyone, strict=True)
    if len(set(trained)) > 1:
        stages = [stage for stage, trains in enumerate(trained) if not trains]
        raise PatchError(
            f"output_layer.weight is frozen on the stages {stages} alone: with vocab_over_pipeline "
            "every stage has rows of it: freeze it on all stages, or on none"
        )
    head = rows.weight.numel() / max(*sizes, 1)
    again = getattr(config, "recompute_granularity", None) == "full"
    return Times(forward=1.0, backward=3.0 if again else 2.0, statistics=head, gradients=3 * head)
