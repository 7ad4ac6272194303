"""The loss under torch.distributed.pipelining, whose schedules stay as they are.

`LastStageLoss` is a `loss_fn` for a head that only the last stage's ranks hold. `VocabOverPipeline`
spreads the head over all of the pipeline's ranks: schedules call a loss on the last stage alone, so
on every rank a thread, which knows no schedule, joins in for each microbatch in turn.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from cce_dist.adapters.pipeline_head import PipelineHead
from cce_dist.collectives import require
from cce_dist.loss import linear_cross_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

POLL_SECONDS = 0.05
JOIN_SECONDS = 5.0


class LastStageLoss:
    """`loss_fn` of a schedule whose last stage ends before the LM head.

    Args:
        weight: [V_local, D], of the ranks of the last stage. Where a schedule splits its backward
            (zero bubble, ZBV, DualPipeV) a parameter of the last stage's module, since torch then
            makes gradients of no others.
        group: those of them that share the vocabulary, the tensor-parallel ranks; None: one rank.
        options: keywords of `linear_cross_entropy`, of reduction "mean" or "sum".
    Raises:
        ValueError: an option that a schedule has no use for, or that would count twice; when it is
            called, a weight whose gradient the schedule would lose.
    A schedule with scale_grads=True divides the gradients of its stages by the number of
    microbatches, and not weight's, unless weight is a parameter of the last stage.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        if options.get("reduction") == "none" or options.get("stats"):
            raise ValueError(
                "reduction must be 'mean' or 'sum' and stats empty: a schedule calls backward on "
                f"what loss_fn returns, got {options}"
            )
        if options.get("grad_weight_into") is not None:
            raise ValueError(
                "grad_weight_into must be None: a schedule without static input_args and "
                "output_args calls loss_fn and its backward once more than there are microbatches"
            )
        self.weight, self.group, self.options = weight, group, options
        self._knows_schedule = False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if not self._knows_schedule:
            self._check_schedule(_calling_schedule())
            self._knows_schedule = True
        loss = linear_cross_entropy(output, self.weight, target, group=self.group, **self.options)
        assert isinstance(loss, Tensor)
        return loss

    def _check_schedule(self, schedule: Any) -> None:
        if schedule is None or not self.weight.requires_grad or not _splits_backward(schedule):
            return
        last = [stage for stage in _stages(schedule) if stage.is_last]
        if not any(self.weight is x for stage in last for x in stage.submod.parameters()):
            raise ValueError(
                f"weight must be a parameter of the last stage's module under "
                f"{type(schedule).__name__}, which splits its backward and makes gradients of the "
                "stages' parameters alone: the weight's would be lost"
            )


class VocabOverPipeline:
    """`PipelineHead` under an unmodified schedule: GPipe, 1F1B, interleaved, zero bubble, ZBV.

        head = PipelineHead(weight, group=pipeline, hidden_shape=(2, 512, 2304), loss_scale=1 / 8)
        loss = VocabOverPipeline(head)
        schedule = Schedule1F1B(stage, 8, loss_fn=loss, scale_grads=False)
        with loss.serving(schedule):  # on every rank
            schedule.step(tokens, losses=losses)  # or .step(target=...), .eval(...)

    After the context the losses are there, and weight.grad has what the step added.
    """

    def __init__(self, head: PipelineHead) -> None:
        self.head = head
        self.losses: list[Tensor] = []  # of the last step's microbatches, on every rank
        self._server: _Server | None = None
        self._broken = False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """What the last stage's schedule calls; the value is there after the context."""
        if self._server is None:
            raise RuntimeError(
                "the loss was called outside of `with loss.serving(schedule):`, where the other "
                "ranks do not answer"
            )
        return self._server.accept(output, target)

    @contextmanager
    def serving(self, schedule: Any, *, backward: bool = True) -> Iterator[None]:
        """On every rank around one `schedule.step`, or with backward=False `schedule.eval`.

        Raises:
            ValueError: a schedule whose stages are not on the head's ranks.
            RuntimeError: an earlier step failed; microbatches are missing.
            What the head raised, on a rank where it did.
        """
        if self._broken:
            raise RuntimeError("an earlier step failed and left ranks apart: make a new head")
        stages, count = _stages(schedule), schedule._n_microbatches
        root = _rank_of_last_stage(stages[0], self.head.size)
        server = self._server = _Server(self.head, root, count, backward)
        self._broken = True
        try:
            with without_dry_run(stages, [server]):
                server.start()
                yield
            server.finish()
        except BaseException as error:
            server.stop()
            if server.error is not None and server.error is not error:
                raise server.error from error
            raise
        finally:
            self._server = None
        if backward:
            self.head.finish_step(count if schedule.scale_grads else 1)
        self.losses, self._broken = server.losses, False


