"""Checks of Python, torch, Triton, NumPy, NCCL, MPI and Megatron: installed, of a good version."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys

from cce_dist.doctor.check import Check, first_line
from cce_dist.doctor.facts import Facts, numbers_of

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


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)


def check_python() -> Check:
    version = dotted(sys.version_info[:3])
    good = sys.version_info[:2] >= LEAST_PYTHON
    return Check(
        name="python",
        status="ok" if good else "failure",
        observed=version,
        expected=f">= {dotted(LEAST_PYTHON)}",
        remedy="" if good else "make the environment with a newer Python",
    )


def check_torch() -> Check:
    """Checks that torch can be imported, and that its version and build will do."""
    expected = f">= {dotted(LEAST_TORCH)}"
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        return Check(
            name="torch",
            status="failure",
            observed="not installed" if missing else f"cannot be imported: {first_line(error)}",
            expected=expected,
            remedy="install it as https://pytorch.org/get-started says for this machine, "
            "into the Python that runs this: " + sys.executable,
        )
    version = numbers_of(torch.__version__) or ()
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    good = version >= LEAST_TORCH and torch.distributed.is_available()
    build = f"{torch.__version__}, built for {built}"
    if not torch.distributed.is_available():
        build += ", without torch.distributed"
    return Check(
        name="torch",
        status="ok" if good else "failure",
        observed=build,
        expected=f"{expected}, with torch.distributed",
        remedy="" if good else "pip install --upgrade torch",
    )


def check_triton(*, needed: bool) -> Check:
    """Checks Triton, which compiles kernels for GPUs, and interprets them elsewhere.

    Args:
        needed: there are GPUs.
    """
    expected = "the version that torch's CUDA wheel brings" if needed else "needed on GPUs alone"
    remedy = "install torch's CUDA wheel, which brings its version of triton"
    try:
        installed = importlib.util.find_spec("triton") is not None
        if not installed:
            return Check(
                name="triton",
                status="failure" if needed else "skipped",
                observed="not installed",
                expected=expected,
                remedy=remedy if needed else "",
            )
        triton = importlib.import_module("triton")
    except Exception as error:
        reason = f"cannot be imported: {first_line(error)}"
        return Check(
            name="triton", status="failure", observed=reason, expected=expected, remedy=remedy
        )
    return Check(name="triton", status="ok", observed=triton.__version__, expected=expected)


def check_hopper_forward(facts: Facts) -> Check | None:
    """Checks that Hopper's faster kernel for 16-bit forwards can be compiled.

    None: no GPU is a Hopper, or there is no Triton.
    """
    if not any(gpu.capability == (9, 0) for gpu in facts.gpus) or "triton" not in facts.versions:
        return None
    from cce_dist.backends.triton.forward.hopper import RELEASES, why_no_gluon

    reason = why_no_gluon()
    return Check(
        name="Hopper's forward",
        status="warning" if reason else "ok",
        observed=reason or "its Gluon kernel can be compiled",
        expected=f"triton {RELEASES}",
        remedy="nothing is wrong, but slower: use one of these versions" if reason else "",
    )


def check_interpreter(facts: Facts) -> Check:
    """Checks TRITON_INTERPRET, which Triton reads when a kernel is decorated."""
    on = facts.environment.get("TRITON_INTERPRET", "0") == "1"
    if on and facts.gpus:
        return Check(
            name="interpreter",
            status="warning",
            observed="TRITON_INTERPRET=1 on a machine with GPUs: eager torch computes the loss",
            expected="unset, so that kernels are compiled",
            remedy="unset TRITON_INTERPRET",
        )
    return Check(
        name="interpreter",
        status="ok",
        observed="on: kernels run in NumPy, for tests" if on else "off",
    )


def check_numpy(facts: Facts) -> Check:
    if "numpy" not in facts.versions:
        return Check(
            name="numpy",
            status="skipped",
            observed="not installed",
            expected="needed by `cce-dist train` and `bench`, and Triton's interpreter",
        )
    try:
        importlib.import_module("numpy")
    except Exception as error:
        return Check(
            name="numpy",
            status="failure",
            observed=f"cannot be imported: {first_line(error)}",
            expected="importable",
            remedy="pip install --force-reinstall numpy",
        )
    return Check(name="numpy", status="ok", observed=facts.versions["numpy"])


def check_nccl(facts: Facts) -> Check:
    if facts.nccl is not None:
        return Check(name="NCCL", status="ok", observed=facts.nccl)
    if facts.gpus:
        return Check(
            name="NCCL",
            status="failure",
            observed="torch has none",
            expected="a torch built with NCCL, for more than one GPU",
            remedy="install torch's CUDA wheel: https://pytorch.org/get-started",
        )
    unused = "not in use without GPUs: ranks talk over gloo"
    return Check(name="NCCL", status="skipped", observed=unused)


def check_megatron(facts: Facts) -> Check:
    least, most = (dotted(version) for version in MEGATRON)
    expected = f"{least} to {most}, with which megatron_patch is tested"
    version = facts.version("megatron-core")
    if version is None:
        # A checkout on the path is no installed package. find_spec imports its parent alone.
        try:
            spec = importlib.util.find_spec("megatron.core")
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            return Check(name="megatron-core", status="skipped", observed="not installed")
        return Check(
            name="megatron-core",
            status="warning",
            observed=f"a checkout of unknown version: {spec.origin}",
            expected=expected,
            remedy="python -m megatron_patch --check",
        )
    good = MEGATRON[0] <= version[:2] <= MEGATRON[1]
    return Check(
        name="megatron-core",
        status="ok" if good else "warning",
        observed=facts.versions["megatron-core"],
        expected=expected,
        remedy="" if good else "python -m megatron_patch --check says whether it can be patched",
    )


def check_transformer_engine(facts: Facts) -> Check:
    version = facts.versions.get("transformer-engine")
    return Check(
        name="TransformerEngine",
        status="ok" if version else "skipped",
        observed=version or "not installed",
        expected="optional: a peer of the benchmarks, and Megatron's layers",
    )


def check_mpi(facts: Facts) -> Check:
    """Checks mpi4py and the MPI library that it finds, without starting MPI."""
    version = facts.versions.get("mpi4py")
    if version is None:
        return Check(name="MPI", status="skipped", observed="mpi4py is not installed")
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_MPI], capture_output=True, text=True, timeout=ASK_SECONDS
        )
        why = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no word"])[-1]
    except subprocess.TimeoutExpired:
        done, why = None, f"no answer in {ASK_SECONDS:.0f} s"
    if done is None or why:
        return Check(
            name="MPI",
            status="warning",
            observed=f"mpi4py {version} finds no MPI library: {why}",
            expected="Open MPI, MPICH or Intel MPI",
            remedy="only for jobs of mpirun: pip install mpich, or the system's MPI",
        )
    return Check(name="MPI", status="ok", observed=f"mpi4py {version}, {library_of(done.stdout)}")


def library_of(text: str) -> str:
    """Returns name and version from MPI.Get_library_version's text, which may be a page long."""
    mpich = re.search(r"MPICH Version:\s*(\S+)", text)
    if mpich:
        return f"MPICH {mpich.group(1)}"
    named = re.search(r"(Open MPI|Intel\(R\) MPI Library)\s+v?(\d\S*)", text)
    if named:
        return f"{named.group(1)} {named.group(2).rstrip(',')}"
    return (text.strip().splitlines() or ["unnamed"])[0][:60]
