"""A plan in other words: Megatron's flags and layouts, torch's stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cce_dist.planner.cost.job import Job
from cce_dist.planner.flags import (
    layout_flags,
    layout_string,
    megatron_flags,
    patch_flags,
    torch_stages,
)
from cce_dist.planner.models.presets import find_model
from tests.planner.plan_jobs import LLAMA, PIPE


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
    job = Job(tp=2, pp=2, cp=2, dp=4, ep=2, chunks=2, microbatches=8, loss="native")
    job = replace(job, recompute="full", sequence_parallel=True, distributed_optimizer=True)
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


def test_megatrons_flags_of_overlap() -> None:
    job = Job(tp=2, dp=2, sequence_parallel=True, overlap_data=True, overlap_tensor=True)
    flags = megatron_flags(LLAMA, replace(job, attention="cudnn"), (32,))
    assert "--overlap-param-gather" not in flags
    for flag in ("--overlap-grad-reduce", "--tp-comm-overlap", "--attention-backend fused"):
        assert flag in flags
    # Megatron refuses the overlap without sequence parallelism, which needs two ranks.
    alone = megatron_flags(LLAMA, replace(job, tp=1), (32,))
    assert not {"--tp-comm-overlap", "--sequence-parallel"} & set(alone)
    # Its defaults are 0.1.
    assert "--attention-dropout 0" in flags and "--hidden-dropout 0" in flags
    shared = replace(job, distributed_optimizer=True, dropout=True)
    flags = megatron_flags(LLAMA, shared, (32,))
    assert "--overlap-param-gather" in flags
    assert not any("dropout" in flag or "backend" in flag for flag in flags)
    assert "--attention-backend unfused" in megatron_flags(LLAMA, Job(attention="unfused"), (32,))


def test_patch_flags() -> None:
    assert patch_flags(PIPE) == []
    assert patch_flags(replace(PIPE, loss="exact")) == ["-m megatron_patch", "--gradient exact"]
    over = replace(PIPE, loss="filtered", vocab_over="pp-tp", tp=2)
    assert patch_flags(over)[1:] == ["--gradient filtered", "--vocab-over-pipeline true"]
    assert "--bf16" in megatron_flags(LLAMA, over, (8, 8, 8, 8))
    odd = replace(over, pp=3)
    assert "--make-vocab-size-divisible-by 384" in megatron_flags(
        find_model("GPT2"), odd, (4, 4, 4)
    )
    for job, has in ((PIPE, False), (replace(PIPE, gradients="bf16"), True)):
        assert ("--grad-reduce-in-bf16" in megatron_flags(LLAMA, job, (8, 8, 8, 8))) is has


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 2}, "sequence_parallel must be true in Megatron with experts"),
        ({"pp": 1, "chunks": 2}, "pp must be >= 2 under Megatron's interleaved 1F1B, got 1"),
        (
            {"tp": 2, "sequence": 4001, "microbatch": 2, "sequence_parallel": True},
            "sequence must be a multiple of cp . tp, 2, under Megatron's .*, got 4001",
        ),
        (
            {"schedule": "zbv", "chunks": 2},
            "must be '1f1b' or 'interleaved' in Megatron, got 'zbv'",
        ),
        ({"loss": "exact", "vocab_over": "pp", "tp": 2}, "'pp-tp' in megatron_patch with tp > 1"),
        ({"loss": "exact", "vocab_over": "pp", "pp": 1}, "pp must be >= 2 in megatron_patch"),
        ({"chunks": 2, "microbatches": 10}, "multiple of pp, 4, under Megatron's .* got 10"),
        ({"loss": "chunked"}, "loss must be 'dense' or 'native' in Megatron, .* got 'chunked'"),
        ({"precision": "bf16"}, "precision must be 'mixed' in Megatron, .* got 'bf16'"),
    ],
)
def test_jobs_that_megatron_refuses_have_no_flags(values: dict[str, Any], message: str) -> None:
    model = find_model("mixtral-8x7b") if "experts" in message else LLAMA
    with pytest.raises(ValueError, match=message):
        megatron_flags(model, replace(PIPE, **values), (8, 8, 8, 8))


def test_sequence_parallelism_needs_several_ranks() -> None:
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
