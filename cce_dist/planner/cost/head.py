"""The cost of the LM head and the loss, by kind of loss."""

from __future__ import annotations

from dataclasses import dataclass

from cce_dist.options import default_workspace_bytes
from cce_dist.planner.models.model import Model

from .hardware import Hardware
from .job import OURS, Job
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
    """The cost of a microbatch on each rank that has rows of the vocabulary."""

    flops: float  # of the forward, padding included
    forward: float  # seconds; of the phase S if the head is over pipeline ranks
    backward: float  # seconds; of the phase T if the head is over pipeline ranks
    communication: float  # those of the seconds in which the head's ranks communicate
    kept: float  # bytes from forward to backward
    working: float  # the most bytes on top of `kept`
    transient: float  # those of the working bytes that are the weight's gradient in 16 bits


def rows_of_rank(model: Model, job: Job) -> float:
    """Returns the number of a rank's rows of the head, padding included."""
    return job.padded_rows(model.num_rows) / job.head_ranks


def head_cost(model: Model, job: Job, hardware: Hardware) -> HeadCost:
    """Returns the cost of the head and the loss on a rank."""
    if job.loss == "none":
        return HeadCost(0, 0, 0, 0, 0, 0, 0)
    tokens, dim, rows = job.tokens, model.dim, rows_of_rank(model, job)
    logits = tokens * rows
    flops, seconds = 2.0 * logits * dim, hardware.product(tokens, rows, dim)
    sent, sent_back = _communication(model, job, hardware)
    gradient, per_byte = 2.0 * rows * dim, 1 / hardware.bytes_per_second
    if job.loss in ("dense", "native"):
        traffic, peak = NATIVE_TRAFFIC, NATIVE_PEAK
        if job.loss == "dense":
            traffic, peak = job.software.dense_traffic, job.software.dense_peak
        transient = gradient if job.software.transient_gradient else 0.0
        after = 2 * logits + transient + 2.0 * tokens * dim
        forward = seconds + traffic[0] * logits * per_byte
        backward = 2 * seconds + traffic[1] * logits * per_byte
        kept, working = KEPT * logits, max(peak * logits, after) - KEPT * logits
    elif job.loss == "chunked":
        forward = 3 * seconds + CHUNKED_TRAFFIC * logits * per_byte + (sent + sent_back)
        kept, working = gradient + 2.0 * tokens * dim, CHUNKED_PEAK * logits / CHUNKS
        return HeadCost(flops, forward, 0.0, sent + sent_back, kept, working, gradient)
    else:
        forward, kept = seconds / STATISTICS, 8.0 * tokens
        backward = 3 * seconds / EXACT_BACKWARD
        if job.loss == "filtered":
            # Frequent tokens have neighbouring ids: one rank keeps nearly as many columns as all.
            columns = min(job.kept_columns, rows)
            products = 3 * hardware.product(tokens, columns, dim) / KEPT_PRODUCTS
            backward = products + 2 * gradient / hardware.bytes_per_second
            kept += logits / 512 + 16 * rows
        working, transient = _working_of_ours(model, job, gradient)
    communication = sent + sent_back
    forward, backward = forward + sent, backward + sent_back
    return HeadCost(flops, forward, backward, communication, kept, working, transient)


def _working_of_ours(model: Model, job: Job, gradient: float) -> tuple[float, float]:
    """Returns `HeadCost`'s working and transient of our losses, whose weight has this gradient."""
    hidden = 2.0 * job.tokens * model.dim
    # The hidden gradient in fp32 and in 16 bits; hidden without ignored tokens.
    loose = 8.0 * job.tokens * model.dim + default_workspace_bytes(job.tokens)
    if not job.is_over_ranks:
        return gradient + loose, gradient
    if job.is_served:
        # One microbatch at a time, whose weight gradient is added in place.
        return hidden + loose, 0.0
    # The microbatches between the two phases have hidden and its gradient; the weight's gradient
    # is in fp32.
    return 2 * gradient + 3 * hidden + loose, 0.0


def _communication(model: Model, job: Job, hardware: Hardware) -> tuple[float, float]:
    """Returns the seconds to merge statistics, and to sum the hidden gradient, over tp ranks."""
    if job.is_over_ranks:
        return 0.0, 0.0
    size = 2.0 * job.tokens * model.dim
    sums = 3 * collective(hardware, job.tp, 4.0 * job.tokens, rounds=2)
    ours = job.loss in OURS
    if ours:
        # The merge; with a filter four exchanges of bounds, too.
        width = 24.0 if job.loss == "filtered" else 8.0
        sums = collective(hardware, job.tp, width * job.tokens * job.tp)
    if job.sequence_parallel:
        gather = collective(hardware, job.tp, size)
        return sums + gather, 2 * gather
    # Our losses reduce the hidden gradient in fp32, and gather the sums in 16 bits.
    return sums, collective(hardware, job.tp, size, rounds=3 if ours else 2)


def phase_latency(model: Model, job: Job, hardware: Hardware) -> float:
    """Returns the seconds between two phases of the head over pipeline ranks.

    They are the longest of the broadcast of hidden, the merge, and the sum of hidden's gradient.
    """
    sizes = phase_bytes(model, job)
    largest = max(sizes["broadcast"], sizes["sum"], 8.0 * job.tokens * job.head_ranks)
    return hardware.latency + largest / hardware.link(job.pp * job.tp)


def phase_bytes(model: Model, job: Job) -> dict[str, float]:
    """Returns the bytes that a rank sends or receives for a microbatch, by collective."""
    tokens, dim, shared = job.tokens, model.dim, job.sequence_ranks
    return {
        "broadcast": 2.0 * tokens * dim / shared + 8.0 * tokens,
        "merge": 8.0 * tokens + 32,
        "sum": 4.0 * tokens * dim / shared,
    }
