"""This process's surroundings as plain values: versions, environment, GPUs, host.

Nothing here needs torch. If torch can be imported, its facts about GPUs are added.
"""

from __future__ import annotations

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

PACKAGES = (
    "cce-dist",
    "torch",
    "triton",
    "numpy",
    "megatron-core",
    "mpi4py",
    "transformer-engine",
)
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


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The facts of a rank that every other rank gets.

    Args:
        clock: seconds since 1970, read when all ranks have left the same wait.
        gpu, capability: uuid and compute capability of the rank's GPU; None: the rank has none.
        links: as in `Facts`, each with both uuids and its kind.
        has_gpus: torch finds GPUs, although the rank may have none.
    """

    host: str
    clock: float = 0.0
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    links: Sequence[tuple[str, str, str]] = ()
    has_gpus: bool = False
    sources: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    cuda: str | None = None
    nccl: str | None = None


def numbers_of(version: str) -> tuple[int, ...] | None:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else None


def gather_facts(*, with_torch: bool) -> Facts:
    """Gathers the facts of this process.

    Args:
        with_torch: imports torch, and adds the facts that it has about GPUs.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    environment = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)
    }
    facts = Facts(
        host=socket.gethostname(),
        versions=versions,
        sources=_digest(),
        environment=environment,
        driver=_driver(),
    )
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
    if path.exists():
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", path.read_text(errors="replace"))
        if match:
            return match.group(1)
    lines = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def _nvidia_smi(*arguments: str) -> str:
    """Returns the output of nvidia-smi; nothing where it is absent, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


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
        gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
        facts = replace(facts, gpus=gpus)
        if dist.is_available() and dist.is_nccl_available():
            facts = replace(facts, nccl=".".join(str(number) for number in nccl.version()))
    except Exception as error:
        return replace(facts, why_no_gpu=str(error).strip().splitlines()[0])
    # All GPUs of the host, whichever of them CUDA_VISIBLE_DEVICES shows to torch.
    uuids = _nvidia_smi("--query-gpu=index,uuid", "--format=csv,noheader")
    return replace(facts, links=read_links(_nvidia_smi("topo", "-m"), uuids))


def _gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        properties.name,
        _bare(str(properties.uuid)),
        properties.total_memory,
        (properties.major, properties.minor),
    )


def _bare(uuid: str) -> str:
    return uuid.strip().removeprefix("GPU-")


def read_links(matrix: str, indices: str) -> dict[tuple[str, str], str]:
    """Reads the outputs of `nvidia-smi topo -m` and `--query-gpu=index,uuid`.

    Returns: kinds of links by the uuids of both GPUs, the smaller uuid first.
    """
    uuids = {}
    for line in indices.splitlines():
        index, _, uuid = line.partition(",")
        uuids[f"GPU{index.strip()}"] = _bare(uuid)
    # nvidia-smi underlines the matrix's head, even where it does not write to a terminal.
    lines = re.sub(r"\x1b\[[0-9;]*m", "", matrix).splitlines()
    head = next((line.split() for line in lines if line.split()[:1] == ["GPU0"]), [])
    columns = [name for name in head if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for line in lines:
        name, *cells = line.split() or [""]
        if name not in uuids or cells[:1] == ["GPU1"]:
            continue
        for other, kind in zip(columns, cells, strict=False):
            if other != name and other in uuids:
                pair = sorted((uuids[name], uuids[other]))
                links[pair[0], pair[1]] = kind
    return links
