"""Costs of stages, memory, layouts, and what is said of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from cce_dist.planner.cost import collective, layer_cost, visible_tokens
from cce_dist.planner.flags import layout_flags, layout_string, megatron_flags, torch_stages
from cce_dist.planner.hardware import GIB, HARDWARE, Hardware, find_hardware
from cce_dist.planner.head import head_cost, phase_bytes
from cce_dist.planner.job import LOSSES, SOFTWARE, Job
from cce_dist.planner.models import Model
from cce_dist.planner.orders import Times, most_in_flight, plan_vocab_order
from cce_dist.planner.plan import Plan, even_layout, make_plan
from cce_dist.planner.presets import find_model
from cce_dist.planner.search import (
    best_plan,
    largest_microbatch,
    largest_of_layouts,
    nearest_that_fits,
    vocab_pays,
)

H200 = HARDWARE["h200"]
GEMMA, LLAMA = find_model("gemma2-2b"), find_model("llama3-8b")
SMALL = Model(classes=32000, dim=512, layers=8, mlp_dim=2048, heads=8, kv_heads=8)
PIPE = Job(pp=4, microbatches=16, loss="native")


def largest(plan: Plan) -> float:
    return max(rank.memory.total for rank in plan.ranks)


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
    """docs/planner.md: an all-reduce of 8192 x 2304 in 16 bits takes 0.18 ms on two H200s, 0.24 on
    four; of 32768 x 4096 0.93 and 1.29."""
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
    # docs/benchmarks.md: forward and backward on one H200, ms.
    took = {"dense": 73, "native": 61, "exact": 64, "filtered": 16, "chunked": 56}[loss]
    assert 1e3 * (found.forward + found.backward) == pytest.approx(took, rel=0.12)
    logits = 2 * 8192 * 256000  # bytes, in 16 bits
    if loss in ("exact", "filtered"):
        assert found.kept + found.working < 1.45e9 < logits
    else:
        assert found.kept + found.working > 0.5 * logits


def test_eager_torchs_head() -> None:
    """docs/benchmarks.md: 64 ms and 24,000 MiB, of which the gradients' 1,161 are not its peak."""
    job = Job(microbatch=2, loss="dense", software=SOFTWARE["torch"])
    found = head_cost(GEMMA, job, H200)
    assert 1e3 * (found.forward + found.backward) == pytest.approx(64, rel=0.05)
    assert found.kept + found.working == pytest.approx(24000 * 2**20, rel=0.01)


def test_phases_have_the_bytes_of_the_documents() -> None:
    """docs/pipelines.md."""
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
    """adapters/planned.py plans by times without latency, megatron_patch by sizes and with U."""
    job = replace(PIPE, loss="filtered", vocab_over="pp")
    plan = best_plan(GEMMA, replace(job, software=SOFTWARE["torch"]), H200)
    ours = plan_vocab_order(4, 16, Times(statistics=0.1, gradients=0.2))
    assert [rank.in_flight for rank in plan.ranks] == list(map(most_in_flight, ours))
    patched = best_plan(GEMMA, job, H200)
    # 26 layers, of which a stage has seven at the most.
    head = 256000 * 2304 / 4 / (7 * GEMMA.layer_parameters)
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


def test_layouts_are_found() -> None:
    dense = best_plan(GEMMA, replace(PIPE, loss="dense"), H200)
    assert dense.layout[-1] < 3 and sum(dense.layout) == 26
    assert dense.seconds < 0.75 * make_plan(GEMMA, replace(PIPE, loss="dense"), H200).seconds
    ours = best_plan(GEMMA, replace(PIPE, loss="filtered"), H200)
    assert ours.layout == (7, 7, 7, 5)
    assert ours.seconds < 0.85 * dense.seconds
    virtual = best_plan(LLAMA, replace(PIPE, chunks=2), H200)
    assert len(virtual.layout) == 8 and sum(virtual.layout) == 32
    assert virtual.seconds < best_plan(LLAMA, PIPE, H200).seconds


def test_no_layout_of_a_few_layers_is_better() -> None:
    """Beside every layout of 8 layers on 3 stages."""
    job = replace(PIPE, pp=3, loss="dense")
    found = best_plan(SMALL, job, H200)
    every = [
        make_plan(SMALL, job, H200, (a, b, 8 - a - b)) for a in range(1, 7) for b in range(1, 9 - a)
    ]
    assert found.seconds <= 1.03 * min(plan.seconds for plan in every)


def test_layouts_make_room_where_memory_is_short() -> None:
    job = replace(PIPE, microbatch=3, loss="filtered")
    free = best_plan(LLAMA, job, H200)
    small = replace(H200, memory=0.97 * largest(free) / H200.usable)
    assert not make_plan(LLAMA, job, small, free.layout).fits
    squeezed = best_plan(LLAMA, job, small)
    assert squeezed.fits and squeezed.layout[0] < free.layout[0]


