"""This process's surroundings as plain values: versions, environment, GPUs, host.

Nothing here needs torch. If torch can be imported, its facts about GPUs are added.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

# Packages of which every rank must have the same version.
ALIKE = ("python", "torch", "triton", "numpy", "cce-dist", "megatron-core", "mpi4py")
PACKAGES = (*ALIKE[1:], "transformer-engine")
SOURCES = "sources of cce_dist"
# Prefixes of the variables that are kept. Others are not read: they may hold secrets.
PREFIXES = ("NCCL_", "GLOO_", "TRITON_", "TORCH_", "TORCHELASTIC_", "CUDA_", "CCE_DIST_")
# Time limit of nvidia-smi.
SECONDS = 20.0


@dataclass(frozen=True)
class Gpu:
    """A device as torch sees it."""

    name: str
    uuid: str
    memory: int  # bytes
    capability: tuple[int, int]


@dataclass(frozen=True)
class Facts:
    """The facts of a process.

    Args:
        versions: versions of python and of those of PACKAGES that are installed.
        sources: digest of the files of cce_dist, the same for the same code.
        environment: variables with one of PREFIXES.
        driver: version of NVIDIA's driver; None: no driver is loaded.
        cuda: version that torch was built for; None: a CPU build, or no torch.
        nccl: version of the NCCL that torch brings; None: torch has no NCCL, or no GPU.
        links: kinds of the links between GPUs of this host, "NV18", "PIX", ...; a key has the
            uuids of both GPUs, the smaller first.
        why_no_gpu: torch's error when it looked for GPUs.
    """

    host: str
    versions: Mapping[str, str]
    sources: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    gpus: tuple[Gpu, ...] = ()
    links: Mapping[tuple[str, str], str] = field(default_factory=dict)
    why_no_gpu: str = ""

    def version(self, package: str) -> tuple[int, ...] | None:
        """Returns a version's numbers, (2, 13, 0) of "2.13.0+cu130".

        None: the package is not installed, or its version does not begin with a number.
        """
        return numbers_of(self.versions.get(package, ""))

    @property
    def software(self) -> dict[str, str | None]:
        """Returns versions, and a digest of the sources, that must be the same on every rank."""
        versions = {name: self.versions.get(name) for name in ALIKE}
        return versions | {SOURCES: self.sources, "CUDA": self.cuda, "NCCL": self.nccl}


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The facts of a rank that every other rank gets.

    Args:
        clock: seconds since 1970, read when all ranks have left the same wait.
        gpu, capability: uuid and compute capability of the rank's GPU; None: the rank has none.
        links: as in `Facts`, each with both uuids and its kind.
        has_gpus: torch finds GPUs, although the rank may have none.
        software: as `Facts.software` returns it.
    """

    host: str
    clock: float = 0.0
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    links: Sequence[tuple[str, str, str]] = ()
    has_gpus: bool = False
    software: Mapping[str, str | None] = field(default_factory=dict)


def numbers_of(version: str) -> tuple[int, ...] | None:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else None


def dotted(version: Sequence[object]) -> str:
    return ".".join(map(str, version))


def gather_facts(*, with_torch: bool) -> Facts:
    """Gathers the facts of this process.

    Args:
        with_torch: imports torch, and adds the facts that it has about GPUs.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    environment = {key: os.environ[key] for key in sorted(os.environ) if key.startswith(PREFIXES)}
    facts = Facts(socket.gethostname(), versions, _digest(), environment, _driver())
    return _ask_torch(facts) if with_torch else facts


def _digest() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _driver() -> str | None:
    """Returns the version that the kernel's module states, else nvidia-smi.

    A container may have only one of them.
    """
    path = Path("/proc/driver/nvidia/version")
    stated = path.read_text(errors="replace") if path.exists() else ""
    if match := re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", stated):
        return match.group(1)
    lines = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def _nvidia_smi(*arguments: str) -> str:
    """Returns the output of nvidia-smi; nothing where it is absent, fails or hangs."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _ask_torch(facts: Facts) -> Facts:
    """Returns `facts` with torch's version, its CUDA and the GPUs that it can use."""
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    versions = {**facts.versions, "torch": torch.__version__}
    facts = replace(facts, versions=versions, cuda=torch.version.cuda)
    if torch.version.cuda is None:
        return facts
    try:
        # Raises where there are GPUs that cannot be used; otherwise their number may be 0.
        torch.cuda.init()
        every = [torch.cuda.get_device_properties(x) for x in range(torch.cuda.device_count())]
        gpus = [Gpu(x.name, _bare(str(x.uuid)), x.total_memory, (x.major, x.minor)) for x in every]
        facts = replace(facts, gpus=tuple(gpus))
        if dist.is_available() and dist.is_nccl_available():
            facts = replace(facts, nccl=dotted(nccl.version()))
    except Exception as error:
        return replace(facts, why_no_gpu=str(error).strip().splitlines()[0])
    # All GPUs of the host, whichever of them CUDA_VISIBLE_DEVICES shows to torch.
    uuids = _nvidia_smi("--query-gpu=index,uuid", "--format=csv,noheader")
    return replace(facts, links=read_links(_nvidia_smi("topo", "-m"), uuids))


def _bare(uuid: str) -> str:
    return uuid.strip().removeprefix("GPU-")


def read_links(matrix: str, indices: str) -> dict[tuple[str, str], str]:
    """Reads the outputs of `nvidia-smi topo -m` and `--query-gpu=index,uuid`.

    Returns: kinds of links by the uuids of both GPUs, the smaller uuid first.
    """
    uuids = [_bare(line.partition(",")[2]) for line in indices.splitlines()]
    # nvidia-smi underlines the matrix's head, even where it does not write to a terminal.
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()]
    # A row for each GPU, below the head. GPUs' columns come before those of other devices.
    is_gpu = re.compile(r"GPU\d+").fullmatch
    rows = [line[1:] for line in lines if line and is_gpu(line[0]) and line[1:2] != ["GPU1"]]
    return {
        (first, second): kind
        for first, row in zip(uuids, rows, strict=False)
        for second, kind in zip(uuids, row, strict=False)
        if first < second
    }
