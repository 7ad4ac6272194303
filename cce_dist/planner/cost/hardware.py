"""GPUs as numbers: their peak rates, and the shares of them that a training step reaches.

docs/design/planner.md has the source of each number, and says which numbers are not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from cce_dist.planner.names import nearest_name

GIB = 2**30
RATES = {"flops": "FLOP/s", **dict.fromkeys(("hbm", "nvlink", "network"), "bytes/s")}
TILE = 128 * 256  # of a product's result


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A GPU and its links to others.

    Raises:
        ValueError: a number is not positive and finite, a share is above 1, or the memory is too
            small to be in bytes.
    """

    flops: float  # peak of dense bf16 products in FLOP/s, as the maker states it
    memory: float  # bytes, at least 2**30
    hbm: float  # peak in bytes/s, as stated
    nvlink: float  # bytes/s in one direction to the other GPUs of a host, as stated
    network: float = 50e9  # bytes/s in one direction to other hosts, for each GPU
    gpus_per_host: float = 8  # that NVLink connects; tensor-parallel ranks are neighbours
    processors: float = 132  # number of streaming multiprocessors
    # Shares of flops that a large product, FlashAttention 2 and cuDNN's attention reach.
    gemm: float = 0.71
    attention_forward: float = 0.36
    attention_backward: float = 0.28
    cudnn_forward: float = 0.53
    cudnn_backward: float = 0.46
    hbm_share: float = 0.8  # of hbm, that kernels reach
    link_share: float = 0.71  # of nvlink and network, that collectives reach
    latency: float = 60e-6  # seconds of the smallest collective
    usable: float = 0.92  # share of memory for tensors; the rest: context, buffers, fragments

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ValueError(f"{field.name} must be > 0 and finite, got {value!r}")
        if self.memory < GIB:
            raise ValueError(f"memory must be in bytes, >= 2**30 (1 GiB), got {self.memory!r}")
        absolute = ("flops", "memory", "hbm", "nvlink", "network", "gpus_per_host", "processors")
        for name in vars(self):
            if name not in (*absolute, "latency") and getattr(self, name) > 1:
                raise ValueError(f"{name} must be a share, <= 1, got {getattr(self, name)!r}")

    def product(self, rows: float, columns: float, inner: float) -> float:
        """Returns the seconds of a matrix product, [rows, inner] by [inner, columns].

        Tiles are computed in waves of one tile a processor; the last wave is on average half full.
        A product smaller than a wave takes as long as a wave, or has smaller tiles.
        """
        waves = max(rows * columns / (TILE * self.processors), 1 / 8)
        full = 2 * rows * columns * inner / (self.flops * self.gemm)
        return full * max(waves + 0.5, 1.0) / waves

    @property
    def room(self) -> float:
        """The bytes that tensors of a rank may take."""
        return self.usable * self.memory

    @property
    def bytes_per_second(self) -> float:
        """The rate of reads and writes of HBM."""
        return self.hbm * self.hbm_share

    def link(self, ranks: int) -> float:
        """Returns the bytes/s between two of `ranks` neighbouring ranks."""
        return self.link_share * (self.nvlink if ranks <= self.gpus_per_host else self.network)

    def ring(self, ranks: int, *, apart: int = 1) -> float:
        """Returns the bytes/s of a collective of `ranks` ranks that are `apart` ranks apart.

        On several hosts, rings enter and leave a host by the network links of all its members.
        """
        if ranks * apart <= self.gpus_per_host:
            return self.link_share * self.nvlink
        members = max(1.0, self.gpus_per_host // apart)
        return self.link_share * min(self.nvlink, members * self.network)


HARDWARE = {
    "a100": Hardware(
        flops=312e12,
        memory=79 * GIB,
        hbm=2.039e12,
        nvlink=300e9,
        network=25e9,
        processors=108,
        gemm=0.77,
        attention_forward=0.55,
        attention_backward=0.45,
        # cuDNN has no faster kernel there.
        cudnn_forward=0.55,
        cudnn_backward=0.45,
    ),
    "h100": Hardware(flops=989e12, memory=79 * GIB, hbm=3.35e12, nvlink=450e9),
    "h200": Hardware(flops=989e12, memory=139.8 * GIB, hbm=4.8e12, nvlink=450e9),
    "b200": Hardware(
        flops=2250e12, memory=178 * GIB, hbm=8.0e12, nvlink=900e9, processors=148, gemm=0.56
    ),
}


def require_units(values: Mapping[str, float]) -> None:
    """Checks that numbers from a user may be in the units of `Hardware`.

    Raises:
        ValueError: a number is too small or too large for its unit, which the message names.
    """
    for name, unit in RATES.items():
        if 0 < values.get(name, 1e9) < 1e9:
            raise ValueError(f"{name} must be in {unit}, >= 1e9, got {values[name]!r}")
    if 1 < values.get("latency", 0) < math.inf:
        raise ValueError(f"latency must be in seconds, <= 1, got {values['latency']!r}")


def find_hardware(name: str) -> Hardware:
    """Returns a preset.

    Raises:
        ValueError: no preset has this name.
    """
    if name.lower() not in HARDWARE:
        suggestion = nearest_name(name, HARDWARE)
        raise ValueError(f"hardware must be one of {sorted(HARDWARE)}, got {name!r}{suggestion}")
    return HARDWARE[name.lower()]
