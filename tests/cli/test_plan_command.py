"""`cce-dist plan model`, `models` and `times`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from cce_dist.cli import plan_plot as cli_plan_plot
from cce_dist.cli.main import app
from cce_dist.planner.models.presets import MODELS
from cce_dist.planner.orders.predict import StageTimes, predict

PIPE = ("--pp", "4", "--microbatches", "16")


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"})


def as_json(*arguments: str) -> dict[str, Any]:
    result = plan("model", *arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_table() -> None:
    result = plan("model", "gemma2-2b", *PIPE, "--loss", "dense")
    assert result.exit_code == 0, result.output
    for text in (
        "4 GPUs pp 4: 16 microbatches of 1 x 4096 tokens, 1f1b, loss dense",
        "by formula; optimizer",
        "binds: compute of rank",
        "largest microbatch: ",
        "filtered on the last stage instead: yes: 1.",
        "vocabulary over the pipeline, filtered: no: ",
        '--pipeline-model-parallel-layout "Et*',
        "torch stages: embed_tokens, layers[0:",
    ):
        assert text in result.output, text


def test_the_title_of_one() -> None:
    result = plan("model", "gemma2-2b")
    assert result.output.startswith("1 GPU: 1 microbatch of 1 x 4096 tokens, 1f1b, loss native\n")


def test_json_and_picture(tmp_path: Path) -> None:
    rows, picture = tmp_path / "a" / "plan.json", tmp_path / "b" / "plan.png"
    result = plan(
        "model", "gemma2-2b", *PIPE, "--json", str(rows), "--plot", str(picture), "--loss", "exact"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(rows.read_text())
    assert found["model"]["parameters"] == 2_614_341_888
    assert sum(found["layout"]) == 26 and len(found["ranks"]) == 4
    kinds = found["ranks"][0]["memory_bytes"]
    assert kinds.pop("total") == pytest.approx(sum(kinds.values()))
    assert found["vocab_over_pipeline"]["verdict"][:3] in ("yes", "no:")
    assert found["torch_stages"][-1][-1] == "lm_head"
    assert found["step_seconds"] > found["schedule_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", [1, 4, 32, 33, 128])
def test_ranks_of_a_picture_do_not_hide_each_other(ranks: int, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    times = StageTimes((1.0,) * ranks, (2.0,) * ranks)
    drawn: list[Figure] = []
    with mock.patch.object(cli_plan_plot, "_save", lambda figure, path: drawn.append(figure)):
        cli_plan_plot.plot_timeline(predict(times, 4), tmp_path / "x.png")
    (axes,) = drawn[0].axes
    drawn[0].canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert axes.get_yticklabels()[0].get_text() == "0"
    assert len(boxes) >= min(ranks, 16)
    # From the top down.
    for above, below in itertools.pairwise(boxes):
        assert above.y0 >= below.y1
    assert axes.get_ylim()[0] > ranks - 1


def test_over_the_pipeline() -> None:
    found = as_json("gemma2-2b", *PIPE, "--tp", "2", "--loss", "exact", "--vocab-over", "pp-tp")
    assert found["job"]["schedule"] == "vocab"
    assert set(found["phase_bytes"]) == {"broadcast", "merge", "sum"}
    assert found["megatron_patch"][0] == "-m megatron_patch"
    assert max(rank["in_flight"] for rank in found["ranks"]) <= 7
    assert found["torch_stages"][-1][-1] == "norm"


@pytest.mark.parametrize(
    "more",
    [
        ("--virtual", "2"),
        ("--virtual", "2", "--schedule", "zbv", "--software", "torch"),
        ("--schedule", "gpipe", "--recompute", "full"),
        ("--tp", "2", "--sequence-parallel", "--dp", "2", "--distributed-optimizer"),
        ("--cp", "2", "--gradients", "bf16", "--precision", "bf16", "--attention", "unfused"),
        ("--layout", "7,7,7,5", "--hardware", "b200", "--number", "gemm=0.6"),
        ("--software", "torch", "--precision", "fp32", "--number", "joint_qkv=1"),
        ("--layers", "12", "--loss", "chunked", "--hardware", "a100"),
    ],
    ids=" ".join,
)
def test_options(more: tuple[str, ...]) -> None:
    found = as_json("gemma2-2b", *PIPE, *more)
    assert found["step_seconds"] > 0 and found["fits"]
    if "--layout" in more:
        assert found["layout"] == [7, 7, 7, 5] and found["hardware"]["gemm"] == 0.6
    if "joint_qkv=1" in more:
        assert found["job"]["software"]["joint_qkv"] is True
    if "zbv" in more:
        assert found["megatron_flags"] is None
        assert any("must be '1f1b' or 'interleaved' in Megatron" in x for x in found["notes"])


def test_help_says_what_can_be_chosen() -> None:
    from cce_dist.planner.cost.job import ATTENTIONS, LOSSES, OVER, SOFTWARE
    from cce_dist.planner.orders.schedules import NAMES

    found = " ".join(plan("model", "--help").output.replace("\u2502", " ").split())
    three = ("none, selective, full", "mixed, bf16, fp32", "fp32, bf16")
    for words in (ATTENTIONS, LOSSES, OVER, SOFTWARE, NAMES):
        assert ", ".join(words) in found
    for text in three:
        assert text in found


def test_a_config_file_and_hardware_of_numbers(tmp_path: Path) -> None:
    config, hardware = tmp_path / "config.json", tmp_path / "hardware.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "gemma",
                "hidden_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "intermediate_size": 2048,
                "vocab_size": 32000,
                "torch_dtype": "bfloat16",
                "head_dims": 64,
            }
        )
    )
    numbers = {"flops": 1e14, "memory": 1.6e10, "hbm": 1e12, "nvlink": 1e11}
    hardware.write_text(json.dumps(numbers))
    found = as_json(str(config), "--hardware", str(hardware), "--loss", "filtered")
    assert found["hardware"]["flops"] == 1e14 and found["model"]["head_dim"] == 256
    assert any(note.startswith("head_dim: not in the file") for note in found["notes"])
    assert "not used by the planner: head_dims" in found["notes"]
    assert "note: not used by the planner: head_dims\n" in plan("model", str(config)).output


def test_what_does_not_fit() -> None:
    result = plan("model", "llama3-70b")
    assert result.exit_code == 1
    assert "does not fit: memory: rank 0 needs 1" in result.output
    assert "; fits with --tp 8 --pp 2 --sequence-parallel --recompute full\n" in result.output
    result = plan("model", "llama3-8b", *PIPE, "--microbatch", "64")
    assert result.exit_code == 1 and "; fits with --microbatch " in result.output


def test_the_largest_microbatch_is_of_all_layouts() -> None:
    found = as_json("gemma2-2b", *PIPE, "--loss", "dense")
    assert (found["largest_microbatch"], found["largest_microbatch_of_layout"]) == (14, 8)
    result = plan("model", "gemma2-2b", *PIPE, "--loss", "dense", "--microbatch", "15")
    assert "largest microbatch: 14 by another layout, 11 by this one" in result.output
    assert "; fits with --microbatch 14\n" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt5",), "model must be a config.json or one of"),
        (("llama3-8b", "--tp", "3"), "tp must divide the model's 32 heads, got 3; the nearest is"),
        (("GPT2",), "sequence must be <= the model's 1024 learned positions, got 4096"),
        (("llama3-8b", "--hardware", "h300"), "hardware must be one of"),
        (("llama3-8b", "--number", "flop=1"), "number must be one of"),
        (("llama3-8b", "--number", "memry=8e10"), "got 'memry'; the nearest is 'memory'"),
        (("llama3-8b", "--number", "memory=80"), "memory must be in bytes, >= 2**30 (1 GiB), got"),
        (("llama3-8b", "--number", "flops=989"), "flops must be in FLOP/s, >= 1e9, got 989.0"),
        (("llama3-8b", "--number", "hbm=4.8"), "hbm must be in bytes/s, >= 1e9, got 4.8"),
        (("llama3-8b", "--number", "latency=60"), "latency must be in seconds, <= 1, got 60.0"),
        (("llama3-8b", "--number", "joint_qkv=2"), "joint_qkv must be 0 or 1, got 2.0"),
        (("gemma2-2", "--pp", "2"), "nor a preset; the nearest is 'gemma2-2b'"),
        (("llama3-8b", "--number", "flops=x"), "flops must be a number, got 'x'"),
        (("llama3-8b", "--number", "step=x"), "step must be a number, got 'x'"),
        (("llama3-8b", "--number", "hidden=2"), "hidden must be a share, <= 1, got 2.0"),
        (("llama3-8b", "--number", "rope_traffic=-1"), "rope_traffic must be >= 0 and finite"),
        (("llama3-8b", "--loss", "dens"), "loss must be one of"),
        (("llama3-8b", "--software", "jax"), "software must be one of"),
        (("llama3-8b", "--pp", "2", "--layout", "a"), "layout must be numbers of layers"),
        (("llama3-8b", "--pp", "2", "--layout", "16,15"), "of 32 layers in all, got 2 of 31"),
        (
            ("llama3-8b", "--pp", "4", "--virtual", "2", "--microbatches", "6"),
            "microbatches must be a multiple of the pipeline's ranks, 4",
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else None,
)
def test_bad_input_is_refused(arguments: tuple[str, ...], message: str) -> None:
    result = plan("model", *arguments)
    assert result.exit_code == 2
    assert f"error: {message}" in result.output or message in result.output


def test_bad_hardware_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    for text, message in (
        ("{", "hardware must be a readable JSON file"),
        ("[]", "hardware must be an object, got list"),
        (
            '{"flops": 1e14, "memory": 8e10, "hbm": 1e12, "nvlink": 1e11, "gem": 1}',
            f"keys of {file} must be among ['flops', ",
        ),
        ('{"flops": 1}', "hardware must have ['memory', 'hbm', 'nvlink'], got ['flops']"),
    ):
        file.write_text(text)
        result = plan("model", "llama3-8b", "--hardware", str(file))
        assert result.exit_code == 2 and message in result.output


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"forward": [1], "backward": [2], "microbatches": 4}))
    file = tmp_path / "file"
    file.write_text("")
    for arguments, message in (
        (("model", "GPT2", "--json", str(tmp_path)), "--json must name a file, got the folder "),
        (("model", "GPT2", "--sequence", "512", "--plot", f"{file}/x.png"), "Errno"),
        (("times", str(times), "--plot", "x.xyz"), "plot must end with one of .png, .pdf, .svg"),
    ):
        result = plan(*arguments)
        assert result.exit_code == 2 and message in result.output, result.output


def test_a_model_is_no_command() -> None:
    result = plan("gemma2-2b", "--pp", "4")
    assert result.exit_code == 2 and "plan model gemma2-2b" in result.output
    result = plan("tables")
    assert result.exit_code == 2 and "plan model" not in result.output


def test_models() -> None:
    result = plan("models")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == len(MODELS)
    assert "gemma2-2b           2,614,341,888" in result.output


def test_times(tmp_path: Path) -> None:
    file, picture = tmp_path / "times.json", tmp_path / "times.png"
    file.write_text(json.dumps({"forward": [1, 1], "backward": [2, 2], "microbatches": 4}))
    result = plan("times", str(file), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "step: 15, 15 by formula; bubble: 20.0%" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = plan("times", str(file), "--schedule", "gpipe", "--microbatches", "8")
    assert "step: 27, 27 by formula" in result.output
    result = plan("times", str(tmp_path / "none.json"))
    assert result.exit_code == 2 and "times must be a readable JSON file" in result.output
