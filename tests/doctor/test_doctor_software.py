"""Software and GPUs that the doctor finds, and their clashes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from cce_dist.doctor import software
from cce_dist.doctor.clashes import CLASHES, check_clashes
from cce_dist.doctor.facts import Facts, Gpu, numbers_of
from cce_dist.doctor.gpus import check_driver, check_gpus
from tests.doctor.doctor_facts import facts

ROOT = Path(__file__).parents[2]
H200 = Gpu("NVIDIA H200", "aaaa", 140 * 2**30, (9, 0))
V100 = Gpu("Tesla V100", "cccc", 32 * 2**30, (7, 0))
B200 = Gpu("NVIDIA B200", "bbbb", 178 * 2**30, (10, 0))


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
    assert (check.status, "libcudnn.so.9" in check.observed) == ("failure", True)


def test_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    assert software.check_torch().status == "failure"


@pytest.mark.parametrize("needed", [False, True], ids=["cpu", "gpu"])
def test_triton_that_is_absent(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ModuleNotFoundError("No module named 'triton'", name="triton")
    failing_import(monkeypatch, "triton", absent)
    check = software.check_triton(facts(gpus=(H200,) * needed))
    assert check.observed == "not installed"
    assert check.status == ("failure" if needed else "skipped")
    assert bool(check.remedy) == needed


def test_triton_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    failing_import(monkeypatch, "triton", ImportError("libtriton.so: undefined symbol"))
    check = software.check_triton(facts())
    assert (check.status, "undefined symbol" in check.observed) == ("failure", True)


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
    assert (check.status, "cannot load MPI library" in check.observed) == ("warning", True)
    monkeypatch.setattr(software, "ASK_MPI", "import time; time.sleep(60)")
    monkeypatch.setattr(software, "ASK_SECONDS", 0.1)
    assert "no answer" in software.check_mpi(facts(versions={"mpi4py": "4.1.2"})).observed


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
    assert (check.status, words in check.observed) == (status, True)


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
    assert (check.status, "NVIDIA H200, 140 GiB" in check.observed) == (status, True)
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
    names = [check.name for check in check_clashes(applies, pp)]
    assert names == (OF_ONE_TORCH if clash.name in OF_ONE_TORCH else [clash.name])
    (check,) = check_clashes(does_not, pp if "pipelines" not in clash.name else 1)
    assert (check.name, check.status) == ("clashes", "ok")
    assert not clash.applies(does_not, pp)
    document = (ROOT / "docs/guide/doctor.md").read_text()
    assert all(source in document for source in clash.source.split(", ") if "://" in source)
    assert clash.name in document
