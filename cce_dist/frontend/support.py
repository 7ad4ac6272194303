"""The softmax over a support: ordinary autograd on the logits of the ids that it lists."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cce_dist.core.gathers import inverse_of, taken
from cce_dist.core.segments import reduce_segments, spread_segments
from cce_dist.frontend.listed import Listed, TokenSupport, tokens_of


@dataclass(frozen=True)
class Supported:
    """The logits of a support's pairs, and their softmax. Fields of tokens are [N], others [P]."""

    listed: Listed
    ids: Tensor
    offsets: Tensor  # [N + 1]
    token_of: Tensor
    order: Tensor  # the pairs sorted by id, stably
    counts: Tensor  # bool: the pair's token counts, and no earlier pair of the token has its id
    is_target: Tensor  # bool, False where a pair does not count, or its logit is -inf
    has_target: Tensor  # bool, [N]
    z: Tensor  # minus the token's `origin`; -inf where a pair does not count
    origin: Tensor | None  # the largest logit: of fp32 inputs, see `Stats.lse_rest`; None: 0
    lse: Tensor  # of z; -inf without pairs, or where all logits are -inf

    @classmethod
    def of(cls, listed: Listed, support: TokenSupport) -> Supported:
        """Computes the logits of a support that `check_support` has seen."""
        offsets, ids = support.offsets.contiguous(), support.ids.contiguous()
        token_of = tokens_of(offsets, ids.shape[0])
        order = torch.sort(ids, stable=True).indices
        counts = listed.counts[token_of] & ~_repeats(ids, token_of, order)
        z = listed.logits(ids, offsets, token_of, order).masked_fill(~counts, -torch.inf)
        top = reduce_segments(z.detach(), offsets, token_of, "max")
        top = top.masked_fill(top == -torch.inf, 0)
        origin = top if listed.is_wide else None
        if origin is not None:
            z, top = z - origin[token_of], torch.zeros_like(top)
        powers = (z - top[token_of]).exp()
        powers = powers.double() if listed.is_wide else powers
        sums = reduce_segments(powers, offsets, token_of, "sum")
        is_target = counts & (ids == listed.targets[token_of]) & (z != -torch.inf)
        has_target = reduce_segments(is_target.to(z.dtype), offsets, token_of, "max") > 0
        # The logarithm of 0 would make NaN gradients.
        is_empty = sums == 0
        lse = (top + sums.masked_fill(is_empty, 1).log()).masked_fill(is_empty, -torch.inf)
        lse = lse.to(z.dtype)
        logits = z, origin, lse
        return cls(listed, ids, offsets, token_of, order, counts, is_target, has_target, *logits)

    def detached(self) -> Supported:
        """Returns the same softmax for statistics that have no gradient."""
        return replace(self, z=self.z.detach(), lse=self.lse.detach())

    def total(self, values: Tensor) -> Tensor:
        """Sums values of pairs [P] by token, [N]."""
        return reduce_segments(values, self.offsets, self.token_of, "sum")

    def logprobs(self) -> Tensor:
        """Returns each target's log-probability; -inf, without a gradient, where it has none."""
        target = self.total(self.z.masked_fill(~self.is_target, 0))
        return (target - self.lse).masked_fill(~self.has_target, -torch.inf)

    def outside(self) -> Tensor:
        """Returns the number of targets outside their support, []."""
        return (self.listed.counts & ~self.has_target).sum()

    def _log_p(self) -> Tensor:
        """Returns each pair's log-probability, 0 where its logit is -inf."""
        spread = spread_segments(self.lse, self.offsets, self.token_of)
        return (self.z - spread).masked_fill(self.z == -torch.inf, 0)

    def entropy(self) -> Tensor:
        log_p = self._log_p()
        p = log_p.exp().masked_fill(self.z == -torch.inf, 0)
        return 0 - self.total(p * log_p)

    def sum_p2(self) -> Tensor:
        p2 = (2 * self._log_p()).exp().masked_fill(self.z == -torch.inf, 0)
        return self.total(p2).log()

    def correct(self) -> Tensor:
        """Tells whether the target has the largest logit; of equal logits the lowest id wins."""
        top = reduce_segments(self.z, self.offsets, self.token_of, "max")
        is_top = self.counts & (self.z == top[self.token_of])
        # float64 holds every id.
        last = (-self.ids.double()).masked_fill(~is_top, -torch.inf)
        winner = -reduce_segments(last, self.offsets, self.token_of, "max")
        return self.has_target & (winner == self.listed.targets)

    def mean_logit(self) -> Tensor:
        number = self.total(self.counts.to(self.z.dtype))
        mean = self.total(self.z.masked_fill(~self.counts, 0)) / number.clamp_min(1)
        return mean if self.origin is None else mean + self.origin

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the ids and the log-probabilities of the k largest logits, [N, k] each, in
        falling order, equal ones by id; -1 and -inf where a support has fewer ids."""
        order = self.order[torch.sort(self.z[self.order], descending=True, stable=True).indices]
        order = order[torch.sort(self.token_of[order], stable=True).indices]
        token = self.token_of[order]
        rank = torch.arange(len(order), device=order.device) - self.offsets[token]
        kept = (rank < k) & self.counts[order]
        # The last column takes what is left out.
        at = rank.where(kept, k)
        tokens = self.offsets.shape[0] - 1
        ids = self.ids.new_full((tokens, k + 1), -1)
        values = self.z.new_full((tokens, k + 1), -torch.inf)
        ids[token, at] = self.ids[order]
        log_p = self._log_p().masked_fill(self.z == -torch.inf, -torch.inf)
        values[token, at] = log_p[order]
        return ids[:, :k], values[:, :k]

    def candidates(self, ids: Tensor) -> Tensor:
        """Returns the log-probabilities of ids [N, K]: [N, K], -inf outside the support."""
        if not len(self.ids):
            # -inf everywhere, and in the graph: a batch without ids has a backward, too.
            return self.lse[:, None].expand(ids.shape)
        width = self.listed.vocab_size
        key, order = torch.sort(self.token_of * width + self.ids, stable=True)
        tokens = torch.arange(ids.shape[0], device=ids.device)[:, None]
        wanted = (tokens * width + ids).contiguous()
        at = torch.searchsorted(key, wanted).clamp_max(len(key) - 1)
        pair = order[at]
        supported = (key[at] == wanted) & self.counts[pair] & (self.z[pair] != -torch.inf)
        return (taken(self.z, pair) - self.lse[:, None]).masked_fill(~supported, -torch.inf)


def _repeats(ids: Tensor, token_of: Tensor, order: Tensor) -> Tensor:
    """Tells of each pair whether an earlier pair of its token has its id, [P]."""
    ids, token_of = ids[order], token_of[order]
    again = (ids[1:] == ids[:-1]) & (token_of[1:] == token_of[:-1])
    return torch.cat([again.new_zeros(min(len(ids), 1)), again])[inverse_of(order)]
