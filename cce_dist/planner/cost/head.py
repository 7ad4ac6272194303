"""The cost of the LM head and the loss, by kind of loss."""

from __future__ import annotations

from dataclasses import dataclass

from cce_dist.options import default_workspace_bytes
from cce_dist.planner.models.model import Model

from .hardware import Hardware
from .job import Job
from .layer import collective

# Bytes a logit through HBM beside the products, forward and backward; at the loss's peak; and kept
# between the two. docs/planner.md.
NATIVE_TRAFFIC, NATIVE_PEAK = (20.0, 18.0), 10.0
KEPT = 4.0
CHUNKED_TRAFFIC, CHUNKED_PEAK, CHUNKS = 30.0, 6.0, 8
# Of our kernels, beside one large product; measured on an H200, docs/planner.md.
STATISTICS, EXACT_BACKWARD, KEPT_PRODUCTS = 0.92, 0.87, 0.59


@dataclass(frozen=True)
class HeadCost:
    """The cost of a microbatch on each rank that has a part of the vocabulary.

    Args:
        flops: of the forward, those of padding included.
        forward, backward: seconds; of the phases S and T where it is over pipeline ranks.
        told: of those, what its ranks spend telling each other.
        kept: bytes from forward to backward.
        working: bytes beside what is kept, at the most.
        transient: of those, the weight's gradient in 16 bits.
    """

    flops: float
    forward: float
    backward: float
    told: float
    kept: float
    working: float
    transient: float


def rows_of_rank(model: Model, job: Job) -> float:
    """Returns a rank's rows of the head, padding included."""
    return job.padded_rows(model.num_rows) / job.head_ranks


def head_cost(model: Model, job: Job, hardware: Hardware) -> HeadCost:
    if job.loss == "none":
        return HeadCost(0, 0, 0, 0, 0, 0, 0)
    tokens, dim, rows = job.tokens, model.dim, rows_of_rank(model, job)
    logits = tokens * rows
    product = 2.0 * logits * dim
    one = hardware.product(tokens, rows, dim)
    told = _told(model, job, hardware)
    gradient = 2.0 * rows * dim
    per_byte = 1 / hardware.bytes_per_second
    if job.loss in ("dense", "native"):
        traffic, peak = NATIVE_TRAFFIC, NATIVE_PEAK
        if job.loss == "dense":
            traffic, peak = job.software.dense_traffic, job.software.dense_peak
        transient = gradient if job.software.transient_gradient else 0.0
        after = 2 * logits + transient + 2.0 * tokens * dim
        return HeadCost(
            product,
            one + traffic[0] * logits * per_byte + told[0],
            2 * one + traffic[1] * logits * per_byte + told[1],
            sum(told),
            KEPT * logits,
            max(peak * logits, after) - KEPT * logits,
            transient,
        )
    if job.loss == "chunked":
        time = 3 * one + CHUNKED_TRAFFIC * logits * per_byte + sum(told)
        gradients = gradient + 2.0 * tokens * dim
        chunk = CHUNKED_PEAK * logits / CHUNKS
        return HeadCost(product, time, 0.0, sum(told), gradients, chunk, gradient)
    return _ours(model, job, hardware, told)


def _ours(model: Model, job: Job, hardware: Hardware, told: tuple[float, float]) -> HeadCost:
    tokens, dim, rows = job.tokens, model.dim, rows_of_rank(model, job)
    logits = tokens * rows
    product = 2.0 * logits * dim
    one = hardware.product(tokens, rows, dim)
    gradient = 2.0 * rows * dim
    forward = one / STATISTICS
    if job.loss == "exact":
        backward, marks = 3 * one / EXACT_BACKWARD, 0.0
    else:
        # Frequent tokens are next to each other: one rank keeps nearly as many as all.
        columns = min(job.kept_columns, rows)
        kept = 3 * hardware.product(tokens, columns, dim) / KEPT_PRODUCTS
        backward = kept + 2 * gradient / hardware.bytes_per_second
        marks = logits / 512 + 16 * rows
    # The hidden gradient in fp32 and in 16 bits; packed hidden.
    loose = 8.0 * tokens * dim + default_workspace_bytes(tokens)
    working = gradient + loose
    transient = gradient
    if job.is_over_ranks:
        # Of the microbatches that are between the two phases, hidden and its gradient; the
        # weight's gradient is added up in fp32.
        working = 2 * gradient + 3 * 2.0 * tokens * dim + loose
        if job.is_served:
            # One at a time, whose part is added in place.
            working = 2.0 * tokens * dim + loose
        told, transient = (0.0, 0.0), 0.0
    return HeadCost(
        product,
        forward + told[0],
        backward + told[1],
        sum(told),
        marks + 8.0 * tokens,
        working,
        transient,
    )


def _told(model: Model, job: Job, hardware: Hardware) -> tuple[float, float]:
    """Forward and backward, of tensor-parallel ranks: statistics, the hidden gradient."""
    if job.is_over_ranks:
        return 0.0, 0.0
    size = 2.0 * job.tokens * model.dim
    sums = 3 * collective(hardware, job.tp, 4.0 * job.tokens, rounds=2)
    if job.loss in ("exact", "filtered"):
        sums = collective(hardware, job.tp, 8.0 * job.tokens * job.tp)
    if job.sequence_parallel:
        gather = collective(hardware, job.tp, size)
        return sums + gather, 2 * gather
    # Ours reduces it in fp32.
    width = 2 if job.loss in ("exact", "filtered") else 1
    return sums, collective(hardware, job.tp, width * size, rounds=2)


def phase_latency(model: Model, job: Job, hardware: Hardware) -> float:
    """Returns seconds between two phases of the head over pipeline ranks: the longest of a
    broadcast of hidden, the merge, and the sum of its gradient (docs/pipelines.md)."""
    ranks = job.pp * job.tp
    shared = job.tp if job.sequence_parallel else 1
    tokens, dim = job.tokens, model.dim
    largest = max(2.0 * tokens * dim / shared + 8.0 * tokens, 4.0 * tokens * dim / shared)
    link = hardware.link(ranks)
    return hardware.latency + max(largest, 8.0 * tokens * job.head_ranks) / link


def phase_bytes(model: Model, job: Job) -> dict[str, float]:
    """Returns the bytes that a rank sends or receives for a microbatch in each phase; N tokens, D
    dims."""
    tokens, dim = job.tokens, model.dim
    shared = job.tp if job.sequence_parallel else 1
    return {
        "broadcast": 2.0 * tokens * dim / shared + 8.0 * tokens,
        "merge": 8.0 * tokens + 32,
        "sum": 4.0 * tokens * dim / shared,
    }