class _Server(threading.Thread):
    """Every microbatch's phases, one after the other, beside the schedule."""

    def __init__(self, head: PipelineHead, root: int, count: int, backward: bool) -> None:
        super().__init__(name="cce_dist pipeline head", daemon=True)
        self.head, self.root, self.count, self.backward = head, root, count, backward
        self.error: BaseException | None = None
        self.losses: list[Tensor] = []
        self.infers = False  # a schedule asks for shapes, not for a loss
        self._given: queue.Queue[tuple[Tensor, Tensor, Tensor, Any] | None] = queue.Queue()
        self._grads: list[queue.Queue[tuple[Tensor, Any]]] = [queue.Queue(1) for _ in range(count)]
        self._called = 0
        weight = head.weight
        self._stream = torch.cuda.Stream(weight.device) if weight.is_cuda else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(weight.device))

    # -- on the schedule's thread

    def accept(self, output: Tensor, target: Tensor) -> Tensor:
        if self.infers:
            return output.float().sum()
        self._raise_error()
        index, self._called = self._called, self._called + 1
        if index >= self.count:
            raise RuntimeError(
                f"loss_fn was called {self._called} times for {self.count} microbatches; give "
                "every stage input_args and output_args"
            )
        loss = Waiting.apply(output, self, index)
        hidden, targets = self.head.checked(output, target)
        self._given.put((hidden, targets, loss.detach(), self._mark()))
        return loss

    def grad(self, index: int) -> Tensor:
        """Of the hidden states of a microbatch, when it is there."""
        while True:
            try:
                grad, mark = self._grads[index].get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                self._raise_error()
                if not self.is_alive() and self._grads[index].empty():
                    raise RuntimeError(
                        f"the hidden gradient of microbatch {index} was asked for twice"
                    ) from None
        if mark is not None:
            stream = torch.cuda.current_stream(grad.device)
            stream.wait_event(mark)
            grad.record_stream(stream)
        return grad

    def finish(self) -> None:
        """Waits for all microbatches."""
        if self.head.rank == self.root and self._called != self.count:
            raise RuntimeError(
                f"loss_fn was called {self._called} times for {self.count} microbatches"
            )
        self.join()
        self._raise_error()
        if self._stream is not None:
            torch.cuda.current_stream(self.head.weight.device).wait_stream(self._stream)

    def stop(self) -> None:
        """After an error: it may wait for ranks that do not come, until its groups' timeout."""
        self._given.put(None)
        self.join(JOIN_SECONDS)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _mark(self) -> Any:
        """What the other thread waits for before it reads what this one has made."""
        if self._stream is None:
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    # -- on its own

    def run(self) -> None:
        device, stream = self.head.weight.device, self._stream
        try:
            if stream is not None:
                torch.cuda.set_device(device)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                for index in range(self.count):
                    if not self._serve(index):
                        return
        except BaseException as error:  # the schedule's thread raises it
            self.error = error

    def _serve(self, index: int) -> bool:
        head, root, shown = self.head, self.root, None
        if head.rank == root:
            given = self._given.get()
            if given is None:
                return False
            hidden, targets, shown, mark = given
            if mark is not None:
                assert self._stream is not None
                self._stream.wait_event(mark)
                for tensor in (hidden, targets, shown):
                    tensor.record_stream(self._stream)
            head.post(index, root, hidden, targets)
        else:
            head.post(index, root)
        head.statistics(index, record=self.backward)
        if self.backward:
            loss = head.gradients(index, root)
            grad = head.take(index)
            if head.rank == root:
                self._grads[index].put((grad, self._mark()))
        else:
            loss = head.value(index)
        self.losses.append(loss)
        if shown is not None:
            # What loss_fn returned, before anything was known of it.
            shown.copy_(loss)
        return True


class Answers(Protocol):
    """Who calls back where torch's schedules call a loss."""

    infers: bool  # a schedule asks for shapes, not for a loss

    def grad(self, index: int) -> Tensor:
        """Waits for the hidden gradient of a microbatch."""
        ...


class Waiting(torch.autograd.Function):
    """The loss of a microbatch that is not known yet; its backward waits for its gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, server: Answers, index: int):
        ctx.server, ctx.index = server, index
        return output.new_zeros((), dtype=torch.promote_types(output.dtype, torch.float32))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        grad = ctx.server.grad(ctx.index)
        rule = (
            "the loss must go to the schedule as loss_fn returned it: the weight's gradient is "
            "made for an upstream gradient of 1; use PipelineHead's loss_scale"
        )
        require(upstream == 1, lambda: f"{rule}, got {float(upstream)}", rule)
        return grad, None, None


def _calling_schedule() -> Any:
    """The schedule that calls a loss_fn, which is told of no schedule; None: another caller."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "_n_microbatches") and hasattr(caller, "_loss_fn"):
            return caller
        frame = frame.f_back
    return None


def _splits_backward(schedule: Any) -> bool:
    actions = (x for order in getattr(schedule, "pipeline_order", {}).values() for x in order)
    return any(x is not None and x.computation_type.name == "BACKWARD_INPUT" for x in actions)


def _stages(schedule: Any) -> list[Any]:
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if stages[0] is None or not hasattr(schedule, "_n_microbatches"):
        raise ValueError(
            f"schedule must be one of torch.distributed.pipelining, got {type(schedule)}"
        )
    return stages


def _rank_of_last_stage(stage: Any, size: int) -> int:
    """The rank in the pipeline's group that holds the last stage: ZBV has it on rank 0."""
    if stage.group_size != size:
        raise ValueError(
            f"the head's group must be the stages' group, of {stage.group_size} ranks, got one of "
            f"{size}"
        )
    return stage.stage_index_to_group_rank[stage.num_stages - 1]


class Infers(Protocol):
    infers: bool


@contextmanager
def without_dry_run(stages: list[Any], answers: Sequence[Infers]) -> Iterator[None]:
    """torch 2.13's stages without static metadata run once more, the last one's loss included, to
    learn shapes: that must not ask the other ranks, and those who would are told so."""
    names = ("_forward_metadata_inference", "_backward_metadata_inference")
    patched = [(stage, name) for stage in stages for name in names if hasattr(stage, name)]

    def dry(infer: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            for each in answers:
                each.infers = True
            try:
                return infer(*args, **kwargs)
            finally:
                for each in answers:
                    each.infers = False

        return run

    for stage, name in patched:
        setattr(stage, name, dry(getattr(stage, name)))
    try:
        yield
    finally:
        for stage, name in patched:
            delattr(stage, name)
