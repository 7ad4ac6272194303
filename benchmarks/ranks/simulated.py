"""Ranks that share the vocabulary, one after the other on one device: each one's own kernels.

A collective's results follow from what all ranks contribute to it, which follows from the results
of earlier collectives. So each rank is called until it needs a result that is not known, the result
is made of what all ranks contributed, and the ranks are called again. When none needs another
result, each rank is timed with all of them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from benchmarks.ranks.played_group import Asked, UnknownResultError, played_group, results_of
from cce_dist import VocabShard
from cce_dist.bench.golden import (
    GRADIENT_ERRORS,
    Gradients,
    LossFunction,
    errors,
    golden_gradients,
    gradients,
)
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.machine import fresh_compiler, variant_of
from cce_dist.bench.methods import Method
from cce_dist.bench.profile import profiled
from cce_dist.bench.rank_methods import Place, Setup, kept_share
from cce_dist.bench.report import Cells
from cce_dist.options import Backend

# Played results are copies, which real collectives are not.
COPIES = "Memcpy"
# The model of communication: a collective takes LATENCY_MS, and the bytes that a rank sends travel
# at LINK_BYTES a second: two H200s over NVLink, docs/notebook/2026-11-27/simulated-ranks.md.
LATENCY_MS, LINK_BYTES = 0.015, 172e9
# More collectives than a loss has.
MOST_COLLECTIVES = 64


@dataclass
class Group:
    """The collectives of one call by a method's ranks, and each rank's results, as far as known."""

    method: Method
    inputs: BenchInputs  # all tokens, and the whole vocabulary
    size: int
    backend: Backend
    called: list[Asked]  # by rank 0; all ranks contribute as many bytes
    results: list[list[Tensor]]  # by collective, then by rank

    @property
    def moved_bytes(self) -> float:
        """Returns the bytes that a rank sends."""
        return sum(each.moved(self.size) for each in self.called)

    @property
    def communication_ms(self) -> float:
        return len(self.called) * LATENCY_MS + self.moved_bytes / LINK_BYTES * 1e3

    def shard(self, rank: int) -> VocabShard:
        return VocabShard.chunked(len(self.inputs.weight), rank, self.size)

    def rows(self, rank: int) -> slice:
        return slice(self.shard(rank).start, self.shard(rank).stop)

    def part(self, rank: int) -> BenchInputs:
        return replace(self.inputs, weight=self.inputs.weight[self.rows(rank)])

    @contextmanager
    def rank(self, rank: int, *, is_whole: bool) -> Iterator[LossFunction]:
        """Yields the loss of a rank whose collectives give the known results."""
        if self.size == 1:
            yield self.method.build(Setup(self.backend))
            return
        results = [each[rank] for each in self.results]
        device = self.inputs.hidden.device
        with played_group(rank, self.size, results, device, is_whole=is_whole) as group:
            place = Place(group, self.shard(rank))
            yield self.method.build(Setup(self.backend, place=place))

    def learn(self) -> None:
        """Calls all ranks until no result is unknown."""
        for _ in range(MOST_COLLECTIVES):
            asked = [self._first_unknown(rank) for rank in range(self.size)]
            unknown = [each for each in asked if each is not None]
            if not unknown:
                return
            if len(unknown) < self.size:
                raise RuntimeError(f"{self.method.name}: only some ranks called another collective")
            self.results.append(results_of(unknown))
            self.called.append(unknown[0])
        raise RuntimeError(f"{self.method.name} calls more than {MOST_COLLECTIVES} collectives")

    def _first_unknown(self, rank: int) -> Asked | None:
        with self.rank(rank, is_whole=False) as function:
            try:
                gradients(function, self.part(rank))
            except UnknownResultError as error:
                return error.asked
        return None


def simulate_ranks(
    inputs: BenchInputs,
    methods: Sequence[Method],
    sizes: Sequence[int],
    *,
    repeats: int,
    backend: Backend = "auto",
    save: Callable[[list[Cells]], None] = lambda rows: None,
) -> list[Cells]:
    """Returns a row for every rank of every size, and a row of their slowest.

    `kernel_ms` is the time of a rank's kernels in a call of loss and gradients, and `call_ms` the
    median call, both without other ranks; on a CPU kernels are operations. `times_faster` is one
    rank's kernels over the slowest rank's; `with_communication` the same with the model's time of
    all collectives added to the slowest rank's, none of it hidden behind kernels. `sent_mib` is
    what a rank sends by a ring.

    Without sequence parallelism.

    Raises:
        ValueError: a size does not divide the vocabulary, or a method is a peer's, which may
            communicate by other means.
        RuntimeError: the ranks' collectives do not fit each other.
    """
    for size in sizes:
        if len(inputs.weight) % size:
            raise ValueError(
                f"simulate must divide the number of classes, {len(inputs.weight)}, got {size}"
            )
    if peers := [method.name for method in methods if method.origin == "peer"]:
        raise ValueError(f"simulate takes no peers, got {peers}")
    rows: list[Cells] = []
    # On a CPU nothing here compiles; the compiler alone would take seconds to import.
    with fresh_compiler() if inputs.hidden.is_cuda else nullcontext():
        golden = golden_gradients(inputs)
        for method in methods:
            one: float | None = None
            for size in sorted({1, *sizes}):
                group = Group(method, inputs, size, backend, [], [])
                group.learn()
                ranks = [_measured(group, rank, golden, repeats) for rank in range(size)]
                slowest = max(float(row["kernel_ms"] or 0) for row in ranks)
                one = slowest if size == 1 else one
                rows += ranks
                rows.append(_summary(group, ranks, slowest, one))
                save(rows)
    return rows


def _measured(group: Group, rank: int, golden: Gradients, repeats: int) -> Cells:
    part, rows = group.part(rank), group.rows(rank)
    mine = Gradients(golden.loss, golden.hidden, golden.weight[rows])
    kept = None
    if part.hidden.is_cuda:
        # A forward alone calls the first collectives of a call alone.
        with group.rank(rank, is_whole=True) as function:
            kept = kept_share(function, part, exchanges=True)
    with group.rank(rank, is_whole=True) as function:
        off = errors(gradients(function, part), mine)
        variant = variant_of(function, part, "loss+grad")
        call, kernels = profiled(variant, part.hidden.device, repeats)
    kernel_ms = sum(ms for name, _, ms in kernels if not name.startswith(COPIES))
    cells = {"kernel_ms": kernel_ms, "call_ms": call, "kept": kept, **off}
    return _row(group, str(rank), cells)


def _summary(group: Group, ranks: list[Cells], slowest: float, one: float | None) -> Cells:
    cells = {name: max(float(row[name] or 0) for row in ranks) for name in ("call_ms", *_ERRORS)}
    cells["kernel_ms"] = slowest
    if one is not None and group.size > 1:
        cells["times_faster"] = one / slowest
        cells["communication_ms"] = group.communication_ms
        cells["with_communication"] = one / (slowest + group.communication_ms)
        cells["sent_mib"] = group.moved_bytes / 2**20
    return _row(group, "slowest", cells)


_ERRORS = ("loss_error", *GRADIENT_ERRORS)
_COLUMNS = (
    *("kernel_ms", "call_ms", "times_faster", "communication_ms", "with_communication"),
    *("sent_mib", "kept", *_ERRORS),
)


def _row(group: Group, rank: str, cells: Mapping[str, float | None]) -> Cells:
    row = {name: cells.get(name) for name in _COLUMNS}
    return {"method": group.method.name, "ranks": group.size, "rank": rank, **row}
