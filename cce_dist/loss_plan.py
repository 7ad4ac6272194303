"""What stays the same over the steps of one loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cce_dist.local import LocalBackend
from cce_dist.options import SCREENED_BYTES_PER_TOKEN, LossOptions, Screen
from cce_dist.partials import Head, Wanted
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from cce_dist.transport import Group


@dataclass(frozen=True)
class Plan:
    """What to compute, of which rows, with whom and by which backend."""

    options: LossOptions
    shard: VocabShard
    group: Group | None
    backend: LocalBackend
    wanted: Wanted
    threshold: float  # of the filter; 0 keeps every column
    beside: bool = False  # kernels that wait for other ranks are on the device
    backward_is_next: bool = False  # as a rule: what the forward keeps for it is not kept for long

    @property
    def filters(self) -> bool:
        # With a chunk's logits at hand, leaving columns out would save nothing.
        if self.options.gradient == "in_forward" and self.backend.keeps_logits:
            return False
        return self.options.filters and self.threshold > 0

    @property
    def screen(self) -> Screen | None:
        """How logits are screened; None: they are not, nor where every column is kept."""
        if self.options.logits == "full" or not self.backend.screens or not self.filters:
            return None
        return self.options.screen

    def workspace_bytes(self, num_tokens: int, head: Head) -> int:
        """Of one call on so many tokens. Unless it is given a screened one has more, so that one
        chunk holds what is kept of a trained model: its 8-bit copy of the weight, gone by then, was
        no smaller."""
        room = self.options.workspace_for(num_tokens)
        if self.screen is None or self.options.workspace_bytes is not None:
            return room
        return max(room, min(SCREENED_BYTES_PER_TOKEN * num_tokens, head.weight.numel()))

    @property
    def keeps_listed(self) -> bool:
        """Whether a screened forward keeps the exact logits of what the backward begins with."""
        keeps = self.options.keep_logits
        if keeps is None:
            keeps = self.backward_is_next
        return keeps and self.screen is not None and self.backend.room_for_listed is not None
