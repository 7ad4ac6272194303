"""`cce-dist doctor` in one process: what it finds, when it fails, what it says."""

from __future__ import annotations

import importlib
import importlib.util
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

from cce_dist import local
from cce_dist.cli import app
from cce_dist.doctor import numerics, software
from cce_dist.doctor.check import Check, across_ranks, guarded, name_ranks
from cce_dist.doctor.clashes import CLASHES, check_clashes
from cce_dist.doctor.collectives import Measured, judge
from cce_dist.doctor.facts import Facts, Gpu, numbers_of, read_links
from cce_dist.doctor.gpus import check_driver, check_gpus
from cce_dist.doctor.links import Expected, Link, link_of
from cce_dist.testing import Place
from cce_dist.testing.places import TRITON_CUDA

ROOT = Path(__file__).parent.parent
H200 = Gpu("NVIDIA H200", "aaaa", 140 * 2**30, (9, 0))
V100 = Gpu("Tesla V100", "cccc", 32 * 2**30, (7, 0))
B200 = Gpu("NVIDIA B200", "bbbb", 178 * 2**30, (10, 0))


def facts(**changes: Any) -> Facts:
    return replace(Facts(host="node1", versions={"torch": "2.13.0"}), **changes)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    (check,) = [check for check in found["checks"] if check["name"] == name]
    return check


# -- the command --------------------------------------------------------------------------------


def test_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = Place("torch", "cpu", ("bf16", "fp32"))
    monkeypatch.setattr(numerics, "places", lambda facts: [place])
    path = tmp_path / "folder" / "found.json"
    done = run("--json", str(path), "--seconds", "50")
    assert done.exit_code == 0, done.output
    assert max(len(line) for line in done.output.splitlines()) <= 80
    found = json.loads(path.read_text())
    assert (found["exit_code"], found["ranks"]) == (0, 1)
    assert found["mesh"] == {"dp": 1, "pp": 1, "tp": 1}
    assert found["versions"]["torch"] == torch.__version__
    statuses = {check["name"]: check["status"] for check in found["checks"]}
    for dtype in place.dtypes:
        name = f"numerics torch {dtype}"
        assert statuses[name] == "ok"
        numbers = row(name, found)["numbers"]
        assert set(numbers["shares"]) == {"filtered", "exact", "in_forward"}
        outputs = {"loss", "lse", "grad_hidden", "grad_weight"}
        assert all(set(shares) == outputs for shares in numbers["shares"].values())
        assert 0 < numbers["share"] <= 1
    assert statuses["collectives"] == "skipped"
    assert len(found["by_rank"]) == 1


