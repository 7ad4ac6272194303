"""Stand-ins for a GPU that is not there: what torch and Triton's driver say of it, and tensors.

Within them a call of the loss decides as it does on the GPU, and asks Triton for the same binaries.
"""

# The stand-ins lack the types of torch's and Triton's own.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget

from cce_dist.ranks import gather
from cce_dist.ranks.transport import group_size


@dataclass(frozen=True)
class Device:
    """A GPU as drivers describe it. No binary depends on its number of multiprocessors or on the
    size of its cache, so that one GPU stands for all of its compute capability."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    cache_bytes: int  # of the second level
    # Of a block; docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities.
    shared_bytes: int

    @property
    def arch(self) -> int:
        return 10 * self.capability[0] + self.capability[1]


DEVICES = {
    device.arch: device
    for device in (
        Device("A100", (8, 0), 108, 40 * 2**20, 166912),
        Device("A10", (8, 6), 72, 6 * 2**20, 101376),
        Device("L40S", (8, 9), 142, 96 * 2**20, 101376),
        Device("H100 and H200", (9, 0), 132, 50 * 2**20, 232448),
        Device("B200", (10, 0), 148, 126 * 2**20, 232448),
        Device("RTX 5090", (12, 0), 170, 96 * 2**20, 101376),
    )
}


def find_device(name: str) -> Device:
    """Returns the GPU that stands for an architecture, such as "sm_90".

    Raises:
        ValueError: nothing is known of such a GPU.
    """
    known = {f"sm_{arch}": device for arch, device in DEVICES.items()}
    if name not in known:
        raise ValueError(f"arch must be one of {list(known)}, got {name!r}")
    return known[name]


_numbers = itertools.count(1000)


class Driver:
    """Triton's driver for a GPU that is not there.

    Args: launcher: makes the host's code that launches a kernel, or does nothing.
    """

    def __init__(self, device: Device, launcher: Callable[[Any, Any], object]) -> None:
        self.device, self.launcher_cls, self.utils = device, launcher, self
        # Triton keeps binaries by this number: no other device's, and no GPU's.
        self.number = next(_numbers)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device.arch, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.device.shared_bytes}

    def load_binary(self, *binary: object) -> tuple[object, object, int, int, int]:
        """Loads nothing; no kernel is too large for 1,024 threads."""
        return "no module", "no function", 0, 0, 1024


@contextlib.contextmanager
def stand_in(
    device: Device, launcher: Callable[[Any, Any], object] = lambda source, metadata: None
) -> Iterator[None]:
    """Makes torch and Triton believe in the GPU. Tensors stay on the CPU."""
    properties = SimpleNamespace(
        multi_processor_count=device.multiprocessors, L2_cache_size=device.cache_bytes
    )
    says = {
        "get_device_capability": lambda device_index=None: device.capability,
        "get_device_properties": lambda device_index=None: properties,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device": lambda device_index: contextlib.nullcontext(),
    }
    # Triton 3.4 has the driver itself where later releases have a property.
    driver, current = Driver(device, launcher), triton.runtime.driver
    with (
        mock.patch.multiple(torch.cuda, **says),
        mock.patch.object(current, "_active" if hasattr(current, "_active") else "active", driver),
    ):
        yield


@contextlib.contextmanager
def tensors_without_memory() -> Iterator[None]:
    """Makes new tensors have no memory, and count as tensors of a GPU, whose memory begins at
    multiples of 16 bytes. Torch's operators compute nothing, so a call takes moments at any size.

    Their device is the CPU: torch's autograd has no other where there is no GPU.
    """

    def data_ptr(tensor: Tensor) -> int:
        return int(tensor.storage_offset()) * tensor.element_size()

    def numbers_of_all(numbers: list[int], group: Any) -> list[list[int]]:
        return [numbers] * group_size(group)

    with (
        mock.patch.object(FakeTensor, "is_cuda", True),
        mock.patch.object(FakeTensor, "data_ptr", data_ptr),
        # A tensor without memory would be traced, and would launch nothing.
        mock.patch("cce_dist.loss.is_fake", lambda tensor: False),
        # Ranks compare sizes on a CPU alone.
        mock.patch.object(gather, "gather_numbers", numbers_of_all),
        FakeTensorMode(),
    ):
        yield
