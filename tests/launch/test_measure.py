"""launch/measure.sh asks of the benchmark what it knows; nothing is measured here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from torch.distributed.run import get_args_parser

from cce_dist.cli import main as cli
from cce_dist.train.config.load import load_config, parse_arguments
from tests.launch.launch_jobs import ROOT, launch_environment

SCRIPT = ROOT / "launch" / "measure.sh"
# On PATH for python3 and torchrun: writes its arguments down, a line a call, and fails if asked.
# In one write: some run side by side.
STUB = """#!/bin/sh
line=$(basename "$0")$(printf "\\037%s" "$@")
printf "%s\\n" "$line" >> "$RECORD"
case "$*" in *"$FAIL"*) [ -z "$FAIL" ] ;; esac
"""


def parts(gpus: int) -> list[str]:
    one, several = re.findall(r"^    parts=\((.*)\)$", SCRIPT.read_text(), re.M)
    return (one if gpus == 1 else several).split()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    shutil.copy(SCRIPT, tmp_path / "launch")
    (tmp_path / "bin").mkdir()
    for name in ("python3", "torchrun"):
        (tmp_path / "bin" / name).write_text(STUB)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(
    copy: Path, *arguments: str, fail: str = "", **knobs: object
) -> tuple[Any, list[list[str]]]:
    """How it ended, and the commands that it gave: a program and its arguments each."""
    record = copy / "record"
    record.unlink(missing_ok=True)
    path = f"{copy / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = launch_environment(RECORD=record, FAIL=fail, **knobs) | {"PATH": path}
    command = ["launch/measure.sh", *arguments]
    done = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True)
    lines = record.read_text().splitlines() if record.exists() else []
    return done, [line.split("\x1f") for line in lines]


def bench_arguments(command: list[str], gpus: int) -> list[str]:
    """Of `cce-dist bench`, from how a program starts it."""
    program, *arguments = command
    if program == "python3":
        assert arguments[:3] == ["-m", "cce_dist", "bench"] and gpus == 1
        return arguments[3:]
    options = get_args_parser().parse_args(arguments)
    assert program == "torchrun" and options.standalone and options.nproc_per_node == str(gpus)
    assert (options.module, options.training_script) == (True, "cce_dist")
    first, *others = options.training_script_args
    assert first == "bench"
    return others


def parse(arguments: list[str]) -> Any:
    """By the benchmark's own parser, which refuses what it does not know."""
    group: Any = typer.main.get_command(cli.app)
    bench = group.commands["bench"]
    name, command, others = bench.resolve_command(bench.make_context("bench", arguments), arguments)
    return command.make_context(name, others)


@pytest.mark.parametrize("gpus", [1, 4])
def test_every_command_is_one_of_the_benchmark_s(copy: Path, gpus: int) -> None:
    done, commands = run(copy, GPUS=gpus, OUT="out", PEERS="peers")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1].strip(",") for line in done.stderr.splitlines()] == parts(gpus)
    tests = [command for command in commands if "pytest" in command]
    assert len(tests) == 1 and ("gpu and not multigpu" if gpus == 1 else "multigpu") in tests[0]
    contexts = [parse(bench_arguments(c, gpus)) for c in commands if c not in tests]
    named = {context.info_name for context in contexts}
    if gpus == 1:
        assert named == {"capture", "loss", "heads", "fidelity", "converge", "train"}
        slices = [c.params["work_slice"] for c in contexts if c.info_name == "converge"]
        # Three for all methods, and three for more seeds.
        assert sorted(slices) == ["0/3", "0/3", "1/3", "1/3", "2/3", "2/3"]
    else:
        assert named == {"ranks", "pipeline", "train"}
    for context in contexts:
        if context.info_name == "train":
            path, overrides = parse_arguments([context.params["config"], *context.args])
            config = load_config(ROOT / path, overrides)
            # Where peers are measured every rank has the whole head.
            assert config.parallel.tp == (1 if "liger" in context.params["loss"] else gpus)
    asked_peers = [
        c for c in contexts if "liger" in str(c.params) or c.params.get("peers") == "all"
    ]
    assert asked_peers and all(c.params["peer_path"] for c in asked_peers)


def test_a_part_takes_options_for_its_command(copy: Path) -> None:
    more = ["--vocab", "262144", "--start", "random", "--seeds", "9"]
    done, commands = run(copy, "converge", *more, OUT="out")
    assert done.returncode == 0, done.stderr
    assert len(commands) == 3
    for command in commands:
        found = parse(bench_arguments(command, 1)).params
        assert (found["vocab"], found["start"], found["seeds"]) == ([262144], ["random"], 9)
        assert not found["peer_path"]


def test_a_part_that_fails_keeps_none_back(copy: Path) -> None:
    done, commands = run(copy, OUT="out", fail="fidelity")
    assert done.returncode == 1 and done.stderr.endswith("measure: failed: fidelity\n")
    assert [c for c in commands if "fidelity" in c] and [c for c in commands if "train" in c]
    # As by itself, one of three runs side by side too.
    assert run(copy, "converge", OUT="out", fail="1/3")[0].returncode == 1


def test_a_part_that_is_none_is_refused(copy: Path) -> None:
    done, commands = run(copy, "pipelines", GPUS=4)
    assert done.returncode == 2 and commands == []
    assert done.stderr == (
        "measure: PART must be one of tests ranks pipeline train with GPUS=4, got pipelines\n"
    )


def test_a_part_that_takes_too_long_is_ended(copy: Path) -> None:
    (copy / "bin" / "python3").write_text("#!/bin/sh\nexec sleep 30\n")
    done, _ = run(copy, LIMIT=0.1, OUT="out")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"measure: failed: {' '.join(parts(1))}"
