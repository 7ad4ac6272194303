"""The configuration file: accepted files, and refusals, which all say key, rule and value."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cce_dist.cli.main import app
from cce_dist.train.config.load import describe_keys, load_config, parse_arguments
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.errors import ConfigError
from tests.support.torchrun import run_placed_training

CONFIGS = Path(__file__).parents[2] / "launch" / "configs"


def load(tmp_path: Path, text: str, *arguments: str) -> TrainConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(*parse_arguments([str(path), *arguments]))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_load_config_accepts_our_files(path: Path) -> None:
    assert load_config(path).run.name == path.stem


def test_load_config_empty_file_is_all_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert config.loss.gradient == "filtered"
    assert config.parallel.tp == 1


def test_load_config_reads_exponents_without_a_point(tmp_path: Path) -> None:
    # YAML 1.1 would make the string "3e-4" of it.
    config = load(tmp_path, "optimizer: {lr: 3e-4}", "--optimizer.weight-decay=1E-2")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (3e-4, 1e-2)


@pytest.mark.parametrize(
    ("written", "seed"), [("0", 0), ("7", 7), ("+7", 7), ("1_000", 1000), ("0x10", 16)]
)
def test_load_config_reads_whole_numbers(tmp_path: Path, written: str, seed: int) -> None:
    assert load(tmp_path, f"run: {{seed: {written}}}").run.seed == seed


def test_parse_arguments_win_over_the_file(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "loss: {gradient: exact}\nsteps: 3",
        *("--loss.gradient", "filtered", "--loss.filter.keep", "0.25"),
        *("--steps=7", "--data.paths", "[a, b]", "--optimizer.clip", "null"),
    )
    assert config.loss.gradient == "filtered"
    assert config.loss.filter.keep == 0.25
    assert config.steps == 7
    assert config.data.paths == (Path("a"), Path("b"))
    assert config.optimizer.clip is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "model: {dims: 8}", "unknown key model.dims; did you mean model.dim?", id="typo"
        ),
        pytest.param("lr: 1", "unknown key lr; did you mean optimizer.lr?", id="section missing"),
        pytest.param(
            "qwertz: 1", "unknown key qwertz; cce-dist train --help lists the keys", id="unknown"
        ),
        pytest.param(
            "optimizer: {lr: -1}", "optimizer.lr must be greater than 0, got -1", id="bound"
        ),
        pytest.param(
            "optimizer: {lr: x}", "optimizer.lr must be a valid number, got 'x'", id="number"
        ),
        pytest.param(
            "optimizer: {lr: .nan}", "optimizer.lr must be a finite number, got nan", id="nan"
        ),
        pytest.param("steps: 1.5", "steps must be a valid integer, got 1.5", id="integer"),
        pytest.param("steps: true", "steps must be a valid integer, got True", id="no bool as int"),
        pytest.param("model: 3", "model must be a section with keys of its own, got 3", id="flat"),
        pytest.param(
            "model: {tied: 1}", "model.tied must be a valid boolean, got 1", id="no int as bool"
        ),
        pytest.param(
            "loss: {gradient: fast}",
            "loss.gradient must be 'filtered', 'exact' or 'in_forward', got 'fast'",
            id="choice",
        ),
        pytest.param(
            "loss: {filter: {keep: many}}",
            "loss.filter.keep must be a valid number or be 'auto', got 'many'",
            id="choice or number",
        ),
        pytest.param(
            "optimizer: {betas: [0.9]}", "optimizer.betas.1 must be given", id="short list"
        ),
        pytest.param(
            "data: {vocab_size: 100}",
            "data.vocab_size must be greater than or equal to 257",
            id="bytes",
        ),
        pytest.param("run: {name: ../x}", "run.name must match", id="name"),
        pytest.param(
            'run: {out: "\\ud83d"}', "run.out must be a name that a file can have, got", id="half"
        ),
        pytest.param(
            'data: {paths: [a, "\\0"]}',
            "data.paths.1 must be a name that a file can have",
            id="nul",
        ),
        pytest.param("model: {dim: 9, heads: 2}", "got dim=9 and heads=2", id="heads"),
        pytest.param(
            "batch: 3\nparallel: {tp: 2, sequence_parallel: true}",
            "got batch=3 and tp=2",
            id="sequences over ranks",
        ),
        pytest.param(
            "loss: {gradient: exact, filter: {keep: 0.1}}",
            "loss.filter=Filter(keep=0.1, tail=True, eps=None, draw=True) has no effect with "
            "gradient='exact'",
            id="filter without filtering",
        ),
        pytest.param(
            "loss: {filter: {keep: 0.1, eps: 0.1}}",
            "loss.filter.keep and loss.filter.eps exclude each other, got keep=0.1 and eps=0.1",
            id="two criteria",
        ),
        pytest.param(
            "loss: {softcap: 30.0, label_smoothing: 0.1}",
            'use gradient="exact", or "in_forward" without a filter',
            id="no filter for it",
        ),
        pytest.param(
            "parallel: {schedule: 1f2b}",
            "parallel.schedule must be 'gpipe', '1f1b', 'looped', 'interleaved', 'zero_bubble', "
            "'zbv' or 'vocab_1f1b', got '1f2b'",
            id="schedule",
        ),
        pytest.param(
            "parallel: {pp: 2, fsdp: true}",
            "parallel.fsdp is not supported with a pipeline, got fsdp=true and pp=2",
            id="fsdp and pipeline",
        ),
        pytest.param(
            "parallel: {pp: 2, schedule: vocab_1f1b}",
            "got parallel.vocab_over_pipeline=false: set it to true, or use schedule=1f1b",
            id="planned without its vocabulary",
        ),
        pytest.param(
            "parallel: {pp: 2, virtual_stages: 2}",
            "parallel.virtual_stages must be 1 with parallel.schedule=1f1b, got 2",
            id="virtual stages",
        ),
        pytest.param(
            "parallel: {pp: 2, schedule: zbv, virtual_stages: 1}",
            "parallel.virtual_stages must be 2 with parallel.schedule=zbv, got 1",
            id="a V of one stage",
        ),
        pytest.param(
            "batch: 9\nparallel: {pp: 2, microbatches: 2}",
            "batch must be a multiple of parallel.microbatches, got batch=9 and microbatches=2",
            id="microbatches",
        ),
        pytest.param(
            "batch: 4\nparallel: {pp: 2, tp: 2, microbatches: 4, sequence_parallel: true}",
            "batch must be a multiple of parallel.microbatches x parallel.tp with "
            "parallel.sequence_parallel, got batch=4 and microbatches=4 and tp=2",
            id="sequences of a microbatch over ranks",
        ),
        pytest.param(
            "batch: 3\nparallel: {pp: 4}",
            "must be at least parallel.pp with parallel.schedule=1f1b, got microbatches=3 and pp=4",
            id="too few microbatches",
        ),
        pytest.param(
            "batch: 11\nparallel: {pp: 4, schedule: interleaved}",
            "parallel.microbatches must be a multiple of 2, the number of rounds (microbatches // "
            "pp) of parallel.schedule=interleaved with parallel.pp=4, got 11: use 8",
            id="rounds",
        ),
        pytest.param(
            "model: {layers: 3}\nparallel: {pp: 4}",
            "model.layers must be at least one for each of the pipeline's 4 stages, got 3",
            id="too few layers",
        ),
        pytest.param(
            "parallel: {pp: 2, layers_per_stage: [1, 2, 1]}",
            "parallel.layers_per_stage must have an entry for each of the pipeline's 2 stages",
            id="stages",
        ),
        pytest.param(
            "parallel: {pp: 2, layers_per_stage: [1, 2]}",
            "parallel.layers_per_stage must add up to model.layers=4, got [1, 2]",
            id="layers",
        ),
        pytest.param(
            "parallel: {pp: 3, layers_per_stage: [2, 0, 2]}",
            "all stages but the first, which embeds, and the last, which norms, got [2, 0, 2]",
            id="an empty stage",
        ),
        pytest.param(
            "loss: {gradient: in_forward}\nparallel: {pp: 2, vocab_over_pipeline: true}",
            "loss.gradient=in_forward is not supported with parallel.vocab_over_pipeline=true",
            id="in_forward over a pipeline",
        ),
        pytest.param(
            "loss: {logits: screened, gradient: exact}",
            "loss.logits=\"screened\" needs a filter that leaves columns out, and gradient='exact'",
            id="screened exactly",
        ),
        pytest.param(
            "loss: {logits: screened}",
            "needs 16-bit training, got dtype=float32: use dtype=bfloat16, or loss.logits=full",
            id="screened in fp32",
        ),
        pytest.param(
            "dtype: bfloat16\nloss: {logits: screened, filter: {eps: 0}}",
            "filter=Filter(keep='auto', tail=True, eps=0.0, draw=True) keeps every column",
            id="screened without a filter",
        ),
        pytest.param(
            "dtype: bfloat16\nloss: {logits: screened, gradient: in_forward, softcap: 30, "
            "label_smoothing: 0.1}",
            "gives every column its own gradient, so that no filter can leave columns out",
            id="screened where every column counts",
        ),
        pytest.param(
            "loss: {screen: {max_kept: 0.5}}",
            "loss.screen=Screen(dtype='auto', max_kept=0.5, max_error=0.0078125) has no effect",
            id="screen of full logits",
        ),
        pytest.param(
            "loss: {filter: {eps: 2}}", "loss.filter.eps must be a probability", id="bound of eps"
        ),
        pytest.param(
            "loss: {softcap: -1}", "loss.softcap must be None or > 0, got -1.0", id="bound of loss"
        ),
        pytest.param("loss: {z_loss: x}", "loss.z_loss must be a valid number", id="loss number"),
        pytest.param("loss: {reduction: sum}", "unknown key loss.reduction;", id="job's option"),
        pytest.param(
            "loss: {workspace_mib: 0.01}",
            "loss.workspace_mib must be greater than or equal to 0.0625, got 0.01",
            id="workspace",
        ),
        *(
            pytest.param(text, f"{key} must be less than or equal to", id=f"huge {key}")
            for text, key in (
                ("loss: {workspace_mib: 1e308}", "loss.workspace_mib"),
                ("parallel: {timeout_s: 1e10}", "parallel.timeout_s"),
                ("optimizer: {lr: 1e38}", "optimizer.lr"),
                ("optimizer: {weight_decay: 1e38}", "optimizer.weight_decay"),
                (f"optimizer: {{warmup: {10**400}}}", "optimizer.warmup"),
                (f"model: {{layers: {10**400}}}", "model.layers"),
                (f"data: {{sequence_length: {10**4299}}}", "data.sequence_length"),
            )
        ),
        pytest.param("[1, 2]", "must hold a mapping of keys, got [1, 2]", id="list"),
        pytest.param("a: [1", "is not valid YAML", id="not YAML"),
        pytest.param("steps: 2020-13-45", "is not valid YAML: month must be in 1..12", id="date"),
        pytest.param("steps: !!bool foo", "is not valid YAML", id="tag"),
        pytest.param("[" * 5000, "is not valid YAML", id="brackets"),
        pytest.param(
            "optimizer: {lr: 0.01}\nsteps: 10\noptimizer: {warmup: 5}",
            "the key 'optimizer' must come once",
            id="a key twice",
        ),
        pytest.param("steps: 010", "010 must be a decimal number: YAML 1.1 reads it as 8", id="8"),
        pytest.param("steps: 1:30", "1:30 must be a decimal number: YAML 1.1 reads", id="60"),
        pytest.param("optimizer: {lr: 1:30.5}", "YAML 1.1 reads it as 90.5", id="60, fraction"),
    ],
)
def test_load_config_refuses(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert expected in str(caught.value)
    assert "config.yaml" in str(caught.value)


def test_load_config_reports_everything_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "steps: 0\nbatch: 0\nmodel: {heads: 0}")
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "  model.heads must be greater than or equal to 1, got 0",
        "  steps must be greater than or equal to 1, got 0",
        "  batch must be greater than or equal to 1, got 0",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ["exact"], "unexpected argument 'exact' after the config file", id="no option"
        ),
        pytest.param(["-s", "1"], "unexpected argument '-s': overrides are", id="short"),
        pytest.param(["--steps"], "--steps must be followed by a value", id="no value"),
        pytest.param(
            ["--steps.x", "1"],
            "--steps.x: steps must be a section, got the value 3",
            id="no section",
        ),
        pytest.param(["--steps", "["], "--steps is not valid YAML", id="not YAML"),
    ],
)
def test_parse_arguments_refuses(tmp_path: Path, arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "steps: 3", *arguments)
    assert expected in str(caught.value)


def test_parse_arguments_finds_the_file_anywhere() -> None:
    expected = Path("a.yaml"), [("steps", "300"), ("batch", "2")]
    for arguments in ("a.yaml --steps 300 --batch=2", "--steps 300 --batch=2 a.yaml"):
        assert parse_arguments(arguments.split()) == expected
    with pytest.raises(ConfigError, match=r"^CONFIG must be given, got only --steps 300: it is a"):
        parse_arguments(["--steps", "300"])


@pytest.mark.parametrize("command", [["train"], ["bench", "train"]], ids=" ".join)
def test_commands_ask_for_the_file(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--steps", "300"])
    assert done.exit_code == 2
    assert "CONFIG must be given, got only --steps 300" in done.output


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        inner = leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else None
        found |= {f"{prefix}{key}": value} if inner is None else inner
    return found


def test_train_help_lists_the_keys() -> None:
    said = CliRunner().invoke(app, ["train", "--help"]).output
    for row in (
        "--run.name [run] text: folder under run.out",
        "--parallel.tp [1] integer",
        "--loss.gradient [filtered] filtered, exact, in_forward",
        "--loss.filter.keep [auto] number or auto: mass in [0, 128] from which a column is kept",
        "--loss.z_loss [0.0] number",
        "--optimizer.betas [[0.9, 0.95]] list",
        "--model.tied [false] flag",
        "--log [null] tensorboard or null",
    ):
        assert row in " ".join(said.split())
    keys, defaults = dict(describe_keys()), leaves(TrainConfig().model_dump(mode="json"))
    assert keys.keys() == {f"--{key}" for key in defaults}
    shown = "".join(said.split())
    for key, default in defaults.items():
        option, text = f"--{key}", keys[f"--{key}"]
        assert "".join(f"{option}{text}".split()) in shown
        written = re.escape(json.dumps(default).replace('"', ""))
        # The meaning follows, and it is short.
        assert re.fullmatch(rf"\[{written}\] [\w, ]+: \S.{{5,110}}", text), (option, text)
    # The docs' table explains each key, too; keys in a row may share a prefix.
    table = (CONFIGS.parent.parent / "docs" / "guide" / "training.md").read_text()
    for key in keys:
        *_, last = key.removeprefix("--").split(".")
        assert f"{last}`" in table, key


def test_train_help_without_the_train_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cce_dist.train.config.load", None)
    done = CliRunner().invoke(app, ["train", "--help"])
    assert done.exit_code == 0 and "Keys: docs/guide/training.md; here too once " in done.output


@pytest.mark.parametrize("rank", [0, 1], ids=["main rank speaks", "others do not"])
def test_train_command_exits_with_2(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {dims: 8}")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    code, output = run_placed_training([place], path)
    assert code == 2
    assert ("model.dims" in output) == (rank == 0)
    assert "Traceback" not in output