def test_prints_json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("--json", "-", "--seconds", "0")
    found = json.loads(done.output)
    assert row("numerics", found)["status"] == "skipped"
    keys = {"name", "status", "found", "expected", "remedy", "numbers"}
    assert all(set(check) == keys for check in found["checks"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("--tp", "0"), "--tp must be >= 1, got 0", id="tp"),
        pytest.param(("--tp", "2"), "must divide the number of ranks", id="too few ranks"),
        pytest.param(("--dtype", "int8"), "--dtype must be one of", id="dtype"),
        pytest.param(("--seconds", "-1"), "--seconds must be >= 0", id="seconds"),
        pytest.param(("--timeout", "nan"), "--timeout must be > 0", id="timeout"),
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
    found = json.loads(done.stdout)
    assert row("torch", found)["status"] == "failure"
    assert row("torch", found)["remedy"]
    assert row("numerics", found)["status"] == row("ranks", found)["status"] == "skipped"


def test_names_need_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import cce_dist\n"
        "try:\n    from cce_dist import linear_cross_entropy\n"
        "except ImportError as error:\n    assert error.__cause__.name == 'torch', error\n"
        "else:\n    raise SystemExit(1)\n"
        "assert not hasattr(cce_dist, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# -- software and GPUs --------------------------------------------------------------------------


def failing_import(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    real = importlib.import_module

    def import_module(module: str, package: str | None = None) -> Any:
        if module == name:
            raise error
        return real(module, package)

    monkeypatch.setattr(importlib, "import_module", import_module)


def test_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_import(monkeypatch, "torch", OSError("libcudnn.so.9: cannot open shared object file"))
    check = software.check_torch()
    assert (check.status, "libcudnn.so.9" in check.found) == ("failure", True)


def test_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    assert software.check_torch().status == "failure"


@pytest.mark.parametrize("needed", [False, True], ids=["cpu", "gpu"])
def test_triton_that_is_absent(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check = software.check_triton(needed=needed)
    assert check.status == ("failure" if needed else "skipped")
    assert bool(check.remedy) == needed


def test_triton_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    failing_import(monkeypatch, "triton", ImportError("libtriton.so: undefined symbol"))
    check = software.check_triton(needed=False)
    assert (check.status, "undefined symbol" in check.found) == ("failure", True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param("Open MPI v5.0.11, package: Open MPI x", "Open MPI 5.0.11", id="openmpi"),
        pytest.param("MPICH Version:      5.0.2\nMPICH Release", "MPICH 5.0.2", id="mpich"),
        pytest.param(
            "Intel(R) MPI Library 2021.18 for Linux* OS", "Intel(R) MPI Library 2021.18", id="intel"
        ),
        pytest.param("", "unnamed", id="nothing"),
    ],
)
def test_library_of(text: str, name: str) -> None:
    assert software.library_of(text) == name


def test_mpi_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "raise RuntimeError('cannot load MPI library')"
    monkeypatch.setattr(software, "ASK_MPI", code)
    check = software.check_mpi(facts(versions={"mpi4py": "4.1.2"}))
    assert (check.status, "cannot load MPI library" in check.found) == ("warning", True)
    monkeypatch.setattr(software, "ASK_MPI", "import time; time.sleep(60)")
    monkeypatch.setattr(software, "ASK_SECONDS", 0.1)
    assert "no answer" in software.check_mpi(facts(versions={"mpi4py": "4.1.2"})).found


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.13.1", "warning"), ("0.14.0", "ok"), ("0.19.2", "ok"), ("0.20.0", "warning")],
)
def test_megatron(version: str, status: str) -> None:
    assert software.check_megatron(facts(versions={"megatron-core": version})).status == status


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        pytest.param({}, "skipped", id="none"),
        pytest.param({"driver": "580.1", "cuda": "13.0", "gpus": (H200,)}, "ok", id="new enough"),
        pytest.param({"cuda": "13.0", "gpus": (H200,)}, "warning", id="no nvidia-smi"),
        pytest.param({"driver": "570.1", "cuda": "13.0"}, "failure", id="too old"),
        pytest.param({"driver": "570.1", "cuda": "13.0", "gpus": (H200,)}, "warning", id="forward"),
        pytest.param({"driver": "535.1", "cuda": "12.9", "gpus": (H200,)}, "ok", id="minor"),
        pytest.param({"driver": "535.1"}, "ok", id="torch for the CPU"),
    ],
)
def test_driver(changes: dict[str, Any], status: str) -> None:
    assert check_driver(facts(**changes)).status == status


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        pytest.param({}, "skipped", "none", id="no driver"),
        pytest.param({"driver": "580.1"}, "failure", "has no CUDA", id="CPU build"),
        pytest.param(
            {"driver": "580.1", "environment": {"CUDA_VISIBLE_DEVICES": ""}},
            "skipped",
            "hidden by",
            id="hidden",
        ),
        pytest.param(
            {"driver": "580.1", "cuda": "13.0", "why_no_gpu": "driver too old"},
            "failure",
            "driver too old",
            id="not usable",
        ),
    ],
)
def test_gpus(changes: dict[str, Any], status: str, words: str) -> None:
    check = check_gpus(facts(**changes))
    assert (check.status, words in check.found) == (status, True)


@pytest.mark.parametrize(
    ("gpus", "status", "remedy"),
    [
        pytest.param((H200, H200), "ok", "", id="alike"),
        pytest.param((H200, B200), "warning", "sets the pace", id="different"),
        pytest.param((H200, V100), "warning", "eager torch", id="too old"),
    ],
)
def test_gpus_that_are_there(gpus: tuple[Gpu, ...], status: str, remedy: str) -> None:
    check = check_gpus(facts(gpus=gpus, driver="580.1", cuda="13.0"))
    assert (check.status, "NVIDIA H200, 140 GiB" in check.found) == (status, True)
    assert remedy in check.remedy
    assert software.check_nccl(facts(gpus=gpus)).status == "failure"
    assert software.check_nccl(facts(gpus=gpus, nccl="2.27.5")).status == "ok"
    assert software.check_interpreter(facts(gpus=gpus)).status == "ok"
    interpreted = facts(gpus=gpus, environment={"TRITON_INTERPRET": "1"})
    assert software.check_interpreter(interpreted).status == "warning"


def test_numbers_of() -> None:
    assert numbers_of("2.13.0+cu130") == (2, 13, 0)
    assert numbers_of("2.15.0a0+git12") == (2, 15, 0)
    assert numbers_of("main") is None


