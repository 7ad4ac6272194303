"""What test_mpi.py has MPI ranks reduce and merge, by a group and by MPI's operator alone."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from cce_dist import VocabShard, all_reduce_logaddexp
from cce_dist.core.stats import Stats
from cce_dist.ranks.merge import merge_stats
from cce_dist.ranks.mpi import logaddexp_op, record_type

INF = torch.inf


def made(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


VALUES = {
    "gaussian": torch.randn(4, 50, generator=made()),
    "large": 1e4 * torch.randn(4, 50, generator=made()),
    "one_rank_empty": torch.tensor([[1.0, 2.0], [-INF, -INF], [0.5, -3.0], [1.0, 1.0]]),
    "all_empty": torch.full((4, 3), -INF),
    "mixed": torch.tensor([[-INF, 1.0], [2.0, -INF], [-INF, -INF], [-INF, 100.0]]),
    "nan": torch.tensor([[1.0, torch.nan], [torch.nan, 2.0], [-INF, 1.0], [3.0, torch.nan]]),
    "matrix": torch.randn(4, 3, 5, generator=made()),
    "scalar": torch.arange(4.0),
    "no_elements": torch.empty(4, 0),
}
# Algorithms change with the size, and with the number of ranks.
SIZES = (0, 1, 2, 3, 7, 129, 1000, 2731, 8192, 20_001)
LARGE = 100_000


def reduced(group: Any, parts: Tensor) -> Tensor:
    return all_reduce_logaddexp(parts[group.rank()], group)


def parts_of(num_tokens: int, dtype: torch.dtype) -> Stats:
    """What four shards know of tokens, fields [4, N]: far apart, some -inf."""
    lse = 30 * torch.randn(4, num_tokens, generator=made(num_tokens), dtype=dtype)
    lse = lse.masked_fill(torch.rand(lse.shape, generator=made(1)) < 0.2, -INF)
    return Stats(lse, torch.randn(lse.shape, generator=made(2), dtype=dtype))


def merged(group: Any, name: str) -> dict[str, Tensor]:
    """merge_stats of statistics as `name` says, over any kind of group."""
    rank, size = group.rank(), group.size()
    parts = parts_of(64, torch.float32)
    more: dict[str, Tensor] = {}
    if name == "smooth":
        more["smooth_logit"] = torch.randn(4, 64, generator=made(3))
    if name == "entropy":
        more["entropy"] = torch.rand(4, 64, generator=made(3))
    fields = {"lse": parts.lse, "target_logit": parts.target_logit, **more}
    local = Stats(**{key: value[rank].clone() for key, value in fields.items()})
    count = torch.tensor([50], dtype=torch.int32) if name == "count" else None
    found = merge_stats(local, VocabShard.balanced(100, rank, size), group, count)
    return {key: value for key, value in vars(found).items() if value is not None}


def bits_of_every_size(group: Any, dtype: torch.dtype) -> dict[int, tuple[str, float]]:
    """By N: a hash of what the merge of N tokens has left here, and its largest error."""
    found = {}
    for num_tokens in (*SIZES, LARGE) if dtype == torch.float32 else SIZES:
        parts = parts_of(num_tokens, dtype)
        local = Stats(parts.lse[group.rank()].clone(), parts.target_logit[group.rank()].clone())
        got = merge_stats(local, VocabShard.balanced(100, group.rank(), group.size()), group)
        golden = parts.lse[: group.size()].double().logsumexp(0)
        errors = torch.where(got.lse == golden, 0, got.lse - golden).abs()
        sums = parts.target_logit[: group.size()].double().sum(0)
        errors = torch.maximum(errors, (got.target_logit - sums).abs())
        digest = hashlib.sha256(got.pack().numpy().tobytes()).hexdigest()
        found[num_tokens] = (digest, float(errors.max()) if num_tokens else 0.0)
    return found


def by_mpi_alone(group: Any) -> Tensor:
    """The published operator on the caller's own communicator, as its docstring shows."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(0, group.rank())
    parts = parts_of(1000, torch.float64)
    lse = parts.lse[group.rank()]
    records = torch.stack([lse, (lse > -INF).double(), parts.target_logit[group.rank()]], 1)
    of_three = record_type(torch.float64, 3)
    comm.Allreduce(
        MPI.IN_PLACE, [records.numpy(), len(records), of_three], logaddexp_op(torch.float64)
    )
    comm.Free()
    return torch.stack([records[:, 0] + records[:, 1].log(), records[:, 2]])
