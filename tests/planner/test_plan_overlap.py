"""What a layer's attention takes, and what of the collectives nothing hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cce_dist.planner.cost.hardware import HARDWARE
from cce_dist.planner.cost.job import SOFTWARE, Job
from cce_dist.planner.cost.layer import PIECES, collective, layer_cost
from cce_dist.planner.models.presets import find_model
from cce_dist.planner.plan import make_plan
from tests.planner.plan_jobs import LLAMA, gpt

H100, A100 = HARDWARE["h100"], HARDWARE["a100"]
GPT = gpt(51200, 6144, 8, 64, 2048)
UNFUSED = Job(sequence=2048, attention="unfused")


def test_a_ring_enters_a_host_by_all_its_ranks() -> None:
    """Eight of a host's GPUs have eight times the network of one, tensor-parallel ones one each."""
    one, full = H100.link_share * H100.network, H100.link_share * H100.nvlink
    assert H100.ring(8) == H100.ring(4, apart=2) == full
    assert H100.ring(16) == pytest.approx(8 * one)
    assert H100.ring(8, apart=4) == pytest.approx(2 * one)
    assert H100.ring(2, apart=8) == H100.ring(4, apart=16) == one
    # No faster than NVLink; from one rank to the next there is one way.
    assert replace(H100, network=400e9).ring(16) == full
    assert H100.link(16) == one


def test_masks_and_scores_of_dropout() -> None:
    """Reducing Activation Recomputation, arXiv:2205.05198: (34 + 5 a s / h) s b h."""
    kept = layer_cost(GPT, replace(UNFUSED, dropout=True), A100, 0).kept
    assert kept / (2048 * GPT.dim) == pytest.approx(34 + 5 * 64 * 2048 / GPT.dim)
    selective = replace(UNFUSED, dropout=True, recompute="selective")
    assert layer_cost(GPT, selective, A100, 0).kept / (2048 * GPT.dim) == pytest.approx(34)
    without = layer_cost(GPT, UNFUSED, A100, 0)
    assert layer_cost(GPT, replace(UNFUSED, dropout=True), A100, 0).forward > without.forward


def test_unfused_attention_makes_all_scores() -> None:
    """Not the causal half; and those of its softmax go through HBM, when made again as well."""
    fast = replace(A100, hbm=1e30)
    alone = replace(fast, cudnn_forward=A100.gemm, cudnn_backward=A100.gemm)
    half, all_of_them = (
        layer_cost(GPT, replace(UNFUSED, attention=name), alone, 0) for name in ("cudnn", "unfused")
    )
    flops = 2.0 * 2048 * 2048 * 2 * GPT.dim / 2
    seconds = flops / (A100.flops * A100.gemm)
    assert all_of_them.forward - half.forward == pytest.approx(seconds)
    assert all_of_them.backward - half.backward == pytest.approx((4 - 2.5) * seconds)
    assert all_of_them.flops == half.flops
    again = layer_cost(GPT, replace(UNFUSED, recompute="selective"), A100, 0)
    through = 8.0 * 2048 * 2048 * GPT.heads / A100.bytes_per_second
    once = layer_cost(GPT, UNFUSED, A100, 0)
    assert again.backward - once.backward == pytest.approx(2 * seconds + through)


def test_whose_attention() -> None:
    """TransformerEngine's where the software is Megatron with its fused kernels."""
    asked = layer_cost(LLAMA, Job(attention="cudnn"), H100, 0)
    assert layer_cost(LLAMA, Job(), H100, 0) == asked
    flash = layer_cost(LLAMA, Job(attention="flash"), H100, 0)
    for name in ("torch", "megatron-local"):
        job = Job(software=SOFTWARE[name])
        assert job.attention_kernels == "flash"
        assert replace(job, attention="cudnn").attention_kernels == "cudnn"
    faster = 1 / H100.attention_forward - 1 / H100.cudnn_forward
    attention = 2.0 * 4096 * 2048 * 2 * LLAMA.dim
    assert flash.forward - asked.forward == pytest.approx(attention * faster / H100.flops)
    # No other kernels there.
    assert layer_cost(LLAMA, Job(attention="flash"), A100, 0) == layer_cost(LLAMA, Job(), A100, 0)


