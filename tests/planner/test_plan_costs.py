"""Costs of stages: parameters, operations, memory, time, of each hardware and software."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cce_dist.planner.cost.hardware import GIB, Hardware, find_hardware
from cce_dist.planner.cost.head import head_cost, phase_bytes
from cce_dist.planner.cost.job import LOSSES, SOFTWARE, Job
from cce_dist.planner.cost.layer import collective, layer_cost, visible_tokens
from cce_dist.planner.models.presets import find_model
from cce_dist.planner.orders.vocab_1f1b import Times, most_in_flight, plan_vocab_order
from cce_dist.planner.plan import make_plan
from cce_dist.planner.search import best_plan
from tests.planner.plan_jobs import GEMMA, H200, LLAMA, PIPE, SMALL


def test_parameters_are_all_somewhere() -> None:
    for model, tied in ((LLAMA, 0), (GEMMA, GEMMA.head_parameters)):
        plan = make_plan(model, PIPE, H200)
        # A tied weight is on the first and on the last stage; the last norm is not counted.
        found = sum(rank.parameters for rank in plan.ranks) - tied
        assert found == pytest.approx(model.parameters, rel=1e-4)
        over = make_plan(model, replace(PIPE, loss="exact", vocab_over="pp"), H200)
        assert sum(rank.parameters for rank in over.ranks) == pytest.approx(
            model.parameters, rel=1e-4
        )


def test_flops_are_six_times_the_parameters() -> None:
    """And twelve times s D for attention, half of it causal."""
    plan = make_plan(LLAMA, PIPE, H200)
    tokens = PIPE.tokens
    matrices = LLAMA.parameters - LLAMA.num_rows * LLAMA.dim
    attention = 6 * LLAMA.layers * PIPE.sequence * LLAMA.dim
    assert sum(rank.flops for rank in plan.ranks) == pytest.approx(
        tokens * (6 * matrices + attention), rel=1e-3
    )


def test_weights_are_eighteen_bytes() -> None:
    plan = make_plan(LLAMA, Job(loss="none"), H200)
    (rank,) = plan.ranks
    memory = rank.memory
    assert memory.weights + memory.gradients + memory.optimizer == 18 * rank.parameters
    lean = make_plan(LLAMA, Job(loss="none", precision="bf16"), H200).ranks[0].memory
    assert lean.weights + lean.gradients + lean.optimizer == 8 * rank.parameters
    wide = make_plan(LLAMA, Job(loss="none", precision="fp32"), H200).ranks[0].memory
    assert wide.weights + wide.gradients + wide.optimizer == 18 * rank.parameters
    shared = Job(loss="none", dp=4, distributed_optimizer=True, gradients="bf16")
    sharded = make_plan(LLAMA, shared, H200).ranks[0].memory
    assert sharded.optimizer == 3 * rank.parameters and sharded.gradients == memory.weights


def test_activations_of_a_plain_layer_are_34_bytes() -> None:
    """Reducing Activation Recomputation, arXiv:2205.05198: 34 s b h without dropout's masks and the
    scores is 31; and 8 h for the MLP's input of its second product here and there."""
    model = replace(SMALL, gated=False, positions=4096)
    cost = layer_cost(model, Job(), H200, 0)
    assert cost.kept / (4096 * model.dim) == pytest.approx(32)
    parallel = layer_cost(model, Job(tp=4, sequence_parallel=True), H200, 0)
    assert parallel.kept == pytest.approx(cost.kept / 4)
    alone = layer_cost(model, Job(tp=4), H200, 0)
    assert alone.kept == pytest.approx(4096 * model.dim * (8 + 24 / 4))
    scores = layer_cost(model, Job(attention="unfused"), H200, 0)
    assert scores.kept - cost.kept == 2 * 4096 * 4096 * model.heads
    selective = Job(attention="unfused", recompute="selective")
    assert layer_cost(model, selective, H200, 0).kept == cost.kept
    full = layer_cost(model, Job(recompute="full"), H200, 0)
    assert full.kept == 2 * 4096 * model.dim
    assert full.backward == pytest.approx(cost.backward + cost.forward)