def test_largest_microbatch() -> None:
    plan = best_plan(LLAMA, PIPE, H200)
    count = largest_microbatch(plan)
    assert count >= 1 and plan.fits
    for microbatch, fits in ((count, True), (count + 1, False)):
        job = replace(PIPE, microbatch=microbatch)
        assert make_plan(LLAMA, job, H200, plan.layout).fits is fits
    assert largest_microbatch(make_plan(find_model("llama3-70b"), Job(), H200)) == 0


@pytest.mark.parametrize(
    "job", [replace(PIPE, pp=3, loss="dense"), replace(PIPE, pp=3, loss="exact", vocab_over="pp")]
)
def test_largest_of_layouts(job: Job) -> None:
    """Beside every layout of 8 layers on 3 stages."""
    small = replace(H200, memory=16 * GIB)
    count = largest_of_layouts(SMALL, job, small)
    assert count > max(1, largest_microbatch(make_plan(SMALL, job, small, (3, 3, 2))))
    every = [(a, b, 8 - a - b) for a in range(9) for b in range(1, 9 - a)]
    for microbatch, fits in ((count, True), (count + 1, False)):
        larger = replace(job, microbatch=microbatch)
        plans = [make_plan(SMALL, larger, small, layout) for layout in every]
        assert any(plan.fits for plan in plans) is fits
    assert largest_of_layouts(SMALL, job, small, below=count) == count - 1
    assert largest_of_layouts(SMALL, job, replace(H200, memory=GIB)) == 0


def test_largest_microbatch_that_ranks_can_share() -> None:
    job = Job(sequence=4001, tp=2, microbatch=2, sequence_parallel=True)
    assert largest_of_layouts(SMALL, job, H200) % 2 == 0 < largest_of_layouts(SMALL, job, H200)
    assert largest_microbatch(make_plan(SMALL, job, H200)) % 2 == 0


def test_whether_the_vocabulary_over_the_pipeline_pays() -> None:
    # A head of eight layers' time, deep pipeline, many microbatches.
    wide = Model(classes=512000, dim=2048, layers=16, mlp_dim=8192, heads=16, kv_heads=16)
    pays = vocab_pays(wide, Job(pp=8, microbatches=128, loss="exact"), H200)
    assert pays is not None and pays.speedup > 1.5 and pays.verdict.startswith("yes: ")
    pays = vocab_pays(LLAMA, PIPE, H200)
    assert pays is not None and pays.speedup < 1 and pays.verdict.startswith("no: ")
    assert pays.last.job.loss == "filtered" and pays.over.job.vocab_over == "pp"
    both = vocab_pays(LLAMA, replace(PIPE, tp=2, loss="exact"), H200)
    assert both is not None and both.over.job.head_ranks == 8
    assert vocab_pays(LLAMA, Job(loss="exact"), H200) is None


@pytest.mark.parametrize("microbatches", [128, 1024])
def test_a_plan_for_many(microbatches: int) -> None:
    """1,024 GPUs, 128 stages, half a million classes; all that the command asks of the planner."""
    model = Model(classes=524288, dim=8192, layers=256, mlp_dim=28672, heads=64, kv_heads=8)
    job = Job(
        sequence=8192,
        pp=128,
        dp=8,
        microbatches=microbatches,
        loss="exact",
        vocab_over="pp",
        distributed_optimizer=True,
        recompute="full",
    )
    start = time.perf_counter()
    plan = best_plan(model, job, H200)
    pays = vocab_pays(model, job, H200, best=plan)
    assert largest_of_layouts(model, job, H200) >= largest_microbatch(plan) >= 1
    assert time.perf_counter() - start < 10
    assert pays is not None and pays.over is plan
    assert job.gpus == 1024 and plan.fits
    assert max(rank.in_flight for rank in plan.ranks) <= min(microbatches, 128 + 3)


def test_what_binds() -> None:
    assert "its head takes" in make_plan(GEMMA, replace(PIPE, loss="dense"), H200).binds
    assert make_plan(find_model("llama3-70b"), Job(), H200).binds.startswith("memory: rank 0 needs")
    few = make_plan(LLAMA, replace(PIPE, microbatches=1, loss="none"), H200)
    assert few.binds.startswith("the bubble: ")


