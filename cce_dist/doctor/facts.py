"""What this process runs on, as plain values: versions, environment, GPUs, host.

Nothing here needs torch; what torch knows is added where it can be imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = (
    "cce-dist",
    "torch",
    "triton",
    "numpy",
    "megatron-core",
    "mpi4py",
    "transformer-engine",
)
# Of the environment: what the checks look at, and nothing else, as it may hold secrets.
PREFIXES = ("NCCL_", "GLOO_", "TRITON_", "TORCH_", "TORCHELASTIC_", "CUDA_", "CCE_DIST_")
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
    """Of one process.

    Args:
        versions: of PACKAGES and python; those not installed are not in it.
        sources: digest of the files of cce_dist, the same for the same code.
        driver: NVIDIA's, its version; None: none is loaded.
        cuda: that torch was built for; None: a CPU build, or no torch.
        nccl: as torch brings it.
        links: between GPUs of this host, "NV18", "PIX", ...: by their uuids, smaller first.
        why_no_gpu: what torch said when it was asked for GPUs.
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
        """(2, 13, 0) of "2.13.0+cu130"; None where it is not installed, or no number."""
        return numbers_of(self.versions.get(package, ""))


def numbers_of(version: str) -> tuple[int, ...] | None:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else None


def gather_facts(*, with_torch: bool) -> Facts:
    """Facts of this process; with torch, which must be importable, what it knows of GPUs too."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    environment = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)
    }
    common: dict[str, Any] = {
        "host": socket.gethostname(),
        "versions": versions,
        "sources": _digest(),
        "environment": environment,
        "driver": _driver(),
    }
    return Facts(**common, **(_ask_torch(versions) if with_torch else {}))


def _digest() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _driver() -> str | None:
    """Of the kernel's module, else as nvidia-smi says: a container may have but one of them."""
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", path.read_text(errors="replace"))
        if found:
            return found.group(1)
    lines = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def _nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where it is absent, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _ask_torch(versions: dict[str, str]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.cuda import nccl

    versions["torch"] = torch.__version__
    found: dict[str, Any] = {"cuda": torch.version.cuda}
    if torch.version.cuda is None:
        return found
    try:
        # Raises where there are GPUs that cannot be used; otherwise their number may be 0.
        torch.cuda.init()
        found["gpus"] = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
        if dist.is_available() and dist.is_nccl_available():
            found["nccl"] = ".".join(str(part) for part in nccl.version())
    except Exception as error:
        found["why_no_gpu"] = str(error).strip().splitlines()[0]
        return found
    # Whatever CUDA_VISIBLE_DEVICES lets torch see.
    found["links"] = read_links(
        _nvidia_smi("topo", "-m"), _nvidia_smi("--query-gpu=index,uuid", "--format=csv,noheader")
    )
    return found


def _gpu(index: int) -> Gpu:
    import torch

    seen = torch.cuda.get_device_properties(index)
    return Gpu(seen.name, _bare(str(seen.uuid)), seen.total_memory, (seen.major, seen.minor))


def _bare(uuid: str) -> str:
    return uuid.strip().removeprefix("GPU-")


def read_links(matrix: str, indices: str) -> dict[tuple[str, str], str]:
    """Of what `nvidia-smi topo -m` and `--query-gpu=index,uuid` print: by uuids, smaller first."""
    uuids = {}
    for line in indices.splitlines():
        index, _, uuid = line.partition(",")
        uuids[f"GPU{index.strip()}"] = _bare(uuid)
    # The head of the matrix is underlined on terminals, and elsewhere too.
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
