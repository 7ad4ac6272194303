"""`cce-dist doctor` in one process: the command, its numerics, what it says of several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cce_dist.backends import choose as local
from cce_dist.cli.main import app
from cce_dist.doctor import numerics, software
from cce_dist.doctor.check import Check, across_ranks, guarded, name_ranks
from cce_dist.testing import Place
from cce_dist.testing.places import TRITON_CUDA
from tests.doctor.doctor_facts import facts, row

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


# -- the command --------------------------------------------------------------------------------


def test_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = Place("torch", "cpu", ("bf16", "fp32"))
    monkeypatch.setattr(numerics, "places", lambda facts: [place])
    path = tmp_path / "folder" / "found.json"
    done = run("--json", str(path), "--seconds", "50")
    assert done.exit_code == 0, done.output
    assert max(len(line) for line in done.output.splitlines()) <= 80
    report = json.loads(path.read_text())
    assert (report["exit_code"], report["ranks"]) == (0, 1)
    assert report["mesh"] == {"dp": 1, "pp": 1, "tp": 1}
    assert report["versions"]["torch"] == torch.__version__
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    for dtype in place.dtypes:
        name = f"numerics torch {dtype}"
        assert statuses[name] == "ok"
        numbers = row(name, report)["numbers"]
        assert set(numbers["shares"]) == {"filtered", "exact", "in_forward"}
        outputs = {"loss", "lse", "grad_hidden", "grad_weight"}
        assert all(set(shares) == outputs for shares in numbers["shares"].values())
        assert 0 < numbers["share"] <= 1
    assert statuses["collectives"] == "skipped"
    assert len(report["by_rank"]) == 1


def test_prints_json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("--json", "-", "--seconds", "0")
    report = json.loads(done.output)
    assert row("numerics", report)["status"] == "skipped"
    keys = {"name", "status", "found", "expected", "remedy", "numbers"}
    assert all(set(check) == keys for check in report["checks"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--tp", "0"), "--tp must be >= 1, got 0", id="tp"),
        pytest.param(("--tp", "2"), "must divide the number of ranks", id="too few ranks"),
        pytest.param(("--dtype", "int8"), "--dtype must be one of", id="dtype"),
        pytest.param(("--seconds", "-1"), "--seconds must be >= 0", id="seconds"),
        pytest.param(("--timeout", "nan"), "--timeout must be > 0", id="timeout"),
        pytest.param(
            ("--timeout", "1e10"), "at most 1000000000 seconds, got 10000000000.0", id="years"
        ),
        pytest.param(("--bandwidth", "0"), "--bandwidth must be > 0", id="bandwidth"),
        pytest.param(("--tokens", "many"), "", id="no number"),
    ],
)
def test_refuses(arguments: tuple[str, ...], message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(software, "ASK_MPI", "print('Open MPI v5')")
    done = run(*arguments, "--seconds", "0") if arguments[0] != "--seconds" else run(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_refuses_half_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("--seconds", "0")
    assert done.exit_code == 2
    assert "RANK must be set beside WORLD_SIZE" in done.output


def test_without_torch() -> None:
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = ['doctor', '--json', '-'];"
        "runpy.run_module('cce_dist', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert row("torch", report)["status"] == "failure"
    assert row("torch", report)["remedy"]
    assert row("numerics", report)["status"] == row("ranks", report)["status"] == "skipped"


def test_names_need_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import cce_dist\n"
        "try:\n    from cce_dist import linear_cross_entropy\n"
        "except ImportError as error:\n    assert error.__cause__.name == 'torch', error\n"
        "else:\n    raise SystemExit(1)\n"
        "assert not hasattr(cce_dist, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# -- numerics -----------------------------------------------------------------------------------


def of_place(place: Place, monkeypatch: pytest.MonkeyPatch, *gradients: str) -> None:
    monkeypatch.setattr(numerics, "places", lambda facts: [place])
    monkeypatch.setattr(numerics, "GRADIENTS", gradients)


def test_wrong_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = local.TORCH.backward

    def backward(*args: Any) -> Any:
        found = real(*args)
        return replace(found, hidden=found.hidden * 1.001)

    monkeypatch.setattr(local.TORCH, "backward", backward)
    of_place(Place("torch", "cpu", ("fp32",)), monkeypatch, "exact")
    done = run("--json", "-", "--seconds", "50")
    assert done.exit_code == 1
    check = row("numerics torch fp32", json.loads(done.output))
    assert check["status"] == "failure"
    assert "grad_hidden: gate, rms err" in check["found"]
    assert check["numbers"]["failed"] == ["exact"]


def test_broken_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*args: Any) -> Any:
        raise RuntimeError("out of resources: shared memory\nand a page of frames")

    monkeypatch.setattr(local.TORCH, "forward", forward)
    of_place(Place("torch", "cpu", ("fp32",)), monkeypatch, "exact")
    (check,) = numerics.check_numerics(facts(), 50.0)
    assert check.status == "failure"
    assert check.observed == "exact: RuntimeError: out of resources: shared memory"


def test_what_has_no_time_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of_place(Place("torch", "cpu", ("fp32",)), monkeypatch, "exact", "in_forward")
    (check,) = numerics.check_numerics(facts(), 1e-9)
    assert (check.status, check.numbers["not_started"]) == ("skipped", ["exact", "in_forward"])
    assert check.remedy == "--seconds 60, or fewer other processes"
    # Kernels alone leave something behind.
    place = replace(TRITON_CUDA, dtypes=("fp32",))
    of_place(place, monkeypatch, "exact")
    (check,) = numerics.check_numerics(facts(), 1e-9)
    assert check.remedy == "--seconds 60; compiled kernels are kept"


@pytest.mark.interpreter
def test_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    places = numerics.places(facts(versions={"triton": "3.7.1"}))
    assert [str(place) for place in places] == ["torch_cpu", "triton_cpu"]
    of_place(Place("triton", "cpu", ("fp32",)), monkeypatch, "exact")
    (check,) = numerics.check_numerics(facts(), 50.0)
    assert (check.name, check.status) == ("numerics interpreted fp32", "ok")


# -- several ranks' findings --------------------------------------------------------------------


def check_of(status: Any, found: str = "", **numbers: float) -> Check:
    return Check(name="x", status=status, observed=found, numbers=numbers)


def test_across_ranks() -> None:
    ok, slow = check_of("ok", "a", share=0.1), check_of("ok", "b", share=0.2)
    assert across_ranks([[ok], [ok]]) == [ok]
    assert across_ranks([[ok], [slow]])[0].observed == "b (worst: rank 1)"
    bad = check_of("failure", "broken")
    (joined,) = across_ranks([[ok], [bad], [bad], [slow], [bad]])
    assert (joined.status, joined.observed) == ("failure", "ranks 1-2, 4: broken")
    (only_one,) = across_ranks([[ok], []])
    assert only_one.observed == "rank 0: a"
    many = [[check_of("failure", str(rank))] for rank in range(9)]
    assert across_ranks(many)[0].observed.endswith("... and 5 more")
    skipped = check_of("skipped", "none")
    assert across_ranks([[skipped], [skipped]])[0].status == "skipped"


def test_name_ranks() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


def test_guarded() -> None:
    def broken() -> list[Check]:
        raise KeyError("surprise")

    (check,) = guarded("name", broken)
    assert (check.status, check.observed) == ("failure", "KeyError: 'surprise'")


# -- on GPUs ------------------------------------------------------------------------------------


def on_gpus(*launcher: str) -> dict[str, Any]:
    """What the doctor finds in processes of its own, with kernels compiled."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_DEVICE_MAX_CONNECTIONS="1")
    environment.pop("TRITON_INTERPRET", None)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "cce_dist", "doctor", "--seconds", "200", "--json", "-"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    found["seconds"] = time.monotonic() - started
    for name in ("driver", "GPUs", "NCCL", "triton", "devices", "software", "clashes"):
        assert row(name, found)["status"] == "ok", row(name, found)
    for dtype in ("bf16", "fp16", "fp32"):
        check = row(f"numerics triton {dtype}", found)
        assert check["status"] == "ok", check
        assert 0 < check["numbers"]["share"] <= 1
    return found


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    found = on_gpus()
    if found["seconds"] >= 60:
        # The first time kernels are compiled, which is kept.
        found = on_gpus()
    assert found["seconds"] < 60, found


@pytest.mark.multigpu
@pytest.mark.timeout(250)
def test_on_two_gpus() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = on_gpus(*launcher)
    assert found["mesh"] == {"dp": 1, "pp": 1, "tp": 2}
    for what in ("latency", "merge", "sum"):
        check = row(f"{what}, tp 2", found)
        # A machine that others use too may be slow; wrong it may not be.
        assert check["status"] in ("ok", "warning"), check
        assert 0 < check["numbers"]["seconds"] < 1