def test_nearest_that_fits() -> None:
    big = find_model("llama3-70b")
    smaller = nearest_that_fits(LLAMA, Job(microbatch=64, pp=4), H200)
    count = largest_of_layouts(LLAMA, Job(microbatch=64, pp=4), H200)
    assert smaller.fits == f"--microbatch {count}" and 1 < count < 64
    long = Job(sequence=131072, microbatches=64)
    for job, hardware in ((Job(), H200), (long, HARDWARE["a100"])):
        changes = nearest_that_fits(big, job, hardware).fits
        assert changes is not None
        values: dict[str, Any] = {}
        for change in changes.removeprefix("--").split(" --"):
            name, _, value = change.replace("-", "_").partition(" ")
            values[name] = int(value) if value.isdigit() else value or True
        assert best_plan(big, replace(job, **values), hardware).fits
    none = nearest_that_fits(big, Job(), replace(H200, memory=GIB))
    assert none.fits is None
    assert none.tried == "--tp 8 --pp 64 --cp 16 --sequence-parallel --recompute full"


def test_nearest_that_fits_instead_of_a_layout() -> None:
    job, asked = replace(PIPE, microbatch=2, loss="native"), (23, 1, 1, 1)
    h100 = HARDWARE["h100"]
    assert not make_plan(GEMMA, job, h100, asked).fits
    found = nearest_that_fits(GEMMA, job, h100, asked).fits
    assert found == "--layout " + ",".join(map(str, best_plan(GEMMA, job, h100).layout))
    found = nearest_that_fits(GEMMA, replace(job, microbatch=32), h100, asked).fits
    count = largest_of_layouts(GEMMA, job, h100)
    assert found == f"--microbatch {count}, without --layout" and 2 <= count < 32


@pytest.mark.parametrize(
    ("layout", "text", "flags"),
    [
        ((8,), "Et*8L", []),
        ((4, 4), "Et*4|t*4L", []),
        ((7, 7, 7, 5), "Et*7|(t*7|)*2t*5L", ["--decoder-last-pipeline-num-layers 5"]),
        (
            (5, 7, 7, 6),
            "Et*5|(t*7|)*2t*6L",
            ["--decoder-first-pipeline-num-layers 5", "--decoder-last-pipeline-num-layers 6"],
        ),
        ((3, 1, 2, 0), "Et*3|t|t*2|L", ['--pipeline-model-parallel-layout "Et*3|t|t*2|L"']),
    ],
    ids=str,
)
def test_megatrons_flags(layout: tuple[int, ...], text: str, flags: list[str]) -> None:
    assert layout_string(layout) == text
    assert layout_flags(Job(pp=len(layout)), layout) == flags


def test_all_of_megatrons_flags() -> None:
    job = Job(
        tp=2,
        pp=2,
        cp=2,
        dp=4,
        ep=2,
        chunks=2,
        microbatches=8,
        recompute="full",
        loss="native",
        sequence_parallel=True,
        distributed_optimizer=True,
    )
    flags = megatron_flags(LLAMA, job, (8, 8, 8, 8))
    for flag in (
        "--global-batch-size 32",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--context-parallel-size 2",
        "--expert-model-parallel-size 2",
        "--recompute-granularity full",
        "--cross-entropy-loss-fusion",
        "--untie-embeddings-and-output-weights",
    ):
        assert flag in flags
    with pytest.raises(ValueError, match="must be '1f1b' or 'interleaved' in Megatron, got 'zbv'"):
        megatron_flags(LLAMA, replace(job, schedule="zbv"), (8, 8, 8, 8))


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        ("mixtral-8x7b", {"tp": 2}, "sequence_parallel must be set in Megatron with experts"),
        ("llama3-8b", {"chunks": 2}, "pp must be >= 2 under Megatron's interleaved 1F1B, got 1"),
        (
            "llama3-8b",
            {"tp": 2, "sequence": 4001, "microbatch": 2, "sequence_parallel": True},
            "sequence must be a multiple of cp . tp, 2, under Megatron's .*, got 4001",
        ),
    ],
)
def test_jobs_that_megatron_refuses_have_no_flags(
    model: str, values: dict[str, Any], message: str
) -> None:
    job = Job(loss="native", **values)
    with pytest.raises(ValueError, match=message):
        megatron_flags(find_model(model), job, (32,) if job.chunks == 1 else (16, 16))


