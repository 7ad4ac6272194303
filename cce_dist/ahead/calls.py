"""The calls of the loss that a job makes on its head."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import LossOptions, LossOutput, VocabShard
from cce_dist.frontend.inputs import Inputs
from cce_dist.loss import compute_loss

# Tensors of a call beside hidden, weight and targets.
FURTHER = ("bias", "token_weight", "class_weight", "grad_weight_into", "temperature")
# Of the statistics those that a caller may differentiate.
DIFFERENTIABLE = ("lse", "entropy")
# The bytes of a tensor of so many rows and columns are an int64.
MAX_SIZE = 2**30


@dataclass(frozen=True)
class HeadCalls:
    """Calls of `linear_cross_entropy` by all ranks of a job.

    Args:
        num_tokens: tokens of a call, those of all ranks that share the vocabulary.
        trained: options of calls with gradients and, for evaluation, of calls without.
        evaluated: options of further calls without gradients.
        num_ranks: ranks that share the vocabulary, by torch.chunk's split; None: no group.
        tensors: dtypes of further tensors of each call, by their names in `FURTHER`.
    Raises:
        ValueError: a size is below 1 or above MAX_SIZE, tokens are no multiple of the ranks that
            split them, or a further tensor has another name.
    """

    vocab_size: int
    dim: int
    dtype: torch.dtype
    num_tokens: int
    trained: tuple[LossOptions, ...]
    evaluated: tuple[LossOptions, ...] = ()
    num_ranks: int | None = None
    tensors: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = 1 if self.num_ranks is None else self.num_ranks
        sizes = {"vocab_size": self.vocab_size, "dim": self.dim, "tokens": self.num_tokens}
        for name, size in (sizes | {"tp": ranks}).items():
            if size < 1:
                raise ValueError(f"{name} must be >= 1, got {size}")
            if size > MAX_SIZE:
                raise ValueError(f"{name} must be <= {MAX_SIZE}, got {size}")
        if any(options.sequence_parallel for options in self.trained) and self.num_tokens % ranks:
            raise ValueError(
                f"tokens must be a multiple of tp={ranks} with sequence_parallel, got "
                f"{self.num_tokens}"
            )
        for name in self.tensors:
            if name not in FURTHER:
                raise ValueError(f"a further tensor must be one of {FURTHER}, got {name!r}")

    def shards(self) -> list[tuple[int, VocabShard]]:
        """Returns ranks and their rows: one rank for all ranks whose calls launch the same
        binaries. Triton tells multiples of 16 apart from other numbers."""
        size = self.num_ranks or 1
        kinds: dict[tuple[int, bool], tuple[int, VocabShard]] = {}
        # Beyond a rank for each row all ranks are empty.
        for rank in range(min(size, self.vocab_size + 1)):
            shard = VocabShard.chunked(self.vocab_size, rank, size)
            kinds.setdefault((shard.num_rows, shard.start % 16 == 0), (rank, shard))
        return list(kinds.values())

    def make(self) -> None:
        """Makes the calls, as each kind of rank: see `stand_in.tensors_without_memory`."""
        for rank, shard in self.shards():
            with _group(rank, self.num_ranks) as group:
                for options in self.trained:
                    self._call(shard, group, options)
                    names = set(options.stats) & set(DIFFERENTIABLE)
                    if names and options.gradient != "in_forward":
                        self._call(shard, group, options, names)
                with torch.no_grad():
                    for options in (*self.trained, *self.evaluated):
                        self._call(shard, group, options)

    def _call(
        self, shard: VocabShard, group: Any, options: LossOptions, stats: Collection[str] = ()
    ) -> None:
        """Computes a loss; in grad mode also the gradients of it and of those statistics."""
        options = replace(options, backend="triton")
        result = compute_loss(self._inputs(shard, options), options, group, shard)
        output = result if isinstance(result, LossOutput) else LossOutput(result)
        outputs = [output.loss, *(getattr(output, name) for name in stats)]
        if torch.is_grad_enabled():
            torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])

    def _inputs(self, shard: VocabShard, options: LossOptions) -> Inputs:
        slices = (self.num_ranks or 1) if options.sequence_parallel else 1
        tokens, weight = (self.num_tokens,), (shard.num_rows, self.dim)
        shapes = {
            "bias": (shard.num_rows,),
            "token_weight": tokens,
            "class_weight": (shard.vocab_size,),
            "grad_weight_into": weight,
            "temperature": tokens,
        }
        further: dict[str, Tensor] = {
            name: torch.empty(shapes[name], dtype=dtype, requires_grad=name == "bias")
            for name, dtype in self.tensors.items()
        }
        return Inputs(
            torch.empty(self.num_tokens // slices, self.dim, dtype=self.dtype, requires_grad=True),
            torch.empty(weight, dtype=self.dtype, requires_grad=True),
            torch.empty(tokens, dtype=torch.int64),
            **further,
        )


@contextlib.contextmanager
def _group(rank: int, size: int | None) -> Iterator[Any]:
    """Returns a group in which this process is that rank, and whose collectives do nothing."""
    if size is None:
        yield None
        return
    # The import makes the backend known to torch.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
