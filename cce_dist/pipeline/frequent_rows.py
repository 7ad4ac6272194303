"""Rows of frequent tokens, which every rank of a vocabulary knows.

A rank estimates from them how much of a token's mass the other ranks hold. Ranks at different
microbatches cannot exchange that mass itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.core.types import Head
from cce_dist.pipeline.comm.courier import Courier
from cce_dist.ranks.gather import start_all_gather
from cce_dist.vocab_shard import VocabShard

# Rows of each rank. Over 4 ranks of 64,000 rows the others' 1,536 cost 2.4 % of the forward.
ROWS = 512


class FrequentRows:
    """Copies, on every rank, of each rank's rows that were targets most often.

    Without these copies a rank whose columns hold little of a token's mass would take that little
    for all the mass, and its filter would keep the columns:
    docs/design/ranks.md#exchanges-of-bounds.

    Args:
        weight: [V_local, D] this rank's rows; bias: [V_local].
        shard: the token ids of this rank's rows.
        courier: the courier of the ranks that share the vocabulary.
    Collectives: one all-gather of a number when it is made; `exchange` has its own.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, shard: VocabShard, courier: Courier
    ) -> None:
        self.weight, self.bias, self.courier = weight, bias, courier
        group = courier.group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        classes = torch.tensor([shard.num_classes], device=weight.device)
        self.num_rows = min(ROWS, int(start_all_gather(classes, group)().min()))
        # Counts of each row as a target; the last entry counts targets of other ranks.
        self._counts = torch.zeros(shard.num_classes + 1, dtype=torch.int64, device=weight.device)
        # Functions that wait for [W, num_rows, D] of weight, and for [W, num_rows] of bias.
        self._weights: Callable[[], Tensor] | None = None
        self._biases: Callable[[], Tensor] | None = None

    def count(self, local_targets: Tensor) -> None:
        """Counts a microbatch's targets. Args: local_targets: [N], -1 = not in this shard."""
        targets = local_targets.to(torch.int64)
        elsewhere = len(self._counts) - 1
        targets = targets.masked_fill(targets < 0, elsewhere)
        self._counts.scatter_add_(0, targets, torch.ones_like(targets))

    @torch.no_grad()
    def exchange(self) -> None:
        """Starts to send this rank's most frequent rows to all ranks.

        Collectives: one all-gather of [num_rows, D] in weight's dtype; with a bias one more of
            [num_rows].
        """
        if not self.num_rows:
            return
        counts, number = self._counts[:-1], len(self._counts) - 1
        # Among equal counts lower rows go first: ids are often in the order of frequency.
        ranked = counts * number + torch.arange(number - 1, -1, -1, device=counts.device)
        chosen = ranked.topk(self.num_rows).indices
        rows, group, issue = self.weight.detach()[chosen], self.courier.group, self.courier.issue
        self._weights = start_all_gather(rows, group, issue)
        if self.bias is not None:
            biases = self.bias.detach()[chosen]
            self._biases = start_all_gather(biases, group, issue)

    def forget(self) -> None:
        """Drops the other ranks' rows: the weight is about to change."""
        self._weights = self._biases = None

    def elsewhere(self, head: Head) -> Head | None:
        """Returns the other ranks' rows as a head; None: they are not known."""
        if self._weights is None:
            return None
        weight, bias = self._of_others(self._weights()), None
        if self._biases is not None:
            bias = self._of_others(self._biases())
        return replace(head, weight=weight, bias=bias, class_weight=None)

    def _of_others(self, rows: Tensor) -> Tensor:
        others = torch.cat([rows[: self.rank], rows[self.rank + 1 :]])
        return others.flatten(0, 1)