def test_flags_that_a_job_needs() -> None:
    assert "--attention-backend unfused" in megatron_flags(LLAMA, Job(attention="unfused"), (32,))
    alone = megatron_flags(LLAMA, Job(sequence_parallel=True), (32,))
    assert "--sequence-parallel" not in alone
    both = megatron_flags(find_model("mixtral-8x7b"), Job(tp=2, sequence_parallel=True), (32,))
    assert "--sequence-parallel" in both


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "layout",
    [(7, 7, 7, 5), (8, 9, 9, 0), (0, 1, 1, 0), (1, 2, 3, 2, 2, 2, 3, 1), (0, *[1] * 6, 0)],
    ids=str,
)
def test_megatron_understands_layouts(layout: tuple[int, ...]) -> None:
    module = "megatron.core.transformer.pipeline_parallel_layer_layout"
    pytest.importorskip("megatron.core", reason="needs the extra `megatron`")
    theirs = pytest.importorskip(module).PipelineParallelLayerLayout
    found = theirs(layout_string(layout), 4)
    found.validate_layer_layout(num_layers=sum(layout), mtp_num_layers=None)
    counts = [
        sum(kind.name == "decoder" for kind in found.layout[rank][chunk])
        for chunk in range(len(layout) // 4)
        for rank in range(4)
    ]
    assert counts == list(layout)


def test_torchs_stages() -> None:
    assert torch_stages((3, 1, 0)) == [
        ["embed_tokens", "layers[0:3]"],
        ["layers[3:4]"],
        ["norm", "lm_head"],
    ]
    assert torch_stages((2,), has_head=False) == [["embed_tokens", "layers[0:2]", "norm"]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp must be an integer >= 1, got 0"),
        ({"microbatch": 1.5}, "microbatch must be an integer >= 1, got 1.5"),
        ({"loss": "dens"}, r"loss must be one of .*got 'dens'"),
        ({"recompute": "some"}, r"recompute must be one of .*got 'some'"),
        ({"cp": 3}, "sequence must be a multiple of 2 cp, 6, got 4096; the nearest is 4098"),
        ({"dp": 4, "ep": 3}, "ep must divide dp . cp, 4, got 3; the nearest is 2"),
        ({"vocab_over": "pp", "pp": 2}, r"loss must be one of \('exact', 'filtered'\) with"),
        (
            {"loss": "exact", "schedule": "vocab"},
            "schedule 'vocab' is that of .* vocab_over must be 'pp' or 'pp-tp', got 'last'",
        ),
        ({"schedule": "zbv"}, "chunks must be 2 under 'zbv', got 1"),
        ({"schedule": "1f1b", "chunks": 2}, "chunks must be 1 under '1f1b', got 2"),
        (
            {"loss": "exact", "vocab_over": "pp", "pp": 2, "chunks": 2},
            "chunks must be 1 under 'vocab', got 2; 'interleaved' has 2 or more, 'zbv' has 2",
        ),
    ],
)
def test_bad_jobs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 3}, "tp must divide the model's 32 heads, got 3; the nearest is 2"),
        ({"pp": 40}, r"must be <= the model's 32 layers and two .* got 40 . 1 = 40; .* is 34"),
        ({"pp": 8, "chunks": 8}, r"got 8 . 8 = 64; the largest pp with these chunks is 4"),
        ({"pp": 1, "chunks": 35}, r"got 1 . 35 = 35; even pp 1 can have no more than 34 chunks"),
        ({"dp": 2, "ep": 2}, "ep must divide the model's 0 experts, got 2; the nearest is 1"),
        (
            {"tp": 32, "sequence": 4000, "sequence_parallel": True, "cp": 5},
            None,
        ),
        (
            {"tp": 32, "sequence": 4001, "sequence_parallel": True},
            "must be a multiple of tp, 32, under sequence parallelism, got 4001; the nearest is 40",
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused(values: dict[str, Any], message: str | None) -> None:
    if message is None:
        make_plan(LLAMA, Job(**values), H200)
        return
    with pytest.raises(ValueError, match=message):
        make_plan(LLAMA, Job(**values), H200)


def test_tp_of_fewer_heads_of_keys() -> None:
    """Megatron's rule: each rank has as many, or as many ranks have the same one."""
    model = replace(SMALL, heads=24, kv_heads=4, mlp_dim=768, head_dim=64)
    for tp in (1, 2, 4, 8, 12, 24):
        make_plan(model, Job(tp=tp), H200)
    for tp, near in ((3, 2), (6, 4)):
        message = f"4 heads of keys and values or be a multiple of them, got {tp}; the nearest is"
        with pytest.raises(ValueError, match=f"{message} {near}"):
            make_plan(model, Job(tp=tp), H200)


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 stages .* of 32 layers in all, got 4 of 31: \[8"):
        make_plan(LLAMA, PIPE, H200, (8, 8, 8, 7))
    with pytest.raises(ValueError, match=r"got 3 of 32: .* an even one is \[8, 8, 8, 8\]"):
        make_plan(LLAMA, PIPE, H200, (8, 8, 16))
    assert even_layout(26, 4) == (7, 7, 6, 6)
    # The embedding and the head may have a stage each.
    assert even_layout(4, 5) == (1, 1, 1, 1, 0)
    assert even_layout(4, 6) == (0, 1, 1, 1, 1, 0)


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
