"""The cost of a layer: FLOPs, seconds and bytes of a microbatch.

A time is the sum of products at their rate, attention at its own rate, bytes through HBM, and
tensor-parallel communication. Three kinds of communication overlap with computation: the ring of
context parallelism, a share of Megatron's collectives in the backward, and whatever the job's
overlap_tensor hides. docs/design/planner.md has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cce_dist.planner.models.linear_attention import LinearAttention
from cce_dist.planner.models.model import Model

from .hardware import Hardware
from .job import Job

# Bytes that a backward moves, over those of its forward.
BACKWARD = 2.0
# Time of attention's backward over its forward: it recomputes scores, five products to two.
ATTENTION_BACKWARD = 2.5
# Pieces of a product that overlaps communication: num_splits of NeMo's recipes.
PIECES = 4


@dataclass(frozen=True)
class LayerCost:
    """The cost of a microbatch in a layer, on a rank."""

    flops: float  # of the forward; attention counts by its causal half
    forward: float  # seconds
    backward: float  # seconds
    kept: float  # bytes from forward to backward
    working: float  # bytes on top of `kept` while the backward runs


def collective(hardware: Hardware, ranks: int, size: float, *, rounds: float = 1.0) -> float:
    """Returns the seconds of a ring collective.

    Args:
        size: bytes of the complete tensor.
        rounds: 1 for a gather or a reduce-scatter, 2 for an all-reduce.
    """
    if ranks == 1:
        return 0.0
    moved = rounds * (ranks - 1) / ranks * size
    return hardware.latency + moved / hardware.ring(ranks)


def visible_tokens(model: Model, job: Job, index: int) -> float:
    """Returns the mean number of tokens that a token looks back at."""
    window = model.window if model.attention_of(index) == "window" else 0
    if not window or window >= job.sequence:
        return job.sequence / 2
    return window - window * window / (2 * job.sequence)


def layer_cost(model: Model, job: Job, hardware: Hardware, index: int) -> LayerCost:
    """Returns the cost of the model's `index`-th layer."""
    if model.attention_of(index) == "image":
        return LayerCost(0.0, 0.0, 0.0, 0.0, 0.0)
    tokens, tp, split, soft = job.tokens, job.tp, job.sequence_ranks, job.software
    routed = routed_experts(model, index)
    shapes = _shapes(model, job, index)
    flops = sum(2.0 * rows * columns * inner for rows, columns, inner in shapes)
    products, gradients = _products(model, job, hardware, shapes)
    width = active_mlp_dim(model, index)
    attention = _attention(model, job, hardware, index)

    traffic, mlp_kept = soft.plain_traffic, soft.plain_kept
    if model.gated:
        traffic, mlp_kept = soft.gated_traffic, soft.gated_kept
    moved = tokens * (
        job.hidden_bytes * model.dim * (2 * model.norms + 3 * min(2, model.norms)) / split
        + (_attention_traffic(model, job, index) + traffic * width) / tp
        + 8.0 * model.dim * routed  # to its experts and back
    )
    # A mask of attention's output, and a mask of the MLP's.
    masks = 2.0 * tokens * model.dim / split if job.dropout else 0.0
    elementwise = (moved + masks) / hardware.bytes_per_second
    sent, sent_back = _communication(model, job, hardware, products, gradients)
    to_experts = _expert_communication(model, job, hardware, routed)
    sent, sent_back = sent + to_experts, sent_back + to_experts
    ring = _ring(model, job, hardware)
    forward = products + max(attention.forward, ring) + elementwise + sent
    backward = gradients + max(attention.backward, 2 * ring) + BACKWARD * elementwise + sent_back
    kept = tokens * _kept(model, job, mlp_kept * width, index) + masks
    working = tokens * (4.0 * width / tp + 4.0 * model.dim / split)
    if job.recompute != "selective":
        kept += attention.scores
    else:
        backward += attention.forward
        working += attention.scores
    if job.recompute == "full":
        backward, working = backward + forward, working + kept
        kept = job.hidden_bytes * tokens * model.dim / split
    return LayerCost(flops + attention.flops, forward, backward, kept, working)


class _Attention(NamedTuple):
    """The cost of attention alone, without its products with weights."""

    flops: float  # of the forward; scores count by their causal half
    forward: float  # seconds
    backward: float
    scores: float  # bytes that are kept of scores and their softmax


