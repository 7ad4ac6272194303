"""What tests share of cases that have `leaves` (hidden, weight, bias), `targets` and `run`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import VocabShard


def on_rank(
    leaves: dict[str, Tensor], group: Any, cuts: tuple[int, ...], *, split: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any], slice]:
    """Gives a rank the head's rows between two cuts, and with `split` its part of the tokens.

    Returns: its leaves, the options that say so, and its rows.
    """
    rank = dist.get_rank(group)
    rows = slice(cuts[rank], cuts[rank + 1])
    of_rank = {name: leaves[name].detach()[rows] for name in ("weight", "bias")}
    if split:
        of_rank["hidden"] = leaves["hidden"].detach().chunk(group.size())[rank]
    copies = {name: tensor.clone().requires_grad_() for name, tensor in of_rank.items()}
    shard = VocabShard(rows.start, rows.stop, cuts[-1])
    options = {"group": group, "vocab_shard": shard, "sequence_parallel": split}
    return {**leaves, **copies}, options, rows


def check_reduction(case: Any, reduction: str) -> None:
    """Checks a reduction of a case that shifts its targets by one, against each token's loss."""
    weights = torch.rand(case.targets.shape).double()
    each = case.run(case.leaves())
    reduced = case.run(case.leaves(), reduction=reduction, token_weight=weights)
    total = (each.loss * weights[..., 1:]).sum()
    number = (case.targets[..., 1:] >= 0).sum() if reduction == "mean" else 1
    torch.testing.assert_close(reduced.loss, total / number)
