"""Interfaces of a head and of a tied embedding over pipeline ranks, for the code that runs them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cce_dist.pipeline.grads import RowGradients


class HeadPhases(Protocol):
    """The interface of `PipelineHead`, which documents each phase."""

    weight: Tensor
    hidden_shape: tuple[int, ...]
    hidden_dtype: torch.dtype
    rank: int
    paced: bool
    grads: RowGradients

    @property
    def targets_shape(self) -> tuple[int, ...]: ...

    @property
    def weighs(self) -> bool: ...

    def start_step(self, *, record: bool = True) -> None: ...

    def checked(self, hidden: Tensor | None, targets: Tensor | None) -> tuple[Tensor, Tensor]: ...

    def post(
        self, index: int, root: int, hidden: Tensor | None = None, targets: Tensor | None = None
    ) -> None: ...

    def statistics(self, index: int, *, record: bool = True) -> None: ...

    def value(self, index: int) -> Tensor: ...

    def losses(self, index: int) -> Tensor: ...

    def weigh(self, index: int, root: int, grad_losses: Tensor | None = None) -> None: ...

    def gradients(self, index: int, root: int) -> Tensor: ...

    def take(self, index: int) -> Tensor: ...

    def forget(self) -> None: ...


class EmbeddingPhases(Protocol):
    """The interface of `TiedEmbedding`, which documents each phase."""

    @property
    def is_first(self) -> bool: ...

    def ask(self, index: int, tokens: Tensor | None = None) -> None: ...

    def look_up(self, index: int) -> None: ...

    def rows(self, index: int) -> Tensor: ...

    def keep(self, index: int, grad: Tensor) -> None: ...

    def give(self, index: int) -> None: ...

    def add(self, index: int) -> None: ...