def _attention(model: Model, job: Job, hardware: Hardware, index: int) -> _Attention:
    linear, kernels = _linear_of(model, index), job.attention_kernels
    per_score = 2.0 * model.heads * (model.key_dim + model.head_value_dim)
    flops = job.tokens * visible_tokens(model, job, index) * per_score / job.tp
    if linear:
        flops = job.tokens * linear.flops / job.tp
    if linear or kernels != "unfused":
        shares = hardware.attention_forward, hardware.attention_backward
        if kernels == "cudnn" and not linear:
            shares = hardware.cudnn_forward, hardware.cudnn_backward
        forward, backward = (flops / (hardware.flops * share) for share in shares)
        return _Attention(flops, forward, ATTENTION_BACKWARD * backward, 0.0)
    # All scores are computed, in 16 bits; they and their softmax are each written and read.
    number = float(job.tokens) * job.sequence * model.heads / job.tp
    products = number * per_score / model.heads / (hardware.flops * hardware.gemm)
    traffic, scores = 8.0 * number, 2.0 * number
    if job.dropout:
        # The softmax is read and written once more, with a mask of a byte; both are kept.
        traffic, scores = traffic + 5.0 * number, scores + 3.0 * number
    seconds = traffic / hardware.bytes_per_second
    return _Attention(flops, products + seconds, 2 * products + BACKWARD * seconds, scores)


def _linear_of(model: Model, index: int) -> LinearAttention | None:
    return model.linear if model.attention_of(index) == "linear" else None


def _attention_traffic(model: Model, job: Job, index: int) -> float:
    """Returns the bytes that rotary positions and gates of a token move through HBM."""
    linear = _linear_of(model, index)
    if linear:
        return linear.traffic
    # A gate is read, and values are read and written again.
    gate = 6.0 * model.heads * model.head_value_dim * model.query_gate
    rope = (model.heads + model.kv_heads) * model.key_dim
    return job.software.rope_traffic * rope * (model.positions == 0) + gate


def routed_experts(model: Model, index: int) -> int:
    """Returns how many experts the router gives a token in a layer; 0: the layer has one MLP."""
    return 0 if index < model.dense_layers else model.experts_per_token or model.experts


def active_mlp_dim(model: Model, index: int) -> int:
    """Returns the sum of mlp_dim over all MLPs that a token goes through."""
    if index < model.dense_layers:
        return model.dense_mlp_dim
    if not model.experts:
        return model.mlp_dim
    shared = model.shared_experts * model.size_of_shared
    return model.mlp_dim * routed_experts(model, index) + shared


def _shapes(model: Model, job: Job, index: int) -> list[tuple[float, float, float]]:
    """Returns the forward's products on a rank, as rows (tokens), columns and inner dims."""
    dim, tp, tokens = model.dim, job.tp, float(job.tokens)
    shapes = _attention_shapes(model, job, index)
    wide, routed = 2 if model.gated else 1, routed_experts(model, index)
    mlps = [(routed, model.mlp_dim), (model.shared_experts, model.size_of_shared)]
    for count, mlp_dim in mlps if routed else [(1, active_mlp_dim(model, index))]:
        if count:
            width = mlp_dim / tp
            shapes += [(count * tokens, wide * width, dim), (count * tokens, dim, width)]
    if routed and model.shared_gate:
        shapes.append((tokens, 1, dim))
    return [*shapes, (tokens, model.experts, dim)] if routed else shapes


def _attention_shapes(model: Model, job: Job, index: int) -> list[tuple[float, float, float]]:
    dim, tp, tokens = model.dim, job.tp, float(job.tokens)
    linear = _linear_of(model, index)
    if linear:
        return [(tokens, linear.columns / tp, dim), (tokens, dim, linear.values / tp)]
    queries, values = model.heads * model.key_dim, model.heads * model.head_value_dim
    if model.kv_rank:
        inner = float(model.query_rank or dim)
        decompressed = model.heads * (model.size_of_head + model.head_value_dim)
        shapes: list[tuple[float, float, float]] = [
            (tokens, queries / tp, inner),
            (tokens, model.kv_rank + model.rope_dim, dim),
            (tokens, decompressed / tp, model.kv_rank),
        ]
        if model.query_rank:
            shapes.append((tokens, model.query_rank, dim))
    else:
        keys = model.kv_heads * (model.key_dim + model.head_value_dim)
        shapes = [(tokens, (queries * (1 + model.query_gate) + keys) / tp, dim)]
    return [*shapes, (tokens, dim, values / tp)]