# -- clashes ------------------------------------------------------------------------------------

INTERPRETS = {"TRITON_INTERPRET": "1"}
# The same facts are two clashes.
OF_ONE_TORCH = [
    "torch's pipelines: a step after an eval",
    "torch's pipelines: zero-bubble schedules",
]
# Of each clash, facts that it applies to and facts that it just does not; pipeline ranks.
SITUATIONS: dict[str, tuple[Facts, Facts, int]] = {
    "Triton's interpreter and NumPy 2.4": (
        facts(versions={"triton": "3.6.0", "numpy": "2.4.0"}, environment=INTERPRETS),
        facts(versions={"triton": "3.7.1", "numpy": "2.4.6"}, environment=INTERPRETS),
        1,
    ),
    "torch's pipelines: a step after an eval": (
        facts(versions={"torch": "2.11.0+cu130"}),
        facts(versions={"torch": "2.13.0"}),
        2,
    ),
    "torch's pipelines: zero-bubble schedules": (
        facts(versions={"torch": "2.12.0+cu130"}),
        facts(versions={"torch": "2.13.0"}),
        2,
    ),
    "torch's pipelines: ZBV's eval": (
        facts(versions={"torch": "2.13.1"}),
        facts(versions={"torch": "2.12.0"}),
        2,
    ),
    "torchrun's restarts and the store": (
        facts(environment={"TORCHELASTIC_MAX_RESTARTS": "3"}),
        facts(
            environment={
                "TORCHELASTIC_MAX_RESTARTS": "3",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
        ),
        1,
    ),
    "Megatron-FSDP 0.14 and torch 2.13": (
        facts(versions={"megatron-core": "0.14.0", "torch": "2.13.0"}),
        facts(versions={"megatron-core": "0.15.3", "torch": "2.13.0"}),
        1,
    ),
    "Megatron and CUDA_DEVICE_MAX_CONNECTIONS": (
        facts(versions={"megatron-core": "0.16.1"}, gpus=(H200,)),
        facts(versions={"megatron-core": "0.16.1"}, gpus=(B200,)),
        1,
    ),
    "NCCL's settings for debugging": (
        facts(gpus=(H200,), environment={"NCCL_P2P_DISABLE": "1"}),
        facts(gpus=(H200,), environment={"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "INFO"}),
        1,
    ),
}


@pytest.mark.parametrize("clash", CLASHES, ids=lambda clash: clash.name)
def test_clashes(clash: Any) -> None:
    applies, does_not, pp = SITUATIONS[clash.name]
    found = [check.name for check in check_clashes(applies, pp)]
    assert found == (OF_ONE_TORCH if clash.name in OF_ONE_TORCH else [clash.name])
    (check,) = check_clashes(does_not, pp if "pipelines" not in clash.name else 1)
    assert (check.name, check.status) == ("clashes", "ok")
    assert not clash.applies(does_not, pp)
    document = (ROOT / "docs/doctor.md").read_text()
    assert all(source in document for source in clash.source.split(", ") if "://" in source)
    assert clash.name in document


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
    assert check.found == "exact: RuntimeError: out of resources: shared memory"


def test_what_has_no_time_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of_place(Place("torch", "cpu", ("fp32",)), monkeypatch, "exact", "in_forward")
    (check,) = numerics.check_numerics(facts(), 1e-9)
    assert (check.status, check.numbers["not_started"]) == ("skipped", ["exact", "in_forward"])
    assert check.remedy == "--seconds 60, or fewer other processes"
    # Kernels alone leave something behind.
    place = replace(TRITON_CUDA, dtypes=("fp32",))
    of_place(place, monkeypatch, "exact")
    (check,) = numerics.check_numerics(facts(), 1e-9)
    assert check.remedy == "--seconds 60; what was compiled is kept"


@pytest.mark.interpreter
def test_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    places = numerics.places(facts(versions={"triton": "3.7.1"}))
    assert [str(place) for place in places] == ["torch_cpu", "triton_cpu"]
    of_place(Place("triton", "cpu", ("fp32",)), monkeypatch, "exact")
    (check,) = numerics.check_numerics(facts(), 50.0)
    assert (check.name, check.status) == ("numerics interpreted fp32", "ok")


# -- several ranks' findings --------------------------------------------------------------------


def check_of(status: Any, found: str = "", **numbers: float) -> Check:
    return Check(name="x", status=status, found=found, numbers=numbers)


def test_across_ranks() -> None:
    ok, slow = check_of("ok", "a", share=0.1), check_of("ok", "b", share=0.2)
    assert across_ranks([[ok], [ok]]) == [ok]
    assert across_ranks([[ok], [slow]])[0].found == "b (worst: rank 1)"
    bad = check_of("failure", "broken")
    (joined,) = across_ranks([[ok], [bad], [bad], [slow], [bad]])
    assert (joined.status, joined.found) == ("failure", "ranks 1-2, 4: broken")
    (only_one,) = across_ranks([[ok], []])
    assert only_one.found == "rank 0: a"
    many = [[check_of("failure", str(rank))] for rank in range(9)]
    assert across_ranks(many)[0].found.endswith("... and 5 more")
    skipped = check_of("skipped", "none")
    assert across_ranks([[skipped], [skipped]])[0].status == "skipped"


def test_name_ranks() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


def test_guarded() -> None:
    def broken() -> list[Check]:
        raise KeyError("surprise")

    (check,) = guarded("name", broken)
    assert (check.status, check.found) == ("failure", "KeyError: 'surprise'")


# -- links and what they should reach -----------------------------------------------------------

TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\tNODE\t0-31\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-31\t0
GPU2\tPIX\tSYS\t X \tNODE\t0-31\t0
NIC0\tNODE\tNODE\tNODE\t X

Legend:

  X    = Self
"""


def test_read_links() -> None:
    found = read_links(TOPOLOGY, "0, GPU-c\n1, GPU-a\n2, GPU-b\n")
    assert found == {("a", "c"): "NV18", ("b", "c"): "PIX", ("a", "b"): "SYS"}
    assert read_links("", "") == {}


def member(gpu: str | None, **changes: Any) -> dict[str, Any]:
    links = [["a", "b", "NV18"], ["a", "c", "NV18"], ["b", "c", "NV18"], ["a", "d", "PIX"]]
    return {"host": "node1", "gpu": gpu, "capability": [9, 0], "links": links} | changes


@pytest.mark.parametrize(
    ("members", "kind", "expects"),
    [
        pytest.param([member("b"), member("a")], "NVLink, 18 links", True, id="nvlink"),
        pytest.param(
            [member(x, capability=[10, 0]) for x in "ab"], "NVLink, 18", False, id="unmeasured"
        ),
        pytest.param([member("a"), member("d")], "PCIe", False, id="pcie"),
        pytest.param([member("a"), member("z")], "unknown", False, id="unknown"),
        pytest.param([member("a"), member("b", host="node2")], "network", False, id="two hosts"),
        pytest.param([member(None), member(None)], "gloo", True, id="gloo"),
        pytest.param([member(None)] * 4, "gloo", False, id="more ranks than cores"),
    ],
)
def test_link_of(members: list[dict[str, Any]], kind: str, expects: bool) -> None:
    link = link_of(members, cores=2)
    assert kind in link.kind
    assert (link.expected is not None) == expects


LINK = Link("a link", Expected(100e9, {2: 50e-6}, "somewhere"), "do this")


@pytest.mark.parametrize(
    ("seconds", "link", "bandwidth", "status", "expected"),
    [
        pytest.param(2e-3, LINK, None, "ok", 1.05e-3, id="within twice"),
        pytest.param(2.2e-3, LINK, None, "warning", 1.05e-3, id="slower"),
        pytest.param(2.2e-3, LINK, 30e9, "ok", 50e-6 + 1e8 / 30e9, id="as given"),
        pytest.param(9.0, Link("unknown"), None, "ok", None, id="nothing known"),
        pytest.param(
            2.3e-3,
            Link("another", Expected(100e9, {}, "somewhere")),
            None,
            "warning",
            1.1e-3,
            id="on top of the smallest",
        ),
    ],
)
def test_judge(
    seconds: float, link: Link, bandwidth: float | None, status: str, expected: float | None
) -> None:
    measured = Measured(lambda: None, lambda: True, 1e8, 1, "all-reduce")
    check = judge("sum", measured, 2, seconds, 1e-4, link, bandwidth)
    assert check.status == status
    assert check.numbers["expected_seconds"] == (pytest.approx(expected) if expected else None)
    assert check.numbers["bus_bytes_per_second"] == pytest.approx(1e8 / seconds)


def test_a_small_collective_has_no_figure_where_none_is_known() -> None:
    measured = Measured(lambda: None, lambda: True, 4.0, 1, "all-gather")
    link = Link("another", Expected(100e9, {}, "somewhere"))
    assert judge("latency", measured, 2, 1e-3, 1e-3, link, None).numbers["expected_seconds"] is None


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