def test_what_overlapped_tensor_parallelism_leaves() -> None:
    """A piece of what is told; all of it but what the products take, where that is more."""
    job = Job(tp=4, sequence_parallel=True, microbatch=4)
    whole = replace(job, overlap_tensor=True)
    # Products in as many waves whichever way they are cut.
    at_once = replace(H100, processors=1e-6)
    told = 4 * collective(at_once, 4, 2.0 * job.tokens * LLAMA.dim)
    apart, beside = (layer_cost(LLAMA, each, at_once, 0) for each in (job, whole))
    assert apart.forward - beside.forward == pytest.approx((1 - 1 / PIECES) * told)
    assert apart.backward - beside.backward == pytest.approx((1 - 1 / PIECES) * told)
    slow = replace(at_once, nvlink=1e9)
    apart, beside = (layer_cost(LLAMA, each, slow, 0) for each in (job, whole))
    products = 2.0 * job.tokens * (LLAMA.parameters_of_layer(0) - 2 * LLAMA.dim) / 4
    hidden = products / (H100.flops * H100.gemm)
    assert apart.forward - beside.forward == pytest.approx(hidden)
    # Small pieces are slower than the whole.
    few = replace(job, microbatch=1), replace(whole, microbatch=1)
    free = replace(H100, nvlink=1e30, latency=1e-30)
    apart, beside = (layer_cost(LLAMA, each, free, 0) for each in few)
    assert beside.forward > apart.forward
    with pytest.raises(ValueError, match="sequence_parallel must be true with overlap_tensor"):
        Job(tp=8, overlap_tensor=True)


def test_experts_are_sent_to_whatever_is_hidden() -> None:
    """Megatron hides none of it beside a backward's products."""
    model = find_model("mixtral-8x7b")
    alone, sent = Job(tp=1, dp=8), Job(tp=1, dp=8, ep=8)
    before, after = (layer_cost(model, each, H100, 0) for each in (alone, sent))
    told = 2 * collective(H100, 8, 2.0 * 4096 * model.dim * 2)
    assert after.forward - before.forward == pytest.approx(told)
    assert after.backward - before.backward == pytest.approx(told)


def test_what_overlapped_data_parallelism_leaves() -> None:
    """The embedding's part of both; or what one microbatch's passes do not hide."""
    job = Job(dp=16, microbatches=8, distributed_optimizer=True, gradients="bf16")
    plan, over = (make_plan(LLAMA, each, H100) for each in (job, replace(job, overlap_data=True)))
    rank = plan.ranks[0]
    both = 2 * 15 / 16 * 2.0 * rank.parameters / H100.ring(16)
    rows = LLAMA.num_rows * LLAMA.dim / rank.parameters
    saved = plan.optimizer_seconds - over.optimizer_seconds
    assert saved == pytest.approx((1 - rows) * both, rel=1e-3)
    slow = replace(H100, network=1e9)
    plan, over = (make_plan(LLAMA, each, slow) for each in (job, replace(job, overlap_data=True)))
    saved = plan.optimizer_seconds - over.optimizer_seconds
    assert saved == pytest.approx(rank.forward + rank.backward)


def test_interleaved_stages_hide_more_of_a_sum() -> None:
    """A chunk's gradients are made while others are at a group of microbatches."""
    slow = replace(H100, network=2e9)
    job = Job(pp=4, tp=8, dp=8, chunks=4, microbatches=8, gradients="bf16")
    job = replace(job, sequence_parallel=True, distributed_optimizer=True)
    plan, over = (make_plan(LLAMA, each, slow) for each in (job, replace(job, overlap_data=True)))
    # The first rank, which has the embedding and the shortest passes.
    rank = plan.ranks[0]
    each = 7 / 8 * 2.0 * rank.parameters / slow.ring(8, apart=8)
    rows = 129024 / 8 * LLAMA.dim / rank.parameters
    # Four microbatches' passes are beside it; its last stage has its own alone.
    left = sum(
        max(rows * each, (each - x) / 4, each - 4 * x) for x in (rank.forward, rank.backward)
    )
    saved = plan.optimizer_seconds - over.optimizer_seconds
    assert saved == pytest.approx(2 * each - left)
    assert saved > 1.5 * (rank.forward + rank.backward)


def test_a_tied_embedding_is_summed_over_hosts() -> None:
    """The first and the last stage are on two of them, where all ranks do not fit in one."""
    model = replace(LLAMA, tied=True)
    near, far = (
        make_plan(model, Job(pp=2, tp=tp, microbatches=4), H100).optimizer_seconds for tp in (4, 8)
    )
    # Padded to multiples of 128 tp.
    less = 4.0 * LLAMA.dim * (129024 / 8 / H100.link(16) - 128512 / 4 / H100.link(8))
    step = 42 / H100.bytes_per_second
    ranks = [
        max(r.parameters for r in make_plan(model, Job(pp=2, tp=tp, microbatches=4), H100).ranks)
        for tp in (4, 8)
    ]
    assert far - near == pytest.approx(less + step * (ranks[1] - ranks[0]), rel=1e-6)
