"""Recorder of the start and end of a rank's passes, in the device's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar
from unittest.mock import patch

import torch

from cce_dist.algorithm import sharded
from cce_dist.pipeline import head as pipeline_head
from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.pipeline.schedules.server import Server
from cce_dist.pipeline.schedules.vocab_1f1b import ScheduleVocab1F1B

# Kinds of passes: "F" and "B" are a stage's forward and backward, "loss" is on the last stage, "S"
# and "T" are log-sum-exp and gradients of a rank's part of the vocabulary.
STAGE_KINDS = ("F", "B")
KINDS = (*STAGE_KINDS, "loss", "S", "T")

P = ParamSpec("P")
T = TypeVar("T")


class Span(NamedTuple):
    kind: str
    start: float  # seconds after all ranks started the step
    end: float


class Recorder:
    """A recorder of one step's passes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[list[Any]] = []
        self._zero = self._mark()
        self._open: list[Any] | None = None  # the stage's pass that is under way

    def start_step(self) -> None:
        self._marks.clear()
        self._zero = self._mark()

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        mark = [kind, self._mark(), None]
        if kind in STAGE_KINDS:
            self._open = mark
        yield
        mark[2] = self._mark()
        if kind in STAGE_KINDS:
            self._open = None
        self._marks.append(mark)

    def restart(self) -> None:
        """Begins the stage's current pass anew: so far it has waited for other ranks."""
        if self._open is not None:
            self._open[1] = self._mark()

    def spans(self) -> list[Span]:
        """Returns the spans of the step; synchronize the device first."""
        return [
            Span(kind, self._seconds(start), self._seconds(end))
            for kind, start, end in sorted(self._marks, key=lambda mark: self._seconds(mark[1]))
        ]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        if isinstance(mark, float):
            return mark - self._zero
        return self._zero.elapsed_time(mark) / 1e3


@contextmanager
def recording(recorder: Recorder, stage: Any, *, over_ranks: bool) -> Iterator[None]:
    """Records the passes of `stage` until the context ends; waits for other ranks do not count.

    Args:
        over_ranks: also records the passes of the head's part, where ranks share the vocabulary.
    """

    def timed(run: Callable[P, T], kind: str) -> Callable[P, T]:
        def timed_run(*args: P.args, **kwargs: P.kwargs) -> T:
            with recorder.span(kind):
                return run(*args, **kwargs)

        return timed_run

    def waits(run: Callable[P, T]) -> Callable[P, T]:
        def waiting_run(*args: P.args, **kwargs: P.kwargs) -> T:
            result = run(*args, **kwargs)
            recorder.restart()
            return result

        return waiting_run

    patches = [
        (stage, "forward_one_chunk", timed(stage.forward_one_chunk, "F")),
        (stage, "backward_one_chunk", timed(stage.backward_one_chunk, "B")),
    ]
    if over_ranks:
        patches += [
            (pipeline_head, "start_forward", timed(pipeline_head.start_forward, "S")),
            (sharded, "backward", timed(sharded.backward, "T")),
            (ScheduleVocab1F1B, "grad", waits(ScheduleVocab1F1B.grad)),
            (Server, "grad", waits(Server.grad)),
            (TiedEmbedding, "rows", waits(TiedEmbedding.rows)),
        ]
    with ExitStack() as stack:
        for where, name, function in patches:
            stack.enter_context(patch.object(where, name, function))
        yield
