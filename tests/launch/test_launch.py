"""What the files in launch/ start, and what they call their knobs; nothing is trained here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from cce_dist.cli import main as cli
from cce_dist.train.config.load import load_config, parse_arguments
from cce_dist.train.config.schema import TrainConfig
from tests.launch.launch_jobs import ROOT, launch_environment

LAUNCH = ROOT / "launch"
# Whoever knows one of them knows all.
KNOBS = {"NODES", "GPUS", "TP", "PP", "CONFIG"}
WITHOUT = {
    "local.sh": {"NODES"},
    "megatron.sh": {"CONFIG"},
    # Tasks and nodes are sbatch's.
    "slurm-srun.sbatch": {"NODES", "GPUS"},
}
# Not of the job: how this package or Megatron is set up.
OTHERS = {"PYTHON", "RANKS", "OMP_NUM_THREADS", "PYRIGHT_PYTHON_IGNORE_WARNINGS", "PATH"}
OTHERS |= {"MEGATRON_PATCH_GRADIENT", "CUDA_DEVICE_MAX_CONNECTIONS"}
OTHERS |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
LAUNCHERS = ("local.sh", "nodes.sh", "slurm-torchrun.sbatch", "slurm-srun.sbatch", "mpi.sh")
LAUNCHERS += ("megatron.sh", "k8s-trainjob.yaml", "k8s-jobset.yaml", "sky.yaml")


def shell_scripts() -> list[str]:
    found = [*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")]
    return sorted(path.name for path in found)


def test_scripts_are_clean() -> None:
    binary = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert binary is not None, "shellcheck comes with the extra `test`"
    scripts = [*shell_scripts(), "../tests/megatron/releases.sh"]
    done = subprocess.run([binary, *scripts], cwd=LAUNCH, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", shell_scripts())
def test_scripts_can_be_started(name: str) -> None:
    path = LAUNCH / name
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert name.endswith(".sbatch") or path.stat().st_mode & 0o111


def knobs(name: str) -> set[str]:
    text = (LAUNCH / name).read_text()
    if name.endswith(".yaml"):
        names = re.findall(
            r"\{name: ([A-Z_]+), value|name: ([A-Z_]+)$|# ([A-Z_]+)$|&([A-Z_]+) ", text, re.M
        )
        found = {part for parts in names for part in parts if part}
        found |= set(re.findall(r"^  ([A-Z_]+):", text, re.M))
        return found | set(re.findall(r"\b([A-Z_]+)=", text))
    assigned = re.findall(r"^(?:export )?([A-Z_]+)=", text, re.M)
    return {*assigned, *re.findall(r"^: \"\$\{([A-Z_]+):\?", text, re.M)} - OTHERS


@pytest.mark.parametrize("name", LAUNCHERS)
def test_knobs_have_the_same_names_everywhere(name: str) -> None:
    found = knobs(name)
    assert found >= KNOBS - WITHOUT.get(name, set())
    table = (ROOT / "docs" / "guide" / "launch.md").read_text(encoding="utf8")
    first_cells = re.findall(r"^\| (`[A-Z_`, ]+`) \|", table, re.M)
    assert found <= set(re.findall(r"[A-Z_]+", " ".join(first_cells)))


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A copy of launch/, and on its PATH launchers that only write down their arguments."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    (tmp_path / "bin").mkdir()
    for name in ("torchrun", "mpirun", "pip"):
        stub = tmp_path / "bin" / name
        stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$RECORD/$(basename "$0")"\n')
        stub.chmod(0o755)
    return tmp_path


def started(recorder: Path, launcher: str, *command: str, **environment: object) -> list[str]:
    """The arguments that `launcher` got from a command in the copy."""
    path = f"{recorder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = launch_environment(RECORD=recorder, **environment) | {"PATH": path}
    done = subprocess.run(command, cwd=recorder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (recorder / launcher).read_text().splitlines()


def trained_config(arguments: list[str]) -> TrainConfig:
    """What `cce-dist` would train when called so; its options are parsed by itself."""
    group: Any = typer.main.get_command(cli.app)
    assert arguments[0] == "train"
    context = group.commands["train"].make_context("train", arguments[1:])
    path, overrides = parse_arguments([context.params["config"], *context.args])
    return load_config(ROOT / path, overrides)


def torchrun_config(arguments: list[str]) -> tuple[Any, TrainConfig]:
    """torchrun's options, parsed by itself, and what each rank trains."""
    options = get_args_parser().parse_args(arguments)
    assert options.module and options.training_script == "cce_dist"
    return options, trained_config(options.training_script_args)


def test_local(recorder: Path) -> None:
    arguments = started(recorder, "torchrun", "launch/local.sh", "--steps", "7", GPUS=4, TP=2, PP=2)
    options, config = torchrun_config(arguments)
    assert options.standalone and options.nproc_per_node == "4"
    assert (config.parallel.tp, config.parallel.pp, config.steps) == (2, 2, 7)


def test_knobs_that_are_not_given_are_the_config_s(recorder: Path) -> None:
    config = "launch/configs/pipeline-tp.yaml"
    arguments = started(recorder, "torchrun", "launch/local.sh", CONFIG=config)
    options, trained = torchrun_config(arguments)
    assert options.nproc_per_node == "8" and trained == load_config(ROOT / config)


