"""A case on ranks of a pool, and whole again."""

from __future__ import annotations

from torch import Tensor

from cce_dist.testing import Case, join_ranks, run_case, shared_pool

WORLD_SIZES = (1, 2, 3, 4)
Bounds = tuple[tuple[int, int], ...]


def run_ranks(case: Case, world_size: int, *, first_rank: int = 0) -> dict[str, Tensor]:
    """One whole result; asserts that what all ranks return is bitwise equal on all of them."""
    results = shared_pool().run(world_size, run_case, case, first_rank=first_rank)
    return join_ranks(case, results)


RANKS = {f"{size}_ranks": size for size in WORLD_SIZES}
