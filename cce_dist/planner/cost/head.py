"""The cost of the LM head and the loss, by kind of loss."""

from __future__ import annotations

from dataclasses import dataclass

from cce_dist.options import default_workspace_bytes
from cce_dist.planner.models.model import Model

from .hardware import Hardware
from .job import Job
from .layer import collective

# Bytes of a logit: through HBM in forward and backward, without the products; at the loss's peak;
# kept between forward and backward. docs/design/planner.md.
NATIVE_TRAFFIC, NATIVE_PEAK = (20.0, 18.0), 10.0
KEPT = 4.0
CHUNKED_TRAFFIC, CHUNKED_PEAK, CHUNKS = 30.0, 6.0, 8
# Rates of our kernels over that of one large product; measured on an H200, docs/design/planner.md.
STATISTICS, EXACT_BACKWARD, KEPT_PRODUCTS = 0.92, 0.87, 0.59


@dataclass(frozen=True)
class HeadCost:
    """The cost of a microbatch on each rank that has rows of the vocabulary.

    Args:
        flops: FLOPs of the forward, padding included.
        forward, backward: seconds, of the phases S and T if the head is over pipeline ranks.
        communication: those of the seconds in which the head's ranks communicate.
        kept: bytes from forward to backward.
        working: the most bytes on top of `kept`.
        transient: those of the working bytes that are the weight's gradient in 16 bits.
    """

    flops: float
    forward: float
    backward: float
    communication: float
    kept: float
    working: float
    transient: float


def rows_of_rank(model: Model, job: Job) -> float:
    """Returns the number of a rank's rows of the head, padding included."""
    return job.padded_rows(model.num_rows) / job.head_ranks


def head_cost(model: Model, job: Job, hardware: Hardware) -> HeadCost:
    """Returns the cost of the head and the loss on a rank."""
    if job.loss == "none":
        return HeadCost(0, 0, 0, 0, 0, 0, 0)
    tokens, dim, rows = job.tokens, model.dim, rows_of_rank(model, job)
    logits = tokens * rows
    product = 2.0 * logits * dim
    product_seconds = hardware.product(tokens, rows, dim)
    communication = _communication(model, job, hardware)
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
            product_seconds + traffic[0] * logits * per_byte + communication[0],
            2 * product_seconds + traffic[1] * logits * per_byte + communication[1],
            sum(communication),
            KEPT * logits,
            max(peak * logits, after) - KEPT * logits,
            transient,
        )
    if job.loss == "chunked":
        time = 3 * product_seconds + CHUNKED_TRAFFIC * logits * per_byte + sum(communication)
        gradients = gradient + 2.0 * tokens * dim
        chunk = CHUNKED_PEAK * logits / CHUNKS
        return HeadCost(product, time, 0.0, sum(communication), gradients, chunk, gradient)
    return _ours(model, job, hardware, communication)


def _ours(
    model: Model, job: Job, hardware: Hardware, communication: tuple[float, float]
) -> HeadCost:
    tokens, dim, rows = job.tokens, model.dim, rows_of_rank(model, job)
    logits = tokens * rows
    product = 2.0 * logits * dim
    product_seconds = hardware.product(tokens, rows, dim)
    gradient = 2.0 * rows * dim
    forward = product_seconds / STATISTICS
    if job.loss == "exact":
        backward, marks = 3 * product_seconds / EXACT_BACKWARD, 0.0
    else:
        # Frequent tokens have neighbouring ids: one rank keeps nearly as many columns as all.
        columns = min(job.kept_columns, rows)
        kept = 3 * hardware.product(tokens, columns, dim) / KEPT_PRODUCTS
        backward = kept + 2 * gradient / hardware.bytes_per_second
        marks = logits / 512 + 16 * rows
    # The hidden gradient in fp32 and in 16 bits; hidden without ignored tokens.
    loose = 8.0 * tokens * dim + default_workspace_bytes(tokens)
    working = gradient + loose
    transient = gradient
    if job.is_over_ranks:
        # The microbatches between the two phases have hidden and its gradient; the weight's
        # gradient is in fp32.
        working = 2 * gradient + 3 * 2.0 * tokens * dim + loose
        if job.is_served:
            # One microbatch at a time, whose weight gradient is added in place.
            working = 2.0 * tokens * dim + loose
        communication, transient = (0.0, 0.0), 0.0
    return HeadCost(
        product,
        forward + communication[0],
        backward + communication[1],
        sum(communication),
        marks + 8.0 * tokens,
        working,
        transient,
    )


def _communication(model: Model, job: Job, hardware: Hardware) -> tuple[float, float]:
    """Returns the seconds to merge statistics, and to sum the hidden gradient, over tp ranks."""
    if job.is_over_ranks:
        return 0.0, 0.0
    size = 2.0 * job.tokens * model.dim
    sums = 3 * collective(hardware, job.tp, 4.0 * job.tokens, rounds=2)
    if job.loss in ("exact", "filtered"):
        sums = collective(hardware, job.tp, 8.0 * job.tokens * job.tp)
    if job.sequence_parallel:
        gather = collective(hardware, job.tp, size)
        return sums + gather, 2 * gather
    # Our losses reduce the hidden gradient in fp32.
    width = 2 if job.loss in ("exact", "filtered") else 1
    return sums, collective(hardware, job.tp, width * size, rounds=2)


def phase_latency(model: Model, job: Job, hardware: Hardware) -> float:
    """Returns the seconds between two phases of the head over pipeline ranks.

    They are the longest of the broadcast of hidden, the merge, and the sum of hidden's gradient.
    """
    ranks = job.pp * job.tp
    shared = job.tp if job.sequence_parallel else 1
    tokens, dim = job.tokens, model.dim
    largest = max(2.0 * tokens * dim / shared + 8.0 * tokens, 4.0 * tokens * dim / shared)
    link = hardware.link(ranks)
    return hardware.latency + max(largest, 8.0 * tokens * job.head_ranks) / link


def phase_bytes(model: Model, job: Job) -> dict[str, float]:
    """Returns the bytes that a rank sends or receives for a microbatch, by collective."""
    tokens, dim = job.tokens, model.dim
    shared = job.tp if job.sequence_parallel else 1
    return {
        "broadcast": 2.0 * tokens * dim / shared + 8.0 * tokens,
        "merge": 8.0 * tokens + 32,
        "sum": 4.0 * tokens * dim / shared,
    }
