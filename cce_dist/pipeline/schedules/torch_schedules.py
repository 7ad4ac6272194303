"""The vocabulary over the ranks of a pipeline, under unchanged schedules of
torch.distributed.pipelining.

A schedule calls its loss on the last stage alone. So a thread on every rank serves the microbatches
in turn. The thread does not know the schedule.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import ScheduleZBVZeroBubble

from cce_dist.pipeline.checks import (
    check_output,
    check_same,
    check_scalar,
    check_step,
    mark_broken,
    refuse_broken,
    refuse_loss_kwargs,
)
from cce_dist.pipeline.comm.groups import connect_neighbours
from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.pipeline.head import PipelineHead
from cce_dist.pipeline.schedules.server import Server

# Actions of torch's schedules; in torch 2.15 another action waits for each send.
_OF_FORWARDS = ("FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F")


class VocabOverPipeline:
    """`PipelineHead` under an unmodified schedule: GPipe, 1F1B, interleaved, zero bubble, ZBV.

        head = PipelineHead(weight, group=pipeline, hidden_shape=(2, 512, 2304), loss_scale=1 / 8)
        loss = VocabOverPipeline(head)
        schedule = Schedule1F1B(stage, 8, loss_fn=loss, scale_grads=False)
        with loss.serving(schedule):  # on every rank
            schedule.step(tokens, losses=losses)  # or .step(target=...), .eval(...)

    After the context the losses are known, and weight.grad includes the step's gradient.

    Args:
        head: a `PipelineHead` over the schedule's stages.
        embedding: a `TiedEmbedding`, which every rank makes and the first stage's module calls. All
            microbatches are looked up before the first stage starts, and their gradients are sent
            after the last microbatch: the first stage's rank holds N D numbers of each microbatch.
    """

    def __init__(self, head: PipelineHead, *, embedding: TiedEmbedding | None = None) -> None:
        check_scalar(head.options)
        self.head, self.embedding = head, embedding
        self.losses: list[Tensor] = []  # of the last step's microbatches, on every rank
        self._server: Server | None = None
        self._connected: weakref.WeakSet[Any] = weakref.WeakSet()
        self._agreed: weakref.WeakSet[Any] = weakref.WeakSet()
        device = head.weight.device
        # One stream for all steps: memory allocated on a stream is used again on that stream alone.
        # High priority: torch hands out 32 streams of each priority in turns, and NCCL's
        # communicators get those of low priority.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def __call__(self, output: Tensor, target: Tensor, **loss_kwargs: Any) -> Tensor:
        """Returns a placeholder for the loss, on the last stage; the loss is in it after the
        context."""
        refuse_loss_kwargs(loss_kwargs)
        if self._server is None:
            raise RuntimeError(
                "the loss was called outside of `with loss.serving(schedule):`, where the other "
                "ranks do not answer"
            )
        return self._server.accept(output, target)

    @contextmanager
    def serving(self, schedule: Any, *, backward: bool = True) -> Iterator[None]:
        """Serves one `schedule.step`, or with backward=False one `schedule.eval`: on every rank.

        Raises:
            ValueError: the schedule's stages are not on the head's ranks; its number of
                microbatches differs between ranks, tensor-parallel ones included; microbatches
                have several shapes, or no targets.
            RuntimeError: an earlier step failed; microbatches are missing; `eval` ran without
                backward=False, or `step` with it; the context had no step, or two.
            Exception: any error of the head, on the rank that raised it.
        Collectives: the head's; the first context of a schedule also gathers an object over the
            ranks that share the vocabulary.
        """
        stages, count = stages_of(schedule), schedule._n_microbatches
        refuse_broken(self.head, stages)
        root = _rank_of_last_stage(stages[0], self.head.size)
        if schedule not in self._agreed:
            check_same(self.head.vocab_group, {"n_microbatches": count})
            self._agreed.add(schedule)
        server = self._server = Server(self.head, stages, root, count, backward, self._stream)
        mark_broken(self.head, stages, True)
        self.losses = []
        embedding = self.embedding
        answers = [server] if embedding is None else [server, embedding]
        try:
            connect_stages(stages, self._connected)
            prepare_mode(schedule, backward=backward)
            with (
                without_dry_run(stages, answers),
                observe_passes(stages, server.forwarded, server.before_pass),
                _before_step(schedule, stages, server, embedding),
                nullcontext() if backward else forwards_alone(schedule),
            ):
                server.start()
                yield
            server.finish()
            if embedding is not None:
                embedding.finish_all(backward=backward)
        except BaseException as error:
            # The thread's error may cause one in the schedule, but not the other way round.
            first = server.error
            server.stop()
            if first is not None and first is not error:
                raise first from error
            raise
        finally:
            self._server = None
        self.head.finish_step(count if schedule.scale_grads else 1)
        mark_broken(self.head, stages, False)
        self.losses = server.losses


def stages_of(schedule: Any) -> list[Any]:
    stages = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    if stages[0] is None or not hasattr(schedule, "_n_microbatches"):
        raise ValueError(
            f"schedule must be one of torch.distributed.pipelining, got {type(schedule)}"
        )
    return stages


def _rank_of_last_stage(stage: Any, size: int) -> int:
    """Returns the last stage's rank in the pipeline's group; under ZBV that is rank 0."""
    if stage.group_size != size:
        raise ValueError(
            f"the head's group must be the stages' group, of {stage.group_size} ranks, got one of "
            f"{size}"
        )
    return stage.stage_index_to_group_rank[stage.num_stages - 1]


@contextmanager
def observe_passes(
    stages: list[Any], forwarded: Callable[[], None], before: Callable[[], None] | None = None
) -> Iterator[None]:
    """Calls `before` ahead of each pass, and `forwarded` after each forward of the last stage.

    Checks the output of each forward.
    """
    last = max(stages, key=lambda stage: stage.stage_index)

    def run(run_pass: Callable[..., Any], stage: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = run_pass(*args, **kwargs)
        if name == "forward_one_chunk":
            check_output(stage, result)
            if stage is last:
                forwarded()
        return result

    with _replaced(stages, run, "forward_one_chunk", "backward_one_chunk"):
        yield


@contextmanager
def _replaced(objects: list[Any], run: Callable[..., Any], *names: str) -> Iterator[None]:
    """Replaces the objects' methods of these names by `run`, within the context.

    `run` gets the method, its object, its name and the arguments.
    """
    patched = [(each, name) for each in objects for name in names if hasattr(each, name)]
    # Another library may have set attributes of the instance, which hide those of the class.
    before = [vars(each).get(name) for each, name in patched]
    for each, name in patched:
        setattr(each, name, functools.partial(run, getattr(each, name), each, name))
    try:
        yield
    finally:
        for (each, name), attribute in zip(patched, before, strict=True):
            if attribute is None:
                delattr(each, name)
            else:
                setattr(each, name, attribute)


def _before_step(
    schedule: Any, stages: list[Any], server: Server, embedding: TiedEmbedding | None
) -> AbstractContextManager[None]:
    """Checks the arguments of a step before its first pass, and looks up its tokens."""

    def run(
        run_microbatches: Callable[..., Any],
        schedule: Any,
        name: str,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        *others: Any,
        **keywords: Any,
    ) -> Any:
        server.note_step()
        microbatches = arg_mbs, kwarg_mbs, target_mbs
        shape = server.head.targets_shape
        check_step(stages, microbatches, targets_shape=shape, embeds=embedding is not None)
        if embedding is not None:
            count = schedule._n_microbatches
            tokens = [x[0] for x in arg_mbs] if embedding.is_first else [None] * count
            embedding.look_up_all(tokens)
        return run_microbatches(*microbatches, *others, **keywords)

    return _replaced([schedule], run, "_step_microbatches")


def connect_stages(stages: list[Any], done: weakref.WeakSet[Any]) -> None:
    """Makes the communicators between the stages of all ranks, once, on GPUs.

    Collectives: those of `connect_neighbours`.
    """
    first = stages[0]
    if first.device.type != "cuda" or first in done:
        return
    done.add(first)
    places = first.stage_index_to_group_rank
    near = {places.get(x.stage_index + step) for x in stages for step in (-1, 1)}
    # torch before 2.13 only sends batches of operations.
    alone = hasattr(first, "_warmup_forward_vote")
    connect_neighbours(first.group, {x for x in near if x is not None}, first.device, alone=alone)


@contextmanager
def forwards_alone(schedule: Any) -> Iterator[None]:
    """Keeps the stages' gradients as they are around an `eval`.

    With scale_grads=True torch's schedules would divide the gradients again. Only the forwards of
    ZBV's order run: torch 2.13 fails where a rank would hand a gradient to itself.
    """

    with _replaced(stages_of(schedule), lambda *_: None, "scale_grads"):
        if not isinstance(schedule, ScheduleZBVZeroBubble):
            yield
            return
        orders = schedule.pipeline_order_with_comms
        schedule.pipeline_order_with_comms = {
            rank: [x for x in order if x.computation_type.name in _OF_FORWARDS]
            for rank, order in orders.items()
        }
        try:
            yield
        finally:
            schedule.pipeline_order_with_comms = orders


def prepare_mode(schedule: Any, *, backward: bool) -> None:
    """Makes torch before 2.13 allocate the stages' receive buffers anew.

    That torch allocates the buffers at a schedule's first call. If that call was `eval`, they have
    no gradients, and a later `step` fails.
    """
    if hasattr(schedule, "_initialize_pp_stages"):
        return
    had = getattr(schedule, "cce_dist_had_backward", backward)
    schedule.cce_dist_had_backward = backward
    if had != backward:
        for kind in ("stage", "stages"):
            for way in ("forward", "backward"):
                if hasattr(schedule, f"_{kind}_{way}_initialized"):
                    setattr(schedule, f"_{kind}_{way}_initialized", False)


def without_dry_run(stages: list[Any], answers: Sequence[Any]) -> AbstractContextManager[None]:
    """Sets `infers` of `answers` while a stage runs only to learn shapes.

    torch 2.13 runs stages without static metadata, and the loss, once more for their shapes. Such
    a run must not call the other ranks.
    """

    def run(infer: Callable[..., Any], stage: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        for each in answers:
            each.infers = True
        try:
            return infer(*args, **kwargs)
        finally:
            for each in answers:
                each.infers = False

    return _replaced(stages, run, "_forward_metadata_inference", "_backward_metadata_inference")
