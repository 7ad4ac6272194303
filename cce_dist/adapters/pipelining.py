"""The vocabulary over the ranks of a pipeline under torch.distributed.pipelining, whose schedules
stay as they are.

They call a loss on the last stage alone, so on every rank a thread, which knows no schedule, joins
in for each microbatch in turn.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from cce_dist.adapters.groups import connect_neighbours
from cce_dist.adapters.pipeline_checks import check_scalar
from cce_dist.adapters.pipeline_head import PipelineHead
from cce_dist.collectives import require

POLL_SECONDS = 0.05
JOIN_SECONDS = 5.0


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
        check_scalar(head.options)
        self.head = head
        self.losses: list[Tensor] = []  # of the last step's microbatches, on every rank
        self._server: _Server | None = None
        self._broken = False
        self._connected: weakref.WeakSet[Any] = weakref.WeakSet()
        device = head.weight.device
        # One for all steps: memory that it has allocated is used again by it alone. Of high
        # priority: torch hands out 32 streams of each, in turns, NCCL's among those of low.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

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
            RuntimeError: an earlier step failed; microbatches are missing; `eval` without
                backward=False, or a step with it.
            What the head raised, on a rank where it did.
        """
        if self._broken:
            raise RuntimeError("an earlier step failed and left ranks apart: make a new head")
        stages, count = stages_of(schedule), schedule._n_microbatches
        root = _rank_of_last_stage(stages[0], self.head.size)
        server = self._server = _Server(self.head, stages, root, count, backward, self._stream)
        self._broken = True
        try:
            connect_stages(stages, self._connected)
            with without_dry_run(stages, [server]), _told_of_forwards(stages, server):
                server.start()
                yield
            server.finish()
        except BaseException as error:
            # What the schedule met may follow from what the thread met, not the other way round.
            first = server.error
            server.stop()
            if first is not None and first is not error:
                raise first from error
            raise
        finally:
            self._server = None
        if backward:
            self.head.finish_step(count if schedule.scale_grads else 1)
        self.losses, self._broken = server.losses, False


class _Server(threading.Thread):
    """Every microbatch's phases, one after the other, beside the schedule."""

    def __init__(
        self,
        head: PipelineHead,
        stages: list[Any],
        root: int,
        count: int,
        backward: bool,
        stream: Any,
    ) -> None:
        super().__init__(name="cce_dist pipeline head", daemon=True)
        self.head, self.root, self.count, self.backward = head, root, count, backward
        self._stages = stages
        self.error: BaseException | None = None
        self.losses: list[Tensor] = []
        self.infers = False  # a schedule asks for shapes, not for a loss
        self._given: queue.Queue[tuple[Tensor, Tensor, Tensor, Any] | None] = queue.Queue()
        self._grads: list[queue.Queue[tuple[Tensor, Any]]] = [queue.Queue(1) for _ in range(count)]
        self._called = 0
        self._forwarded, self._forwards, self._sent = threading.Semaphore(0), 0, 0
        self._stopped = False
        self._stream = stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(head.weight.device))

    # -- on the schedule's thread

    def accept(self, output: Tensor, target: Tensor) -> Tensor:
        if self.infers:
            return output.float().sum()
        self._raise_error()
        self._check_kind()
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

    def _check_kind(self) -> None:
        """What the context was told against what the schedule has told its stages."""
        if self._stages[0].has_backward != self.backward:
            raise RuntimeError(
                f"serving(schedule, backward={self.backward}) must be around schedule."
                f"{'step' if self.backward else 'eval'}, got the other"
            )

    def forwarded(self) -> None:
        """The last of this rank's stages has a microbatch behind it."""
        self._forwards += 1
        # Over gloo the schedule may wait on the host before it comes to the next pass.
        if self._stream is None:
            self.sent()

    def sent(self) -> None:
        """What the stages have made so far has been sent on."""
        for _ in range(self._forwards - self._sent):
            self._forwarded.release()
        self._sent = self._forwards

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
        self.sent()
        self._check_kind()
        name, done = "loss_fn was called", self._called
        if self.head.rank != self.root:
            name, done = "this rank's stage was run", self._forwards
        if done != self.count:
            raise RuntimeError(f"{name} {done} times for {self.count} microbatches")
        self.join()
        self._raise_error()
        if self._stream is not None:
            torch.cuda.current_stream(self.head.weight.device).wait_stream(self._stream)

    def stop(self) -> None:
        """After an error: it may wait for ranks that do not come, until its groups' timeout."""
        self._stopped = True
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
        mark.record(torch.cuda.current_stream(self.head.weight.device))
        return mark

    # -- on its own

    def run(self) -> None:
        device, stream = self.head.weight.device, self._stream
        try:
            if stream is not None:
                torch.cuda.set_device(device)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                if self.backward:
                    self.head.start_step()
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
            # Nothing is queued on the device that waits for what this rank has yet to do: whoever
            # waits for the device, as an allocator out of memory does, would wait for ever.
            while not self._forwarded.acquire(timeout=POLL_SECONDS):
                if self._stopped:
                    return False
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


def stages_of(schedule: Any) -> list[Any]:
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


@contextmanager
def _told_of_forwards(stages: list[Any], server: _Server) -> Iterator[None]:
    last = max(stages, key=lambda stage: stage.stage_index)
    names = ("forward_one_chunk", "backward_one_chunk")

    def told(stage: Any, name: str) -> Callable[..., Any]:
        run_pass = getattr(stage, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            # A schedule sends what a pass has made before it begins the next.
            server.sent()
            result = run_pass(*args, **kwargs)
            if stage is last and name == names[0]:
                server.forwarded()
            return result

        return run

    with _replaced(stages, names, told):
        yield


@contextmanager
def _replaced(
    stages: list[Any], names: tuple[str, ...], make: Callable[[Any, str], Callable[..., Any]]
) -> Iterator[None]:
    """make(stage, name) in place of those methods of `stages` that there are."""
    patched = [(stage, name) for stage in stages for name in names if hasattr(stage, name)]
    # Of the stage itself, as somebody else may have put there, rather than of its class.
    before = [vars(stage).get(name) for stage, name in patched]
    for stage, name in patched:
        setattr(stage, name, make(stage, name))
    try:
        yield
    finally:
        for (stage, name), own in zip(patched, before, strict=True):
            if own is None:
                delattr(stage, name)
            else:
                setattr(stage, name, own)


def connect_stages(stages: list[Any], done: weakref.WeakSet[Any]) -> None:
    """On GPUs, once: what the stages of all ranks send each other by. Collective, as
    `connect_neighbours`."""
    first = stages[0]
    if first.device.type != "cuda" or first in done:
        return
    done.add(first)
    places = first.stage_index_to_group_rank
    near = {places.get(x.stage_index + step) for x in stages for step in (-1, 1)}
    connect_neighbours(first.group, {x for x in near if x is not None}, first.device)


class Infers(Protocol):
    infers: bool


@contextmanager
def without_dry_run(stages: list[Any], answers: Sequence[Infers]) -> Iterator[None]:
    """torch 2.13's stages without static metadata run once more, the last one's loss included, to
    learn shapes: that must not ask the other ranks, and those who would are told so."""

    def dry(stage: Any, name: str) -> Callable[..., Any]:
        infer = getattr(stage, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            for each in answers:
                each.infers = True
            try:
                return infer(*args, **kwargs)
            finally:
                for each in answers:
                    each.infers = False

        return run

    with _replaced(stages, ("_forward_metadata_inference", "_backward_metadata_inference"), dry):
        yield