def _kept(model: Model, job: Job, mlp: float, index: int) -> float:
    """Returns the bytes kept of a token without attention's scores: inputs and outputs of norms,
    attention and MLP."""
    kept = job.hidden_bytes * model.norms + 2 * min(2, model.norms)
    norms = model.dim * kept / job.sequence_ranks
    inputs = 2 * model.dim * routed_experts(model, index)
    return norms + (_attention_kept(model, job, index) + mlp) / job.tp + inputs


def _attention_kept(model: Model, job: Job, index: int) -> float:
    linear = _linear_of(model, index)
    if linear:
        return linear.kept
    queries, keys = model.heads * model.key_dim, model.kv_heads * model.key_dim
    values, out = model.kv_heads * model.head_value_dim, model.heads * model.head_value_dim
    # A gate is kept, and attention's output before and after it.
    attention = 2 * (queries + keys + values + out * (1 + 2 * model.query_gate))
    if job.software.joint_qkv and not model.positions:
        attention += 2 * (queries + keys)
    return attention + 4 * (model.kv_rank + model.query_rank)


def _products(
    model: Model, job: Job, hardware: Hardware, shapes: list[tuple[float, float, float]]
) -> tuple[float, float]:
    """Returns the seconds of the forward's products, and of both gradients' products."""
    pieces = _pieces(job)
    forward = backward = 0.0
    for rows, columns, inner in shapes:
        forward += pieces * hardware.product(rows / pieces, columns, inner)
        # The gradient of a product's result is gathered where the forward reduces the result.
        cut = pieces if columns == model.dim else 1
        backward += cut * hardware.product(rows / cut, inner, columns)
        backward += hardware.product(columns, inner, rows)
    return forward, backward


def _pieces(job: Job) -> int:
    """Returns the number of pieces of a product; each is sent while the next is computed."""
    return min(job.tp, PIECES) if job.overlap_tensor else 1


def _communication(
    model: Model, job: Job, hardware: Hardware, products: float, gradients: float
) -> tuple[float, float]:
    """Returns the seconds of tensor-parallel communication, forward and backward, that no product
    hides."""
    size = 2.0 * job.tokens * model.dim
    if job.sequence_parallel:
        seconds, again = 4 * collective(hardware, job.tp, size), 1.5
    else:
        seconds, again = 2 * collective(hardware, job.tp, size, rounds=2), 1.0
    # The backward has as many collectives, or half more where inputs are gathered again.
    if not job.overlap_tensor:
        return seconds, (again - job.software.hidden) * seconds
    piece = seconds / _pieces(job)
    return max(piece, seconds - products), max(piece, again * seconds - gradients)


def _expert_communication(model: Model, job: Job, hardware: Hardware, routed: int) -> float:
    """Returns the seconds in which tokens go to experts of other ranks, and back."""
    if job.ep == 1 or not routed:
        return 0.0
    ranks = job.ep * job.tp
    size = 2.0 * job.tokens * model.dim * routed / job.tp
    return 2 * (hardware.latency + (ranks - 1) / ranks * size / hardware.link(ranks))


def _ring(model: Model, job: Job, hardware: Hardware) -> float:
    """Returns the seconds in which keys and values go to every context-parallel rank."""
    if job.cp == 1:
        return 0.0
    each = 2.0 * job.tokens * model.kv_heads * (model.key_dim + model.head_value_dim) / job.tp
    return (job.cp - 1) * (hardware.latency + each / hardware.link(job.cp * job.tp))


def layer_parameters_per_rank(model: Model, job: Job, index: int) -> float:
    """Returns a layer's parameters on a tensor-parallel (and expert-parallel) rank."""
    parameters = float(model.parameters_of_layer(index))
    norms = model.norms * model.norm_parameters
    if not routed_experts(model, index):
        return (parameters - norms) / job.tp + norms
    experts = float(model.experts * model.mlp_of(model.mlp_dim))
    return (parameters - norms - experts) / job.tp + norms + experts / (job.tp * job.ep)