def test_an_embeddings_gradient_is_made_whole() -> None:
    """Where full recompute keeps less of a microbatch than that."""
    short = Job(sequence=512, pp=2, microbatches=4, recompute="full", loss="filtered")
    first, last = make_plan(GEMMA, short, H200).ranks
    kept = first.memory.activations / 2
    assert first.memory.working == pytest.approx(2 * 256000 * 2304 - kept)
    assert last.memory.working < 1e8


def test_windows_are_looked_through() -> None:
    long = Job(sequence=16384)
    assert visible_tokens(GEMMA, long, 0) == 4096 - 4096**2 / (2 * 16384)
    assert visible_tokens(GEMMA, long, 1) == 8192
    assert visible_tokens(GEMMA, Job(), 0) == 2048
    costs = [layer_cost(GEMMA, long, H200, index).flops for index in (0, 1)]
    assert costs[0] < costs[1]


def test_experts_that_are_asked_count() -> None:
    model = find_model("mixtral-8x7b")
    dense = replace(model, experts=0, experts_per_token=0)
    cost, plain = (layer_cost(each, Job(), H200, 0) for each in (model, dense))
    mlp = 2 * 4096 * 3 * model.dim * model.mlp_dim
    assert cost.flops - plain.flops == pytest.approx(mlp, rel=1e-3)
    deepseek = find_model("deepseek-v3")
    first, other = (layer_cost(deepseek, Job(), H200, index) for index in (0, 3))
    assert first.flops == pytest.approx(other.flops, rel=0.02)  # 18432 = 9 * 2048
    few = make_plan(deepseek, Job(dp=64, ep=64, loss="none"), H200)
    assert few.ranks[0].parameters < deepseek.parameters / 20


def test_context_parallel_ranks_share_tokens() -> None:
    one, four = (layer_cost(LLAMA, Job(sequence=32768, cp=cp), H200, 0) for cp in (1, 4))
    assert four.flops == pytest.approx(one.flops / 4)
    assert four.kept == pytest.approx(one.kept / 4)


def test_collectives() -> None:
    """An all-reduce of 8192 x 2304 in 16 bits takes 0.18 ms on two H200s, 0.24 on four; of 32768 x
    4096 0.93 and 1.29: docs/design/planner.md."""
    for size, ranks, took in (
        (8192 * 2304 * 2, 2, 0.18e-3),
        (8192 * 2304 * 2, 4, 0.24e-3),
        (32768 * 4096 * 2, 2, 0.93e-3),
        (32768 * 4096 * 2, 4, 1.29e-3),
    ):
        assert collective(H200, ranks, size, rounds=2) == pytest.approx(took, rel=0.05)
    assert collective(H200, 1, 1e9) == 0.0
    assert H200.link(16) < H200.link(8)


@pytest.mark.parametrize("loss", LOSSES)
def test_heads(loss: str) -> None:
    found = head_cost(GEMMA, Job(microbatch=2, loss=loss), H200)
    if loss == "none":
        assert found.forward == found.backward == found.kept == 0
        return
    assert found.flops == 2 * 8192 * 256000 * 2304
    # docs/notebook/README.md: forward and backward on one H200, ms.
    took = {"dense": 73, "native": 61, "exact": 64, "filtered": 16, "chunked": 56}[loss]
    assert 1e3 * (found.forward + found.backward) == pytest.approx(took, rel=0.12)
    logits = 2 * 8192 * 256000  # bytes, in 16 bits
    if loss in ("exact", "filtered"):
        assert found.kept + found.working < 1.45e9 < logits
    else:
        assert found.kept + found.working > 0.5 * logits


def test_eager_torchs_head() -> None:
    """docs/results.md: 64 ms and 24,000 MiB, of which the gradients' 1,161 are not its peak."""
    job = Job(microbatch=2, loss="dense", software=SOFTWARE["torch"])
    found = head_cost(GEMMA, job, H200)
    assert 1e3 * (found.forward + found.backward) == pytest.approx(64, rel=0.05)
    assert found.kept + found.working == pytest.approx(24000 * 2**20, rel=0.01)


def test_phases_have_the_bytes_of_the_documents() -> None:
    """docs/design/pipelines.md."""
    job = Job(microbatch=2, pp=4, loss="exact", vocab_over="pp")
    assert phase_bytes(GEMMA, job) == {
        "broadcast": 2 * 8192 * 2304 + 8 * 8192,
        "merge": 8 * 8192 + 32,
        "sum": 4 * 8192 * 2304,
    }


