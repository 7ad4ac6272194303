"""The interface of a backend: one rank's share of the loss, without autograd or process groups.

A request holds everything that a caller may ask for. A backend ignores the fields that it has no
use for. Callers read its traits, and never ask which fields it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cce_dist.core.stats import MergeKernels, Stats
from cce_dist.core.types import Head, LocalGrads, Pairs, Picked, Tokens, Upstream, Wanted
from cce_dist.options import Screen
from cce_dist.vocab_shard import VocabShard

# Takes a lower bound of each token's lse over this shard, [N] fp32 log2; returns the bounds of all
# shards, [W, N].
Bounds = Callable[[Tensor], Tensor]


class Scores(Protocol):
    """A forward's scores of each column, for `keep`: a dataclass of tensors, opaque to callers."""


class Kept(Protocol):
    """The columns that each block of 128 tokens keeps. Callers see two properties alone."""

    @property
    def dropped_mass(self) -> Tensor: ...  # [N] of the columns of this shard that are not kept

    @property
    def scores(self) -> Scores | None: ...  # that the choice was made from; None: freed


class LogitStore(Protocol):
    """Memory that a forward fills with logits, and that the backward overwrites. Opaque."""


class HiddenSum(Protocol):
    """Step 4: the sum over ranks of each backend's part of the hidden gradient, made once.

    A backend that can overlap calls `start` as soon as only the weight's gradient is left to
    compute. Any other backend calls `of_tokens` at the end. One rank has nothing to sum.
    """

    @property
    def is_local(self) -> bool: ...  # True for a single rank, which must not call `start`

    @property
    def part_dtype(self) -> torch.dtype: ...  # of `start`'s argument; of the result if is_local

    def start(
        self,
        part: Tensor,  # [num_rows, D], 0 where no token is computed; overwritten
        *,
        finish: Callable[[], object] = lambda: None,
    ) -> Callable[[], Tensor]:
        """Starts the sum, which overlaps the work that the current stream gets next.

        Args: finish: completes `part` in place, on the stream of the sum.
        Returns: a function that makes the current stream wait, and returns the sum.
        """
        ...

    def of_tokens(
        self,
        part: Tensor,  # [N, D] of the computed tokens, in the accumulation dtype; overwritten
        rows: Tensor | None,  # [N] int64: the tokens' rows of hidden; None: every row
    ) -> Tensor:
        """Returns the sum, [num_rows, D], 0 at tokens that are not computed."""
        ...


@dataclass(frozen=True)
class ColumnFilter:
    """`options.Filter`, resolved for a dtype, a vocabulary and a backend."""

    threshold: float  # the score at which a column is kept
    by_largest: bool  # the score is the largest probability of one token, not the block's mass
    tail: bool  # the product of their marginals stands in for the dropped columns
    draws: bool  # drawn columns stand in for other dropped columns in the hidden gradient
    keeps_flat: bool = False  # it keeps all columns of a flat softmax, however many tokens


@dataclass(frozen=True)
class Room:
    """The share of the device that a call may take."""

    workspace_bytes: int
    shares_device: bool = False  # kernels that wait for other ranks run beside it (pipelines)


@dataclass(frozen=True)
class Mixture:
    """Jensen-Shannon's mixture of two heads' softmaxes: beta teacher + (1 - beta) student."""

    beta: float
    # [N] of the student, merged over the ranks; float64 where a model has fp32 inputs
    lse: Tensor
    teacher_lse: Tensor  # [N] of the same dtype


@dataclass(frozen=True)
class ForwardRequest:
    """The request of step 1."""

    wanted: Wanted
    filter: ColumnFilter | None  # None: columns are not scored
    screen: Screen | None  # 8-bit logits, exact ones of kept columns; None: full precision
    bounds: Bounds | None  # exchanges bounds with the other ranks; None: no exchange
    store: LogitStore | None  # filled with logits
    room: Room
    # The number of columns of a segment; 0: the shard is one segment. With segments each has its
    # own statistics, [S, N]. They depend on no other token and no other segment, and nothing is
    # filtered, screened, exchanged or stored.
    segment: int = 0
    reverse: bool = False  # of two heads: KL(student || teacher), not KL(teacher || student)
    # Of two heads: Jensen-Shannon, after a step 1 of each head. It needs `reverse`: the student's
    # probabilities weigh the log ratios that the backward needs.
    mixture: Mixture | None = None


@dataclass(frozen=True)
class TeacherStats:
    """Step 1 of two heads. Each field is of every token over this shard, [N] fp32."""

    student: Stats
    teacher_lse: Tensor  # float64 of a teacher in fp32: see `Stats.lse_rest`
    # nats: the request's KL of the softmaxes over this shard's columns alone; or with a mixture
    # [2, N], this shard's part of the divergence and of KL(student || mixture)
    kl: Tensor
    scores: Scores | None  # of both models; None: this shard has no columns
    # [1] int32: 1 if screening the teacher's logits fell back to full ones; None: no screening
    full: Tensor | None = None


