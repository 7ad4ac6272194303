"""The thread that serves a head's microbatches on every rank, and the loss that waits for it."""

from __future__ import annotations

import queue
import threading
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from cce_dist.pipeline.comm.courier import mark
from cce_dist.pipeline.head import PipelineHead
from cce_dist.ranks.gather import require

POLL_SECONDS = 0.05
JOIN_SECONDS = 5.0


class Server(threading.Thread):
    """A thread that runs every microbatch's phases in turn, beside the schedule."""

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
        # The last element of each is an event behind the work that made the tensors.
        self._posted: queue.Queue[tuple[Tensor, Tensor, Tensor, Any] | None] = queue.Queue()
        self._grads: list[queue.Queue[tuple[Tensor, Any]]] = [queue.Queue(1) for _ in range(count)]
        self._called = self._steps = 0
        self._forwarded, self._forwards, self._sent = threading.Semaphore(0), 0, 0
        self._stopped = False
        self._stream = stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(head.weight.device))

    # -- on the schedule's thread

    def note_step(self) -> None:
        """Notes that a schedule starts to run its microbatches."""
        self._steps += 1
        if self._steps > 1:
            raise RuntimeError("serving(schedule) must be around one step or eval, got a second")
        self._check_kind()

    def accept(self, output: Tensor, target: Tensor) -> Tensor:
        if self.infers:
            return output.float().sum()
        self._raise_error()
        self._check_kind()
        index, self._called = self._called, self._called + 1
        check_calls(self._called, self._forwards, self.count)
        loss = Waiting.apply(output, self, index)
        hidden, targets = self.head.checked(output, target)
        self._posted.put((hidden, targets, loss.detach(), mark(output.device)))
        return loss

    def _check_kind(self) -> None:
        """Compares the context's arguments with the arguments that the stages got."""
        if self._stages[0].has_backward != self.backward:
            raise RuntimeError(
                f"serving(schedule, backward={self.backward}) must be around schedule."
                f"{'step' if self.backward else 'eval'}, got the other"
            )

    def forwarded(self) -> None:
        """Notes that the last of this rank's stages has computed a microbatch."""
        self._forwards += 1
        # Over gloo the schedule may wait on the host before the next pass.
        if self._stream is None:
            self.sent()

    def before_pass(self) -> None:
        """Notes that a pass starts: the schedule has sent the outputs of earlier passes.

        The host waits for all inputs of the pass. A pass that waits for another rank may have more
        launches than the device queues. Its thread would then wait in the driver, and keep the
        serving thread out of the driver.
        """
        self.sent()
        if self._stream is not None and self.head.paced:
            mark(self.head.weight.device).synchronize()

    def sent(self) -> None:
        """Notes that the stages' outputs so far have been sent."""
        for _ in range(self._forwards - self._sent):
            self._forwarded.release()
        self._sent = self._forwards

    def grad(self, index: int) -> Tensor:
        """Waits for the gradient of a microbatch's hidden states, and returns it."""
        while True:
            try:
                grad, ready = self._grads[index].get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                self._raise_error()
                if not self.is_alive() and self._grads[index].empty():
                    raise RuntimeError(_asked_twice(index)) from None
        if ready is not None:
            stream = torch.cuda.current_stream(grad.device)
            stream.wait_event(ready)
            grad.record_stream(stream)
        return grad

    def finish(self) -> None:
        """Waits for all microbatches."""
        self.sent()
        if not (self._steps or self._called or self._forwards):
            raise RuntimeError("serving(schedule) must be around one step or eval, got none")
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
        """Stops after an error. The thread may still wait for missing ranks until a timeout."""
        self._stopped = True
        self._posted.put(None)
        if self.ident is not None:
            self.join(JOIN_SECONDS)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    # -- on this thread

    def run(self) -> None:
        device, stream = self.head.weight.device, self._stream
        try:
            if stream is not None:
                torch.cuda.set_device(device)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                self.head.start_step(record=self.backward)
                for index in range(self.count):
                    if not self._serve(index):
                        return
        except BaseException as error:  # the schedule's thread raises it
            self.error = error

    def _serve(self, index: int) -> bool:
        head, root, shown = self.head, self.root, None
        if head.rank == root:
            posted = self._posted.get()
            if posted is None:
                return False
            hidden, targets, shown, ready = posted
            if ready is not None:
                self._stream.wait_event(ready)
                for tensor in (hidden, targets, shown):
                    tensor.record_stream(self._stream)
            head.post(index, root, hidden, targets)
        else:
            # No queued work may wait for later work of this rank: an allocator that runs out of
            # memory waits for the device, and would then wait for ever.
            while not self._forwarded.acquire(timeout=POLL_SECONDS):
                if self._stopped:
                    return False
            head.post(index, root)
        head.statistics(index, record=self.backward)
        if self.backward:
            loss = head.gradients(index, root)
            grad = head.take(index)
            if head.rank == root:
                self._grads[index].put((grad, mark(grad.device)))
        else:
            loss = head.value(index)
        self.losses.append(loss)
        if shown is not None:
            # `shown` is the tensor that loss_fn returned before the loss was known.
            shown.copy_(loss)
        return True


def check_calls(called: int, forwards: int, count: int) -> None:
    """Checks the number of calls of loss_fn in a step.

    torch's stages without static metadata call it once more for shapes, before the first forward.
    `without_dry_run` recognises that call by names of torch 2.13.
    """
    if called > min(forwards, count):
        raise RuntimeError(
            f"loss_fn was called {called} times, for {forwards} of {count} microbatches that went "
            "through the last stage; give every stage input_args and output_args, so that torch "
            "does not call it to learn shapes"
        )


def _asked_twice(index: int) -> str:
    return f"the hidden gradient of microbatch {index} was asked for twice"


class Waiting(torch.autograd.Function):
    """A microbatch's loss before it is known; its backward waits for the hidden gradient, which
    `server.grad(index)` returns."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, server: Any, index: int):
        ctx.server, ctx.index = server, index
        return output.new_zeros((), dtype=torch.promote_types(output.dtype, torch.float32))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor):
        # A loss that is kept must not keep the server, and with it the head and the stages.
        server, ctx.server = ctx.server, None
        if server is None:
            raise RuntimeError(_asked_twice(ctx.index))
        grad = server.grad(ctx.index)
        rule = (
            "the loss must go to the schedule as loss_fn returned it: the weight's gradient is "
            "made for an upstream gradient of 1; use PipelineHead's loss_scale"
        )
        require(upstream == 1, lambda: f"{rule}, got {float(upstream)}", rule)
        return grad, None, None
