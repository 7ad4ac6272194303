"""The plan of one loss: all that stays the same over its steps, and each step's request."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist.backends.choose import choose_backend
from cce_dist.backends.protocol import (
    Backend,
    ColumnFilter,
    ExpectedBackward,
    ForwardRequest,
    Kept,
    LogitStore,
    Room,
)
from cce_dist.core.types import Head, Tokens, Wanted
from cce_dist.options import (
    FULL_ORDER,
    SCREENED_BYTES_PER_TOKEN,
    TOKEN_BLOCK,
    LossOptions,
    Screen,
)
from cce_dist.ranks.gather import (
    defer_gather_tokens,
    gather_bounds,
    require_same_sizes,
    sum_over_ranks,
)
from cce_dist.ranks.hidden_sum import SumOverRanks
from cce_dist.ranks.transport import group_size
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group


@dataclass(frozen=True)
class Plan:
    """Options, rows, ranks and the backend of one loss."""

    options: LossOptions
    shard: VocabShard
    group: Group | None
    backend: Backend
    wanted: Wanted
    threshold: float  # of the filter; 0 keeps every column
    keeps_flat: bool = False  # as of `ColumnFilter`
    shares_device: bool = False  # kernels that wait for other ranks are on the device
    backward_is_next: bool = False  # the forward's logits are then not kept for long
    sums_nll: bool = False  # the backend's `LossKernels` may compute the loss

    @functools.cached_property
    def by_chunks(self) -> bool:
        """Tells whether gradient="in_forward" computes one chunk of tokens after another. A chunk's
        logits stay in memory, so leaving columns out would save nothing."""
        options = self.options
        if options.gradient != "in_forward" or options.logits != "full":
            return False
        return not (self._may_filter and self.backend.traits.in_forward_filters)

    @property
    def _may_filter(self) -> bool:
        return self.options.filters and self.threshold > 0

    @functools.cached_property
    def filters(self) -> bool:
        return self._may_filter and not self.by_chunks

    @functools.cached_property
    def screen(self) -> Screen | None:
        """Returns the options of screening; None: full logits, also where every column is kept."""
        return None if self.options.logits == "full" or not self.filters else self.options.screen

    @property
    def keeps_logits(self) -> bool:
        """Tells whether the forward keeps logits for the backward, if the backend can. A screened
        forward keeps exact logits, of the columns that the backward computes first."""
        keeps = self.options.keep_logits
        if keeps is None:
            return self.backward_is_next and self.screen is not None
        return keeps

    def column_filter(self, *, score: bool) -> ColumnFilter | None:
        """Returns the rule by which columns are kept; None: columns are not scored.

        Args: score: a backward follows, or the caller wants the dropped mass. Screened logits are
            filtered in any case.
        """
        options = self.options
        if not self.filters or not (score or options.logits == "screened"):
            return None
        rule = options.filter
        return ColumnFilter(
            self.threshold, rule.eps is not None, rule.tail, options.draws, self.keeps_flat
        )

    def room(self, tokens: Tokens, head: Head) -> Room:
        return self.room_of(len(tokens), head)

    def room_of(self, num_tokens: int, head: Head) -> Room:
        return Room(self.workspace_bytes(num_tokens, head), self.shares_device)

    def workspace_bytes(self, num_tokens: int, head: Head) -> int:
        """Returns the bytes of the workspace of a call on `num_tokens` tokens. Unless the caller
        bounds it, a screened call may use as much as the weight's 8-bit copy took: the copy is
        freed before the backward. One chunk then holds all kept columns of a trained model."""
        room = self.options.workspace_for(num_tokens)
        if self.screen is None or self.options.workspace_bytes is not None:
            return room
        return max(room, min(SCREENED_BYTES_PER_TOKEN * num_tokens, head.weight.numel()))

    def forward_request(
        self, tokens: Tokens, head: Head, *, score: bool, store: LogitStore | None = None
    ) -> ForwardRequest:
        """Builds the request of step 1. Args: score: as in `column_filter`."""
        rule, screen, bounds = self.column_filter(score=score), self.screen, None
        chooses = screen is not None or self.backend.traits.chooses_in_forward
        if rule is not None and chooses and group_size(self.group) > 1:
            bounds = functools.partial(gather_bounds, group=self.group)
        return ForwardRequest(self.wanted, rule, screen, bounds, store, self.room(tokens, head))

    def hidden_sum(self, tokens: Tokens, dtype: torch.dtype) -> SumOverRanks:
        """Builds the sum of step 4. Args: dtype: the hidden gradient's."""
        # A view of the first rows (`Extension`) goes to kernels alone, which ask for no number.
        num_rows = tokens.hidden.shape[0]
        return SumOverRanks(self.group, self.options.sequence_parallel, num_rows, dtype)

    def expect(
        self,
        tokens: Tokens,
        *,
        hidden: bool,  # whether its gradient is needed; so with bias
        weight: torch.dtype | None,  # the dtype of its gradient; None: not needed
        bias: bool,
        accumulate: bool = False,
        in_fp32: bool = False,  # as in `sharded.backward`
    ) -> ExpectedBackward:
        """Describes the backward that may follow, for `store_for` and `warm_up`."""
        dtype = torch.float32 if in_fp32 else tokens.hidden.dtype
        return ExpectedBackward(
            hidden=self.hidden_sum(tokens, dtype) if hidden else None,
            weight=weight,
            accumulate=accumulate,
            bias=bias,
            of_lse=self.options.z_loss != 0 or self.wanted.smooth_logit,
            sums_nll=self.sums_nll,
        )

    def store_for(
        self, tokens: Tokens, head: Head, backward: ExpectedBackward, spare: Tensor | None = None
    ) -> LogitStore | None:
        """Allocates memory in which logits stay for the backward; None: none stay. Args: as in
        `Backend.store_for`."""
        if not self.keeps_logits:
            return None
        request = self.forward_request(tokens, head, score=True)
        return self.backend.store_for(head, len(tokens), request, backward, spare)

    def warm_up(
        self, tokens: Tokens, head: Head, backward: ExpectedBackward, store: LogitStore | None
    ) -> None:
        """Lets the backend compile all kernels of the call at once, before the first step. No
        collectives."""
        if not self.options.invariant:
            request = self.forward_request(tokens, head, score=True, store=store)
            self.backend.warm_up(tokens, head, request, backward)

    def gather_hidden(
        self, hidden: Tensor, *, defer_fill: bool
    ) -> tuple[Tensor, Callable[[], None] | None]:
        """Gathers the tokens of all ranks under sequence parallel; else returns hidden itself.

        Args: defer_fill: return a function that fills the gathered memory, and do not fill it yet.
        Collectives: one all-gather of hidden, at once or in that function.
        """
        if not self.options.sequence_parallel:
            return hidden, None
        gathered, fill = defer_gather_tokens(hidden, self.group)
        if defer_fill:
            return gathered, fill
        fill()
        return gathered, None

    def tail_mass(self, kept: Kept | None, lse: Tensor) -> Tensor:
        """Returns each token's probability mass whose gradient is approximated, [N]; with a softcap
        each probability is weighted by the softcap's slope. Collectives: one all-gather of [N];
        none if nothing is filtered."""
        local = lse.new_zeros(lse.shape) if kept is None else kept.dropped_mass
        return sum_over_ranks(local, self.group) if self.filters else local

    def require_same_sizes(self, hidden: Tensor, num_tokens: int) -> None:
        """Checks that all ranks are about to send tensors of the same sizes. No collective of the
        call comes before it.

        Args: num_tokens: the number of tokens to compute.
        Collectives: those of `gather.require_same_sizes`.
        """
        if group_size(self.group) == 1:
            return
        wanted = sum(flag << place for place, flag in enumerate(astuple(self.wanted)))
        sizes = {
            "tokens of hidden": hidden.shape[0],
            "tokens to compute (not ignored)": num_tokens,
            "D of hidden": hidden.shape[1],
            "bytes an element of hidden": hidden.element_size(),
            "statistics (label_smoothing, stats) as bits": wanted,
        }
        require_same_sizes(sizes, hidden.device, self.group)