@dataclass(frozen=True)
class TeacherPart:
    """Another head's part of d_logits: step 3 of two heads. The request's columns are chosen by the
    scores of both."""

    tokens: Tokens  # the student's, with the teacher's hidden states
    head: Head
    lse: Tensor  # [N] merged over the ranks; float64 where a model has fp32 inputs
    # [N] the loss's gradient by this lse, if it were the student's: d_logits get the teacher's
    # probabilities times it. None: the request's entropy, and upstream of it, are of the student's
    # entropy relative to the teacher, -KL(student || teacher), or to a mixture.
    upstream: Tensor | None
    beta: float | None = None  # as of `Mixture`; None: there is none


@dataclass(frozen=True)
class LateTargets:
    """Targets of rare ids, whose terms are left out while chunks add up the weight's gradient.
    `Backend.add_late_targets` adds them after the last chunk."""

    # [N] fp32, of all tokens or of a chunk's, written: each token's term of its target's d_logits
    # if that is late, else 0
    grads: Tensor
    # [V_local] fp32: d_logits of the first chunk without the targets' terms, summed over tokens.
    # The first chunk writes them.
    sums: Tensor
    num_tokens: int  # of all chunks
    first_tokens: int  # of the first chunk


@dataclass(frozen=True)
class WeightGrad:
    """The memory of the weight's gradient."""

    rows: Tensor  # [V_local, D], written
    accumulate: bool  # the gradient is added to `rows`, in the accumulation dtype
    late: LateTargets | None = None  # of a chunk of tokens; None: every term is added at once


@dataclass(frozen=True)
class ExpectedBackward:
    """Facts about a backward that are known before its forward."""

    hidden: HiddenSum | None  # None: the hidden gradient is not needed
    weight: torch.dtype | None  # dtype of the weight's gradient; None: not needed
    accumulate: bool  # see `WeightGrad`
    bias: bool  # the bias needs a gradient
    of_lse: bool  # the loss depends on lse as well as on nll
    sums_nll: bool = False  # `LossKernels` compute the loss
    scaled: tuple[torch.dtype, ...] = ()  # dtypes of gradients that `scale` will multiply
    by_chunks: bool = False  # of tokens, each with a `store_for_chunk`
    late_targets: bool = False  # several chunks leave out `LateTargets`
    of_nll: bool = True  # of two heads: the loss depends on nll as well as on the KL


@dataclass(frozen=True)
class BackwardRequest:
    """The request of step 3, which also starts step 4."""

    stats: Stats  # merged over the ranks: lse, target logit, and entropy if upstream has one
    upstream: Upstream
    kept: Kept | None  # None: every column
    hidden: HiddenSum | None  # None: the hidden gradient is not needed
    weight: WeightGrad | None  # None: the weight's gradient is not needed
    bias: bool  # the bias needs a gradient
    store: LogitStore | None  # as the forward left it
    room: Room
    # A token's hidden gradient depends on no other token: every column is kept, the order of sums
    # is the same for any number of tokens, and nothing is stored.
    invariant: bool = False
    # Needs `Backend.forward_of_heads`.
    teacher: TeacherPart | None = None


@dataclass(frozen=True)
class PairsRequest:
    """Logits of some pairs of a token and an id, or their gradients, over this rank's shard."""

    pairs: Pairs
    first_id: int  # of the shard
    room: Room

    def columns(self, head: Head) -> Tensor:
        """Returns each pair's row of the head's weight, [P] int64; -1: not of this shard."""
        return self.pairs.columns(self.first_id, head.weight.shape[0])

    def starts(self, ids: Tensor, count: int) -> Tensor:
        """Returns where each of the shard's `count` ids starts in sorted ids, [count + 1] int64."""
        first = torch.arange(self.first_id, self.first_id + count + 1, device=ids.device)
        return torch.searchsorted(ids, first)


@dataclass(frozen=True)
class PairsGrads:
    """Memory for gradients, which a backend writes; None: not needed."""

    hidden: Tensor | None  # [num_rows, D]; 0 where no pair is of the row
    weight: Tensor | None  # [V_local, D]
    bias: Tensor | None  # [V_local] in the accumulation dtype


@dataclass(frozen=True)
class Traits:
    """Facts about a backend by which callers choose their requests."""

    counts_on_device: bool  # Tokens.count is a tensor, and the host never waits for it
    orders_tokens: bool  # blocks hold similar tokens, so the default filter keeps fewer columns
    chooses_in_forward: bool  # chooses columns by all ranks' bounds, before lse is known
    in_forward_filters: bool  # gradient="in_forward" leaves columns out, if the options say so
    # A chunk's logits have as many bytes as the weight's elements, and the weight's gradient may
    # add up in the weight's dtype; otherwise both take the accumulation dtype.
    narrow_logits: bool


# Takes tokens, `LateTargets.grads` of all of them, and the weight's gradient [V_local, D],
# contiguous, to whose rows it adds: each row is rounded once.
AddLateTargets = Callable[[Tokens, Tensor, Tensor], None]
# Takes the student's tokens and head, the teacher's, and a request with a filter.
ForwardOfHeads = Callable[[Tokens, Head, tuple[Tokens, Head], ForwardRequest], TeacherStats]


