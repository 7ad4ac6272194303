"""Checks of Python, torch, Triton, NumPy, NCCL, MPI and Megatron: installed, of a good version."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import subprocess
import sys
from typing import Any

from cce_dist.doctor.check import Check, make_check
from cce_dist.doctor.facts import Facts, dotted, numbers_of
from cce_dist.train.errors import first_line

LEAST_PYTHON = (3, 10)
LEAST_TORCH = (2, 8)
# The versions that the tests passed with: docs/guide/megatron.md.
MEGATRON = ((0, 14), (0, 19))
# Code for another process: importing mpi4py.MPI in this one would start MPI.
ASK_MPI = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI;"
    "print(MPI.Get_library_version())"
)
ASK_SECONDS = 30.0
ABSENT = "not installed"


def _import(name: str) -> tuple[Any, str]:
    """Returns a module and no text; or None, and the reason why it cannot be imported."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        return None, ABSENT if missing else f"cannot be imported: {first_line(error)}"


def check_python() -> Check:
    return make_check(
        "python",
        sys.version_info >= LEAST_PYTHON,
        platform.python_version(),
        expected=f">= {dotted(LEAST_PYTHON)}",
        remedy="make the environment with a newer Python",
    )


def check_torch() -> Check:
    """Checks that torch can be imported, and that its version and build will do."""
    expected = f">= {dotted(LEAST_TORCH)}"
    torch, problem = _import("torch")
    if problem:
        remedy = (
            "install it as https://pytorch.org/get-started says for this machine, into the Python "
            f"that runs this: {sys.executable}"
        )
        return Check("torch", "failure", problem, expected=expected, remedy=remedy)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    distributed = torch.distributed.is_available()
    return make_check(
        "torch",
        (numbers_of(torch.__version__) or ()) >= LEAST_TORCH and distributed,
        f"{torch.__version__}, built for {built}"
        + ("" if distributed else ", without torch.distributed"),
        expected=f"{expected}, with torch.distributed",
        remedy="pip install --upgrade torch",
    )


def check_triton(facts: Facts) -> Check:
    """Checks Triton, which compiles kernels for GPUs, and interprets them elsewhere."""
    triton, problem = _import("triton")
    needed = bool(facts.gpus)
    expected = "the version that torch's CUDA wheel brings" if needed else "needed on GPUs alone"
    if problem == ABSENT and not needed:
        return Check("triton", "skipped", problem, expected=expected)
    remedy = "install torch's CUDA wheel, which brings its version of triton"
    observed = problem or triton.__version__
    return make_check("triton", not problem, observed, expected=expected, remedy=remedy)


def check_hopper_forward(facts: Facts) -> Check | None:
    """Checks that Hopper's faster kernel for 16-bit forwards can be compiled.

    None: no GPU is a Hopper, or there is no Triton.
    """
    if not any(gpu.capability == (9, 0) for gpu in facts.gpus) or "triton" not in facts.versions:
        return None
    from cce_dist.backends.triton.forward.hopper import RELEASES, why_no_gluon

    reason = why_no_gluon()
    return make_check(
        "Hopper's forward",
        not reason,
        reason or "its Gluon kernel can be compiled",
        expected=f"triton {RELEASES}",
        remedy="nothing is wrong, but slower: use one of these versions",
        otherwise="warning",
    )


def check_interpreter(facts: Facts) -> Check:
    """Checks TRITON_INTERPRET, which Triton reads when a kernel is decorated."""
    if facts.environment.get("TRITON_INTERPRET", "0") != "1":
        return Check("interpreter", "ok", "off")
    if not facts.gpus:
        return Check("interpreter", "ok", "on: kernels run in NumPy, for tests")
    return Check(
        "interpreter",
        "warning",
        "TRITON_INTERPRET=1 on a machine with GPUs: eager torch computes the loss",
        expected="unset, so that kernels are compiled",
        remedy="unset TRITON_INTERPRET",
    )


def check_numpy(facts: Facts) -> Check:
    _, problem = _import("numpy")
    if "numpy" not in facts.versions:
        expected = "needed by `cce-dist train` and `bench`, and Triton's interpreter"
        return Check("numpy", "skipped", ABSENT, expected=expected)
    if problem:
        remedy = "pip install --force-reinstall numpy"
        return Check("numpy", "failure", problem, expected="importable", remedy=remedy)
    return Check("numpy", "ok", facts.versions["numpy"])


def check_nccl(facts: Facts) -> Check:
    if facts.nccl is not None or not facts.gpus:
        unused = "not in use without GPUs: ranks talk over gloo"
        return Check("NCCL", "ok" if facts.nccl else "skipped", facts.nccl or unused)
    return Check(
        "NCCL",
        "failure",
        "torch has none",
        expected="a torch built with NCCL, for more than one GPU",
        remedy="install torch's CUDA wheel: https://pytorch.org/get-started",
    )


def check_megatron(facts: Facts) -> Check:
    least, most = (dotted(version) for version in MEGATRON)
    version = facts.version("megatron-core") or ()
    observed = facts.versions.get("megatron-core", "")
    remedy = "python -m megatron_patch --check says whether it can be patched"
    if not observed:
        # A checkout on the path is no installed package. find_spec imports its parent alone.
        try:
            spec = importlib.util.find_spec("megatron.core")
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            return Check("megatron-core", "skipped", ABSENT)
        observed = f"a checkout of unknown version: {spec.origin}"
    return make_check(
        "megatron-core",
        MEGATRON[0] <= version[:2] <= MEGATRON[1],
        observed,
        expected=f"{least} to {most}, with which megatron_patch is tested",
        remedy=remedy,
        otherwise="warning",
    )


def check_transformer_engine(facts: Facts) -> Check:
    version = facts.versions.get("transformer-engine")
    expected = "optional: a peer of the benchmarks, and Megatron's layers"
    status = "ok" if version else "skipped"
    return Check("TransformerEngine", status, version or ABSENT, expected=expected)


def check_mpi(facts: Facts) -> Check:
    """Checks mpi4py and the MPI library that it finds, without starting MPI."""
    version = facts.versions.get("mpi4py")
    if version is None:
        return Check("MPI", "skipped", "mpi4py is not installed")
    code = [sys.executable, "-c", ASK_MPI]
    try:
        done = subprocess.run(code, capture_output=True, text=True, timeout=ASK_SECONDS)
        problem = (done.stderr.strip().splitlines() or ["no word"])[-1]
        if done.returncode == 0:
            return Check("MPI", "ok", f"mpi4py {version}, {library_of(done.stdout)}")
    except subprocess.TimeoutExpired:
        problem = f"no answer in {ASK_SECONDS:.0f} s"
    return Check(
        "MPI",
        "warning",
        f"mpi4py {version} finds no MPI library: {problem}",
        expected="Open MPI, MPICH or Intel MPI",
        remedy="only for jobs of mpirun: pip install mpich, or the system's MPI",
    )


def library_of(text: str) -> str:
    """Returns name and version from MPI.Get_library_version's text, which may be a page long."""
    if mpich := re.search(r"MPICH Version:\s*(\S+)", text):
        return f"MPICH {mpich.group(1)}"
    if named := re.search(r"(Open MPI|Intel\(R\) MPI Library)\s+v?(\d[^\s,]*)", text):
        return " ".join(named.groups())
    return (text.strip().splitlines() or ["unnamed"])[0][:60]
