"""The rows of the LM head that each rank holds, by token id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The rows [start, stop) of the LM head that one rank holds.

    Rows from `vocab_size` on are padding: they never enter the softmax and get no gradient.

    Args:
        start: token id of the first row; at least 0.
        stop: token id after the last row's. start == stop is an empty shard, which is valid.
        vocab_size: number of classes V of the whole vocabulary, on every rank the same.
    Raises:
        ValueError: the bounds are negative, in the wrong order, or vocab_size is not positive.
    """

    start: int
    stop: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("start", "stop", "vocab_size"):
            _require_int(f"VocabShard.{name}", getattr(self, name))
        if not 0 <= self.start <= self.stop:
            raise ValueError(
                f"VocabShard needs 0 <= start <= stop, got start={self.start}, stop={self.stop}"
            )
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard.vocab_size must be >= 1, got {self.vocab_size}")

    @classmethod
    def even(
        cls, num_rows: int, rank: int, world_size: int, vocab_size: int | None = None
    ) -> VocabShard:
        """Returns the shard of Megatron's rule: every rank holds `num_rows` rows, rank r the rows
        from r * num_rows on.

        If `vocab_size` is smaller than num_rows * world_size, the rows beyond it are padding.
        """
        _require_rank(rank, world_size)
        _require_int("num_rows", num_rows, minimum=0)
        total = num_rows * world_size
        if vocab_size is None:
            vocab_size = total
        _require_int("vocab_size", vocab_size, minimum=1)
        if vocab_size > total:
            raise ValueError(
                f"vocab_size must be <= num_rows * world_size = {total}, got {vocab_size}"
            )
        return cls(rank * num_rows, (rank + 1) * num_rows, vocab_size)

    @classmethod
    def chunked(cls, vocab_size: int, rank: int, world_size: int) -> VocabShard:
        """Returns the shard of torch.chunk's split, which is also that of DTensor's Shard(0):
        ceil(V / W) rows a rank; the last ranks have fewer, or none."""
        _require_rank(rank, world_size)
        _require_int("vocab_size", vocab_size, minimum=1)
        size = -(-vocab_size // world_size)
        start = min(rank * size, vocab_size)
        return cls(start, min(start + size, vocab_size), vocab_size)

    @classmethod
    def balanced(cls, vocab_size: int, rank: int, world_size: int) -> VocabShard:
        """Returns the shard of an even split: the first V mod W ranks hold one row more than the
        others."""
        _require_rank(rank, world_size)
        _require_int("vocab_size", vocab_size, minimum=1)
        size, extra = divmod(vocab_size, world_size)
        start = rank * size + min(rank, extra)
        return cls(start, start + size + (rank < extra), vocab_size)

    @property
    def num_rows(self) -> int:
        """V_local: the rows of `weight`, padding included."""
        return self.stop - self.start

    @property
    def num_classes(self) -> int:
        """Number of rows that enter the softmax."""
        return max(min(self.stop, self.vocab_size) - self.start, 0)

    def local_targets(self, targets: Tensor) -> Tensor:
        """Returns each target's row in this shard, -1 where another rank holds it: [N] -> [N]."""
        mine = (targets >= self.start) & (targets < self.start + self.num_classes)
        return (targets - self.start).masked_fill(~mine, -1)


def dealt_ids(num_ids: int, num_ranks: int, num_rows: int) -> Tensor:
    """Deals ids out to ranks in turn, in their order, as long as a rank has room.

    Args: num_rows: of a rank. Rank r has the new ids [r * num_rows, (r + 1) * num_rows) that are
        below num_ids.
    Returns: [num_ids] int64, the new id of each old one.
    Raises:
        ValueError: the ranks have fewer rows than there are ids.
    """
    import torch

    if num_ranks * num_rows < num_ids:
        raise ValueError(
            f"num_ranks * num_rows must be >= num_ids={num_ids}, got {num_ranks} * {num_rows}"
        )
    new_ids = torch.arange(num_ids)
    return torch.argsort(new_ids % num_rows * num_ranks + new_ids // num_rows)


def _require_int(name: str, value: object, minimum: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an int, got {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value!r}")


def _require_rank(rank: int, world_size: int) -> None:
    _require_int("rank", rank)
    _require_int("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in [0, world_size={world_size}), got {rank}")
