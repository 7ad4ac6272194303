"""Interfaces of a head and of a tied embedding over pipeline ranks, as schedules use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cce_dist.options import LossOptions
from cce_dist.pipeline.comm.neighbours import Neighbours
from cce_dist.pipeline.grads import RowGradients

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HeadPhases(Protocol):
    """The part of `PipelineHead` that schedules use; `PipelineHead` documents each phase."""

    weight: Tensor
    options: LossOptions
    hidden_shape: tuple[int, ...]
    hidden_dtype: torch.dtype
    vocab_group: ProcessGroup
    rank: int
    size: int
    paced: bool
    grads: RowGradients
    is_broken: bool

    @property
    def targets_shape(self) -> tuple[int, ...]: ...

    @property
    def weighs(self) -> bool: ...

    def neighbours(self) -> Neighbours: ...

    def start_step(self, *, record: bool = True) -> None: ...

    def checked(self, hidden: Tensor | None, targets: Tensor | None) -> tuple[Tensor, Tensor]: ...

    def post(
        self, index: int, root: int, hidden: Tensor | None = None, targets: Tensor | None = None
    ) -> None: ...

    def expect(self, index: int, root: int, count: int) -> None: ...

    def statistics(self, index: int, *, record: bool = True) -> None: ...

    def value(self, index: int) -> Tensor: ...

    def losses(self, index: int) -> Tensor: ...

    def weigh(self, index: int, root: int, grad_losses: Tensor | None = None) -> None: ...

    def gradients(self, index: int, root: int) -> Tensor: ...

    def take(self, index: int) -> Tensor: ...

    def finish_step(self, divide_by: int = 1) -> None: ...

    def forget(self) -> None: ...


class EmbeddingPhases(Protocol):
    """The part of `TiedEmbedding` that schedules use; `TiedEmbedding` documents each phase."""

    infers: bool

    @property
    def is_first(self) -> bool: ...

    def ask(self, index: int, tokens: Tensor | None = None) -> None: ...

    def look_up(self, index: int) -> None: ...

    def rows(self, index: int) -> Tensor: ...

    def keep(self, index: int, grad: Tensor) -> None: ...

    def give(self, index: int) -> None: ...

    def add(self, index: int) -> None: ...

    def drop(self, index: int) -> None: ...

    def look_up_all(self, tokens: Sequence[Tensor | None]) -> None: ...

    def finish_all(self, *, backward: bool) -> None: ...

    def finish_step(self) -> None: ...