def test_nodes(recorder: Path) -> None:
    where = {"HEAD": "first", "PORT": 1234, "NODE_RANK": 1, "ADDRESS": "10.0.0.2"}
    command = ("launch/nodes.sh", "--resume")
    arguments = started(recorder, "torchrun", *command, NODES="1:2", TP=8, RESTARTS=3, **where)
    options, config = torchrun_config(arguments)
    assert (options.nnodes, options.rdzv_backend, options.max_restarts) == ("1:2", "c10d", 3)
    assert (options.rdzv_endpoint, options.rdzv_conf[:9]) == ("first:1234", "is_host=0")
    assert options.local_addr == "10.0.0.2"
    assert "--resume" in options.training_script_args and config.parallel.tp == 8


@pytest.mark.parametrize("missing", ["HEAD", "NODE_RANK"])
def test_nodes_says_what_it_needs(recorder: Path, missing: str) -> None:
    known = {"HEAD": "first", "NODE_RANK": "0"}
    known.pop(missing)
    environment = {"PATH": os.environ["PATH"], **known}
    command = [str(recorder / "launch" / "nodes.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and re.search(rf"{missing}: .*(name|0 on HEAD)", done.stderr)


def test_mpi(recorder: Path) -> None:
    where = {"NODES": 2, "GPUS": 4, "HOSTS": "a:4,b:4"}
    arguments = started(recorder, "mpirun", "launch/mpi.sh", TP=4, PP=2, **where)
    assert arguments[:4] == ["-host", "a:4,b:4", "-n", "8"]
    # An exception must end all ranks, which is what mpi4py's runner is for.
    assert arguments[4:9] == ["python", "-m", "mpi4py", "-m", "cce_dist"]
    config = trained_config(arguments[9:])
    assert (config.parallel.tp, config.parallel.pp) == (4, 2)


def test_megatron(recorder: Path) -> None:
    command = ("launch/megatron.sh", "pretrain_gpt.py", "--num-layers", "24")
    where = {"NODES": 2, "NODE_RANK": 1, "HEAD": "first"}
    options = get_args_parser().parse_args(started(recorder, "torchrun", *command, TP=4, **where))
    assert options.module and options.training_script == "megatron_patch"
    assert (options.nnodes, options.node_rank, options.master_addr) == ("2", 1, "first")
    script, *arguments = options.training_script_args
    assert script == "pretrain_gpt.py"
    assert arguments == ["--tensor-model-parallel-size", "4", "--num-layers", "24"]


def read_yaml(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def in_container(container: Any) -> list[str]:
    """Its command, where /shared/cce_dist is the copy."""
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    assert script.startswith("cd /shared/cce_dist\n")
    return ["bash", "-ec", script.partition("\n")[2]]


def test_trainjob(recorder: Path) -> None:
    trainer = read_yaml("k8s-trainjob.yaml")["spec"]["trainer"]
    environment = {item["name"]: item["value"] for item in trainer["env"]}
    options, config = torchrun_config(
        started(recorder, "torchrun", *in_container(trainer), **environment)
    )
    # Kubeflow says all else in PET_* variables, which options would override.
    assert options == torchrun_options_of("-m", "cce_dist", *options.training_script_args)
    gpus = trainer["numProcPerNode"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == gpus
    check_world(config, environment, trainer["numNodes"] * gpus)
    assert ".[train]" in (recorder / "pip").read_text()


def torchrun_options_of(*arguments: str) -> Any:
    return get_args_parser().parse_args(arguments)


def check_world(config: TrainConfig, environment: dict[str, str], num_ranks: int) -> None:
    parallel = config.parallel
    assert (parallel.tp, parallel.pp) == (int(environment["TP"]), int(environment["PP"]))
    assert num_ranks % (parallel.tp * parallel.pp) == 0
    assert environment["CONFIG"] == "launch/configs/gpus.yaml"


def test_jobset(recorder: Path) -> None:
    (replicated,) = read_yaml("k8s-jobset.yaml")["spec"]["replicatedJobs"]
    (train,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    # What JobSet writes on each pod, here of the second node.
    written = {
        "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-replicas']": "2",
        "metadata.annotations['jobset.sigs.k8s.io/job-index']": "1",
        "status.podIP": "10.0.0.2",
    }
    environment = {
        item["name"]: item.get("value") or written[item["valueFrom"]["fieldRef"]["fieldPath"]]
        for item in train["env"]
    }
    options, config = torchrun_config(
        started(recorder, "torchrun", *in_container(train), **environment)
    )
    assert options.nnodes == "2" and options.nproc_per_node == environment["GPUS"]
    assert options.rdzv_endpoint == "cce-dist-node-0-0.cce-dist:29500"
    assert (options.rdzv_conf[:9], options.local_addr) == ("is_host=0", "10.0.0.2")
    assert train["resources"]["limits"]["nvidia.com/gpu"] == environment["GPUS"]
    check_world(config, environment, replicated["replicas"] * int(environment["GPUS"]))


def test_sky(recorder: Path) -> None:
    document = read_yaml("sky.yaml")
    assert shlex.split(document["setup"]) == ["./launch/setup.sh", "train"]
    environment = document["envs"]
    # What SkyPilot sets on each node, here on the first one.
    given = {
        "NUM_NODES": 2,
        "NUM_GPUS_PER_NODE": 8,
        "NODE_RANK": 0,
        "NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    sky = {f"SKYPILOT_{name}": value for name, value in given.items()}
    arguments = started(recorder, "torchrun", "bash", "-ec", document["run"], **environment, **sky)
    options, config = torchrun_config(arguments)
    assert (options.nnodes, options.nproc_per_node) == ("2", "8")
    assert options.rdzv_conf.startswith("is_host=1,")
    assert options.rdzv_endpoint == "10.0.0.1:29500"
    assert config.run.out == Path("/shared/runs") and config.data.cache.is_relative_to("/shared")
    check_world(config, environment, document["num_nodes"] * 8)