def plan_of(
    hidden: Tensor,
    num_tokens: int,
    options: LossOptions,
    group: Group | None,
    shard: VocabShard,
    *,
    ordered_tokens: int | None = None,
    entropy: bool = False,
    has_quantized: bool = False,
) -> Plan:
    """Chooses the backend, the filter's threshold, and full logits where 8 bits cost time.

    Args:
        num_tokens: tokens of all ranks, ignored tokens included.
        ordered_tokens: tokens by which the filter's threshold goes; None: num_tokens.
        entropy: compute the entropy, whatever the options say.
        has_quantized: the caller passes the weight's 8-bit copy.
    """
    backend = choose_backend(options, hidden, num_tokens, shard.num_classes)
    # All ranks decide alike, however many rows each has.
    share = shard.vocab_size // group_size(group)
    if (
        options.logits == "screened"
        and not has_quantized
        and not backend.gains_by_screening(num_tokens, share, hidden.shape[-1])
    ):
        options = _with_full_logits(options)
    ordered_tokens, orders = ordered_tokens or num_tokens, backend.traits.orders_tokens
    threshold, of_many = (
        options.filter.threshold(
            str(hidden.dtype).removeprefix("torch."),
            shard.vocab_size,
            ordered_tokens=number if orders else None,
        )
        for number in (ordered_tokens, max(ordered_tokens, FULL_ORDER))
    )
    flat = (TOKEN_BLOCK if options.filter.eps is None else 1) / shard.vocab_size
    wanted = wanted_of(options, entropy=entropy)
    return Plan(options, shard, group, backend, wanted, threshold, keeps_flat=of_many <= flat)


@functools.cache
def _with_full_logits(options: LossOptions) -> LossOptions:
    # A filtered backward of full logits keeps none of them.
    return replace(options, logits="full", screen=Screen(), keep_logits=None)


def wanted_of(options: LossOptions, *, entropy: bool = False) -> Wanted:
    """Returns the statistics that a call computes.

    Args: entropy: compute the entropy, whatever the options say.
    """
    return Wanted(
        smooth_logit=options.label_smoothing > 0,
        entropy=entropy or "entropy" in options.stats,
        sum_p2="sum_p2" in options.stats,
        correct="correct" in options.stats,
        moments="logit_moments" in options.stats,
        screened="screened" in options.stats,
    )