class LossKernels(NamedTuple):
    """Kernels for a loss that is the sum of all tokens' negative log-likelihoods, over a divisor:
    a number, or [1]."""

    # lse [N], target logit [N], divisor -> []
    total: Callable[[Tensor, Tensor, Tensor | float], Tensor]
    # gradient [] by the total, lse [N], divisor -> gradient by the negative log-likelihoods [N]
    share_gradient: Callable[[Tensor, Tensor, Tensor | float], Tensor]


class Backend(Protocol):
    """One rank's share of the four steps. Methods communicate through their request alone."""

    @property
    def traits(self) -> Traits: ...

    @property
    def merge_kernels(self) -> MergeKernels | None:
        """Kernels for step 2, the same on every rank; None: torch merges."""
        ...

    @property
    def loss_kernels(self) -> LossKernels | None:
        """Kernels for the loss, the same on every rank; None: torch computes it."""
        ...

    @property
    def forward_of_heads(self) -> ForwardOfHeads | None:
        """`forward` of a student's and a teacher's logits, and a divergence, in one pass; None:
        there is none, and `BackwardRequest.teacher` is not read. The masses of both score a column
        by `request.filter`. `request.screen` is of the teacher's logits alone, for the KL that is
        not reverse. Both exchange their bounds, the student first; with `request.mixture` none."""
        ...

    @property
    def add_late_targets(self) -> AddLateTargets | None:
        """Adds `LateTargets.grads`, in one order of sums; None: there are none, and
        `WeightGrad.late` is not read."""
        ...

    def gains_by_screening(self, num_tokens: int, num_columns: int, dim: int) -> bool:
        """Tells whether a call that quantises [num_columns, dim] itself may be faster with 8-bit
        logits than with full ones."""
        ...

    def pick(self, ids: Tensor, ignore_index: int, shard: VocabShard) -> Picked:
        """Moves the targets that count, of ids [N], to the front."""
        ...

    def forward(
        self, tokens: Tokens, head: Head, request: ForwardRequest
    ) -> tuple[Stats, Scores | None]:
        """Computes statistics of every token over this shard, [N] each, and the columns' scores."""
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
        """Chooses the columns that each block keeps; returns None for all of them."""
        ...

    def backward(self, tokens: Tokens, head: Head, request: BackwardRequest) -> LocalGrads:
        """Computes the gradients. Calls `tokens.fill` before it reads hidden."""
        ...

    def scale(self, grad: Tensor, factor: Tensor) -> None:
        """Multiplies a contiguous gradient in place by a number, [], on its device."""
        ...

    def largest(self, tokens: Tokens, head: Head, room: Room) -> tuple[Tensor, Tensor]:
        """Returns each token's largest logit and the first column that has it, int64, [N] each."""
        ...

    def top(self, tokens: Tokens, head: Head, room: Room, k: int) -> tuple[Tensor, Tensor]:
        """Returns each token's k largest logits and their columns, [N, k]: `torch.top.top`."""
        ...

    def pair_logits(self, hidden: Tensor, head: Head, request: PairsRequest) -> Tensor:
        """Computes hidden . weight + bias of each pair, [P] in the accumulation dtype, without
        softcap and scale; 0 for pairs that are not of this shard."""
        ...

    def pair_gradients(
        self, hidden: Tensor, head: Head, request: PairsRequest, grad: Tensor, out: PairsGrads
    ) -> None:
        """Computes the gradients from those of `pair_logits`, [P], in one order of sums."""
        ...

    def store_for(
        self,
        head: Head,
        num_tokens: int,
        request: ForwardRequest,
        backward: ExpectedBackward,
        spare: Tensor | None,
    ) -> LogitStore | None:
        """Allocates memory for logits that the backward would otherwise compute again; None: the
        backend has no use for it.

        Args: spare: the weight's gradient, [V_local, D], which nobody reads before the backward.
        """
        ...

    def store_for_chunk(self, head: Head, num_tokens: int) -> LogitStore:
        """Makes memory for every logit of a chunk of tokens: gradient="in_forward"."""
        ...

    def scores_like(
        self, num_tokens: int, num_columns: int, weight: Tensor, *, has_teacher: bool = False
    ) -> Scores | None:
        """Makes uninitialised scores of the right shapes, on weight's device, for torch.compile.
        Returns None if there are no scores, or if their shapes depend on values.

        Args: has_teacher: the scores of `forward_of_heads`.
        """
        ...

    def warm_up(
        self,
        tokens: Tokens,
        head: Head,
        request: ForwardRequest,
        backward: ExpectedBackward,
        teacher: tuple[Tokens, Head] | None = None,
    ) -> None:
        """Compiles the kernels of such a forward and its backward; a backend without kernels does
        nothing.

        Args: teacher: the forward is that of two heads.
        """
        ...
