"""A schedule of torch.distributed.pipelining that includes the head's phases.

It needs no thread, and no rank waits for the head while it has other work.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    _Action,
    _PipelineScheduleRuntime,
)

from cce_dist.pipeline.checks import (
    check_same,
    check_scalar,
    check_step,
    mark_broken,
    refuse_broken,
    refuse_loss_kwargs,
)
from cce_dist.pipeline.comm.courier import Wait, mark
from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.pipeline.head import PipelineHead
from cce_dist.pipeline.schedules.server import Waiting, check_calls
from cce_dist.pipeline.schedules.torch_schedules import (
    connect_stages,
    forwards_alone,
    observe_passes,
    prepare_mode,
    without_dry_run,
)
from cce_dist.planner.orders.circles import require_no_circle
from cce_dist.planner.orders.vocab_1f1b import Kind, Pass, Times, plan_slow_start, plan_vocab_order

# torch has no user-defined actions. OVERLAP_F_B occurs in DualPipeV's schedules alone, so ours can
# use it; the action inside it names the phase.
_KIND: dict[Any, Kind] = {FORWARD: "S", FULL_BACKWARD: "T", UNSHARD: "E", RESHARD: "G"}
# torch's own transfers between stages.
_SENDS, _RECEIVES = (SEND_F, SEND_B), (RECV_F, RECV_B)
# Actions of torch 2.15 that wait for a send.
_WAITS = ("WAIT_SEND_F", "WAIT_SEND_B")
# A rank that needs no hidden gradients leaves this many of their sums unawaited.
_UNAWAITED = 2


class ScheduleVocab1F1B(_PipelineScheduleRuntime):
    """1F1B with the vocabulary over all ranks: forward, backward, log-sum-exp, gradients in turns.

        head = PipelineHead(weight, group=pipeline, hidden_shape=(2, 512, 2304), loss_scale=1 / 8)
        schedule = ScheduleVocab1F1B(stage, 8, head, scale_grads=False)
        schedule.step(tokens, losses=losses)  # or .step(target=...), .eval(...); on every rank

    Args:
        stage: this rank's only stage.
        n_microbatches: a rank begins with at most ranks + 2 forwards, and holds that many
            microbatches between forward and backward, if the head takes no longer than two stages
            and `times` have no latency (otherwise see planner/orders/vocab_1f1b.py). 1F1B's first
            rank holds one for each rank.
        head: a `PipelineHead` over the stage's group. After a step weight.grad includes the step's
            gradient.
        embedding: a `TiedEmbedding`, which every rank makes and the first stage's module calls.
        times: durations of a microbatch's passes on a rank, in any unit. They give the order of
            passes; the result does not depend on them.
        slow_start: the first step and the first evaluation run two microbatches, one after the
            other, before the other microbatches: a GPU loads the stages' kernels at first use, and
            may then wait for all work that it has begun. None: True on GPUs. It changes the order
            in which the gradient of a tied embedding is summed.
        scale_grads: as in torch's schedules, and for the head too.
        **chunking: of torch's schedules: how a batch is split.
    Raises:
        ValueError: the head is over other ranks; or ranks would wait for one another by `times`.
        RuntimeError: an earlier step failed.
    Collectives: the head's and the stages', each kind in the order of microbatches on all ranks.
        With a paced head the schedule makes the groups of `head.neighbours`: every rank of the job
        makes its schedule at the same time.
    Source: docs/design/pipelines.md; arXiv:2411.05288.
    """

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        head: PipelineHead,
        *,
        embedding: TiedEmbedding | None = None,
        times: Times = Times(),  # noqa: B008 - frozen
        slow_start: bool | None = None,
        scale_grads: bool = True,
        **chunking: Any,
    ) -> None:
        check_scalar(head.options)
        if stage.group_size != head.size or stage.num_stages != head.size:
            raise ValueError(
                f"head must be over the stages' group and each rank have one stage, got a head of "
                f"{head.size} ranks, a group of {stage.group_size} and {stage.num_stages} stages"
            )
        super().__init__(
            [stage], n_microbatches, loss_fn=self._post, scale_grads=scale_grads, **chunking
        )
        self.head, self.root, self.embedding = head, stage.num_stages - 1, embedding
        self.losses: list[Tensor] = []  # of the last step's microbatches, on every rank
        self.infers = False
        self._agreed = False
        self._connected: weakref.WeakSet[Any] = weakref.WeakSet()
        self._called = self._forwards = 0
        self._shown: dict[int, Tensor] = {}
        self._unawaited: list[int] = []
        self._sent: list[Wait] = []
        self._step_start: Any = None  # event behind all work before the step
        embeds = embedding is not None
        self._orders = [
            plan(head.size, n_microbatches, times, embeds=embeds)
            for plan in (plan_slow_start, plan_vocab_order)
        ]
        for orders in self._orders:
            require_no_circle(orders)
        if slow_start is None:
            slow_start = head.weight.device.type == "cuda"
        # The first step, and the first evaluation, run in the order that starts slowly.
        self._run_before: set[bool] = set() if slow_start else {False, True}
        self._lowered: list[list[Pass]] | None = None
        if head.paced:
            head.neighbours()
        self._lower(self._orders[1])
        self.register_custom_function(OVERLAP_F_B, self._run_phase)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        refuse_broken(self.head, self._stages)
        if not self._agreed:
            check_same(self.head.vocab_group, {"n_microbatches": self._n_microbatches})
            self._agreed = True
        mark_broken(self.head, self._stages, True)
        self.losses = []
        self._called = self._forwards = 0
        answers = [self] if self.embedding is None else [self, self.embedding]
        self._lower(self._orders[self._has_backward in self._run_before])
        self._step_start = mark(self.head.weight.device)
        if not self.head.paced:
            connect_stages(self._stages, self._connected)
        prepare_mode(self, backward=self._has_backward)
        self.head.start_step(record=self._has_backward)
        with (
            without_dry_run(self._stages, answers),
            observe_passes(self._stages, self._forwarded),
            nullcontext() if self._has_backward else forwards_alone(self),
        ):
            result = super().step(*args, **kwargs)
        while self._sent:
            self._sent.pop()()
        self._await_sums(0)
        if self.embedding is not None:
            self.embedding.finish_step()
        self.head.finish_step(self._n_microbatches if self.scale_grads else 1)
        self._run_before.add(self._has_backward)
        mark_broken(self.head, self._stages, False)
        return result

    def grad(self, index: int) -> Tensor:
        """Returns the hidden gradient, for which the last stage's backward waits."""
        return self.head.take(index)

    def _lower(self, orders: list[list[Pass]]) -> None:
        """Lowers the stage's passes as torch does, with sends and receives; adds head passes."""
        if orders is self._lowered:
            return
        self._lowered = orders
        kinds = {"F": FORWARD, "B": FULL_BACKWARD}
        compute: dict[int, list[_Action | None]] = {
            rank: [_Action(rank, kinds[x.kind], x.microbatch) for x in order if x.kind in kinds]
            for rank, order in enumerate(orders)
        }
        self.pipeline_order = compute
        self._prepare_schedule_with_comms(self.pipeline_order)
        phases: dict[Pass | None, list[Pass]] = {}
        last = None
        for each in orders[self.rank]:
            if each.kind in kinds:
                last = each
            else:
                phases.setdefault(last, []).append(each)
        lowered, waiting = [self._action(phase) for phase in phases.get(None, ())], []
        for action in self.pipeline_order_with_comms[self.rank]:
            waits = action.computation_type.name in _WAITS
            if waits and self.head.paced:
                # The courier waits for its own sends.
                continue
            # A pass's sends go before its phases: other ranks wait for the sends, and the phases
            # wait for other ranks.
            if not waits and action.computation_type not in _SENDS:
                lowered += waiting
                waiting = []
            if self.head.paced and action.computation_type in (*_SENDS, *_RECEIVES):
                index = action.microbatch_index
                lowered.append(_Action(self.rank, OVERLAP_F_B, index, (action,)))
                continue
            lowered.append(action)
            for kind, computation in kinds.items():
                if action.computation_type == computation:
                    done = Pass(kind, action.microbatch_index)  # pyright: ignore
                    waiting = [self._action(phase) for phase in phases.get(done, ())]
        self.pipeline_order_with_comms[self.rank] = lowered + waiting

    def _action(self, phase: Pass) -> _Action:
        (name,) = (name for name, kind in _KIND.items() if kind == phase.kind)
        named = _Action(self.rank, name, phase.microbatch)
        return _Action(self.rank, OVERLAP_F_B, phase.microbatch, (named,))

    def _forwarded(self) -> None:
        self._forwards += 1

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        *others: Any,
        **keywords: Any,
    ) -> Any:
        microbatches, shape = (arg_mbs, kwarg_mbs, target_mbs), self.head.targets_shape
        embeds = self.embedding is not None
        check_step(self._stages, microbatches, targets_shape=shape, embeds=embeds)
        return super()._step_microbatches(*microbatches, *others, **keywords)

    def _post(self, output: Tensor, target: Tensor, **loss_kwargs: Any) -> Tensor:
        """Serves as loss_fn on the last stage: posts the microbatch, returns a placeholder."""
        refuse_loss_kwargs(loss_kwargs)
        if self.infers:
            return output.float().sum()
        index, self._called = self._called, self._called + 1
        check_calls(self._called, self._forwards, self._n_microbatches)
        loss = Waiting.apply(output, self, index)
        self.head.post(index, self.root, *self.head.checked(output, target))
        self._shown[index] = loss.detach()
        return loss

    def _run_phase(self, action: _Action, ctx: Any) -> None:
        assert action.sub_actions is not None and action.microbatch_index is not None
        index, head, embedding = action.microbatch_index, self.head, self.embedding
        name = action.sub_actions[0].computation_type
        if name in (*_SENDS, *_RECEIVES):
            self._carry(name, index)
            return
        kind = _KIND[name]
        if kind == "S":
            if head.rank != self.root:
                head.expect(index, self.root, self._n_microbatches)
            head.statistics(index, record=self._has_backward)
        elif kind == "T":
            self._finish(index)
        elif embedding is not None:
            self._run_embedding(embedding, kind, index, ctx)

    def _carry(self, name: Any, index: int) -> None:
        """Sends or receives in place of torch, whose kernels would wait for the other stage."""
        (stage,), neighbours = self._stages, self.head.neighbours()
        forward = name in (SEND_F, RECV_F)
        way = "fwd" if forward else "bwd"
        if name in _SENDS:
            for op in getattr(stage, f"get_{way}_send_ops")(index):
                self._sent.append(neighbours.send(op.tensor, forward=forward))
            return
        ops = getattr(stage, f"get_{way}_recv_ops")(index)
        # Each microbatch has its own receiving tensor.
        after = self._step_start
        waits = [neighbours.receive(op.tensor, forward=forward, after=after) for op in ops]
        received = self.fwd_recv_ops if forward else self.bwd_recv_ops
        # torch's runtime calls `wait` of each.
        works: list[Any] = [SimpleNamespace(wait=wait) for wait in waits]
        received[stage.stage_index, index] = works

    def _run_embedding(self, embedding: TiedEmbedding, kind: Kind, index: int, ctx: Any) -> None:
        if kind == "E":
            if index == 0:
                # Ask for all microbatches now, so that no rank waits for another's `ask`.
                for each in range(self._n_microbatches):
                    embedding.ask(each, ctx.arg_mbs[each][0] if embedding.is_first else None)
            embedding.look_up(index)
        elif self._has_backward:
            embedding.give(index)
        else:
            embedding.drop(index)

    def _finish(self, index: int) -> None:
        head = self.head
        if self._has_backward:
            loss = head.gradients(index, self.root)
            if head.rank != self.root:
                self._unawaited.append(index)
                self._await_sums(_UNAWAITED)
        else:
            loss = head.value(index)
        self.losses.append(loss)
        if index in self._shown:
            # `_shown` has the tensor that loss_fn returned before the loss was known.
            self._shown.pop(index).copy_(loss)

    def _await_sums(self, at_most: int) -> None:
        """Waits for the oldest sums, until at most so many are left unawaited."""
        while len(self._unawaited) > at_most:
            self.head.take(self._unawaited.pop(0))
