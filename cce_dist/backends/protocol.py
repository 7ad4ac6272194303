"""A backend: one rank's share of the loss, without autograd and without knowing the ranks.

Everything that a caller may ask for stands in a request. A backend ignores a field that it has no
use for: no caller asks which fields a backend uses, but for its traits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cce_dist.core.stats import MergeKernels, Stats
from cce_dist.core.types import Head, LocalGrads, Picked, Tokens, Upstream, Wanted
from cce_dist.options import Screen
from cce_dist.vocab_shard import VocabShard

# [N] fp32, log2: a lower bound of each token's lse over this shard -> [W, N], those of all shards.
Bounds = Callable[[Tensor], Tensor]


class Scores(Protocol):
    """A forward's record of each column for `keep`: a dataclass of tensors, opaque."""


class Kept(Protocol):
    """The columns that each block of 128 tokens keeps. Opaque, but for two properties."""

    @property
    def dropped_mass(self) -> Tensor: ...  # [N] of this shard's other columns

    @property
    def scores(self) -> Scores | None: ...  # those it was chosen from, where it has them still


class LogitStore(Protocol):
    """Memory that a forward fills with logits and the backward uses up. Opaque."""


class HiddenSum(Protocol):
    """Step 4: takes a backend's part of the hidden gradient, once, and sums it over the ranks.

    A backend that can overlap calls `start` as soon as only the weight's gradient is left to
    compute. Another one calls `of_tokens` at the end. One rank has nothing to sum.
    """

    @property
    def is_local(self) -> bool: ...  # there is one rank: `start` must not be called

    @property
    def part_dtype(self) -> torch.dtype: ...  # of the part that `start` takes, or of the result

    def start(
        self,
        part: Tensor,  # [num_rows, D], 0 where no token is computed; overwritten
        *,
        finish: Callable[[], object] = lambda: None,
    ) -> Callable[[], Tensor]:
        """Starts the sum. The current stream's later work runs beside it.

        Args: finish: completes `part` in place, on the stream that sums it.
        Returns: a function that makes the stream wait, and returns the sum.
        """
        ...

    def of_tokens(
        self,
        part: Tensor,  # [N, D] of the computed tokens, in the accumulation dtype; overwritten
        rows: Tensor | None,  # [N] int64, their rows of hidden; None: all of them
    ) -> Tensor:
        """Returns the sum of [num_rows, D], 0 at tokens that are not computed."""
        ...


@dataclass(frozen=True)
class ColumnFilter:
    """`options.Filter`, resolved for a dtype, a vocabulary and a backend."""

    threshold: float  # the score at which a column is kept
    by_largest: bool  # the score is the largest probability of one token, not the block's mass
    tail: bool  # dropped columns are replaced by the product of their marginals
    draws: bool  # some dropped columns stand for others in the hidden gradient


@dataclass(frozen=True)
class Room:
    """The share of the device that a call may take."""

    workspace_bytes: int
    shares_device: bool = False  # kernels that wait for other ranks run beside it (pipelines)


@dataclass(frozen=True)
class ForwardRequest:
    """Step 1."""

    wanted: Wanted
    filter: ColumnFilter | None  # None: columns are not scored
    screen: Screen | None  # 8-bit logits, but for the columns kept, with `filter`; None: in full
    bounds: Bounds | None  # exchanges bounds with other ranks; None: this rank does without
    store: LogitStore | None  # filled
    room: Room


@dataclass(frozen=True)
class WeightGrad:
    """The memory of the weight's gradient."""

    rows: Tensor  # [V_local, D], written
    accumulate: bool  # added to `rows`, in the accumulation dtype


@dataclass(frozen=True)
class ExpectedBackward:
    """Facts about a backward that are known before its forward."""

    hidden: HiddenSum | None  # None: that gradient is not needed
    weight: torch.dtype | None  # of its gradient; None: not needed
    accumulate: bool  # as of `WeightGrad`
    bias: bool
    of_lse: bool  # the loss depends on lse beside nll


@dataclass(frozen=True)
class BackwardRequest:
    """Step 3, and the start of step 4."""

    stats: Stats  # merged over the ranks: lse, target logit; entropy, where upstream has it
    upstream: Upstream
    kept: Kept | None  # None: every column
    hidden: HiddenSum | None  # None: that gradient is not needed, as are the others
    weight: WeightGrad | None
    bias: bool
    store: LogitStore | None  # as the forward left it
    room: Room


@dataclass(frozen=True)
class Traits:
    """Facts about a backend that decide what is asked of it."""

    counts_on_device: bool  # Tokens.count is a tensor: the host never waits for it
    orders_tokens: bool  # blocks hold similar tokens: the default filter then keeps less
    chooses_in_forward: bool  # columns are kept before lse is known: by bounds of all ranks
    in_forward_by_chunks: bool  # gradient="in_forward" keeps a chunk's logits, and never filters


class Backend(Protocol):
    """One rank's share of the four steps. No method communicates, but by what a request brings."""

    @property
    def traits(self) -> Traits: ...

    @property
    def merge_kernels(self) -> MergeKernels | None:
        """Kernels for step 2, the same on every rank; None: torch merges."""
        ...

    def pick(self, ids: Tensor, ignore_index: int, shard: VocabShard) -> Picked:
        """Finds which of [N] targets count, and moves those to the front."""
        ...

    def forward(
        self, tokens: Tokens, head: Head, request: ForwardRequest
    ) -> tuple[Stats, Scores | None]:
        """Computes statistics of every token over this shard, [N] each, and scores of columns."""
        ...

    def keep(
        self,
        tokens: Tokens,
        head: Head,
        scores: Scores,
        lse: Tensor,  # [N] over all ranks
        rule: ColumnFilter,
        room: Room,
    ) -> Kept | None:
        """Chooses the columns that each block keeps; None: all of them."""
        ...

    def backward(self, tokens: Tokens, head: Head, request: BackwardRequest) -> LocalGrads:
        """Computes the gradients. Calls `tokens.fill` before it reads hidden."""
        ...

    def largest(self, tokens: Tokens, head: Head, room: Room) -> tuple[Tensor, Tensor]:
        """Returns each token's largest logit and the first column that has it, int64, [N] each."""
        ...

    def store_for(
        self,
        head: Head,
        num_tokens: int,
        request: ForwardRequest,
        backward: ExpectedBackward,
        spare: Tensor | None,
    ) -> LogitStore | None:
        """Makes memory for logits that the backward would compute again; None: there is no use.

        Args: spare: [V_local, D] of the weight's gradient, which nobody reads before the backward.
        """
        ...

    def scores_like(self, num_tokens: int, num_columns: int, weight: Tensor) -> Scores | None:
        """Makes uninitialised scores of the right shapes on weight's device, for torch.compile;
        None: their shapes depend on values, or there are none."""
        ...

    def warm_up(
        self, tokens: Tokens, head: Head, request: ForwardRequest, backward: ExpectedBackward
    ) -> None:
        """Compiles what such a forward and its backward launch, where that takes a compiler."""
        ...