def test_in_flight_activations_are_the_orders() -> None:
    plan = make_plan(LLAMA, PIPE, H200)
    each = [rank.memory.activations for rank in plan.ranks]
    assert [rank.in_flight for rank in plan.ranks] == [4, 3, 2, 1]
    assert each[0] == pytest.approx(4 * each[3], rel=0.02)  # which has the last norm, too
    gpipe = make_plan(LLAMA, replace(PIPE, schedule="gpipe"), H200)
    assert gpipe.ranks[0].memory.activations == pytest.approx(4 * each[0])
    # All microbatches' logits, too.
    assert gpipe.ranks[-1].memory.head > 10 * 4 * PIPE.tokens * LLAMA.num_rows


def test_in_flight_of_the_planned_order_is_what_the_runtime_holds() -> None:
    """ScheduleVocab1F1B plans by times without latency, megatron_patch by sizes and with U."""
    job = replace(PIPE, loss="filtered", vocab_over="pp")
    plan = best_plan(GEMMA, replace(job, software=SOFTWARE["torch"]), H200)
    ours = plan_vocab_order(4, 16, Times(statistics=0.1, gradients=0.2))
    assert [rank.in_flight for rank in plan.ranks] == list(map(most_in_flight, ours))
    patched = best_plan(GEMMA, job, H200)
    # 26 layers, of which a stage has seven at the most.
    head = 256000 * 2304 / 4 / (7 * GEMMA.parameters_of_layer(0))
    times = Times(1.0, 2.0, statistics=head, gradients=3 * head)
    ours = plan_vocab_order(4, 16, times, embeds=True, weighs=True)
    assert [rank.in_flight for rank in patched.ranks] == list(map(most_in_flight, ours))
    for rank, plain in zip(patched.ranks, plan.ranks, strict=True):
        assert rank.in_flight == plain.in_flight + 1 <= 4 + 3
        # No gradient of the rows but Megatron's own.
        assert rank.memory.head < plain.memory.head
    # Rows' gradient in fp32 beside Megatron's in 16 bits.
    narrow = make_plan(GEMMA, replace(job, gradients="bf16"), H200, patched.layout)
    rows = 4.0 * 256000 * 2304 / 4
    assert narrow.ranks[0].memory.head == pytest.approx(patched.ranks[0].memory.head + rows)
    assert plan.prediction.seconds > 0 and plan.ranks[0].in_flight == 6


def test_hardware() -> None:
    assert find_hardware("H200") is H200
    with pytest.raises(ValueError, match=r"hardware must be one of \['a100', .*got 'h300'"):
        find_hardware("h300")
    with pytest.raises(ValueError, match=r"flops must be > 0 and finite, got 0"):
        replace(H200, flops=0.0)
    with pytest.raises(ValueError, match=r"gemm must be a share, <= 1, got 70"):
        replace(H200, gemm=70.0)
    assert isinstance(Hardware(flops=1, memory=GIB, hbm=1, nvlink=1), Hardware)
    # A wave that is nearly empty takes as long as a full one.
    full = H200.product(132 * 128, 256, 4096)
    assert H200.product(80 * 128, 256, 4096) == pytest.approx(full * 2 / 3, rel=0.3)
    assert H200.product(1 << 20, 4096, 4096) == pytest.approx(
        2 * (1 << 20) * 4096**2 / (H200.flops * H200.gemm), rel=0.01
    )


def test_software_differs_in_what_it_keeps() -> None:
    kept = {
        name: layer_cost(LLAMA, Job(software=software), H200, 0).kept
        for name, software in SOFTWARE.items()
    }
    assert kept["megatron"] < kept["torch"] < kept["megatron-local"]


def test_torchs_stages_receive_apart() -> None:
    job = replace(PIPE, software=SOFTWARE["torch"])
    each = 16 * 2 * PIPE.tokens * LLAMA.dim
    found = [rank.memory.buffers for rank in make_plan(LLAMA, job, H200).ranks]
    assert found == [each, 2 * each, 2 * each, each]
    assert make_plan(LLAMA, PIPE, H200).ranks[1].memory.buffers == 0
