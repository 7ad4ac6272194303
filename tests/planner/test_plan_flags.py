"""A plan in other words: Megatron's flags and layouts, torch's stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cce_dist.planner.cost.job import Job
from cce_dist.planner.flags import layout_flags, layout_string, megatron_flags, torch_stages
from cce_dist.planner.models.presets import find_model
from tests.planner.plan_jobs import LLAMA


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
        ("mixtral-8x7b", {"tp": 2}, "sequence_parallel must be true in Megatron with experts"),
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
