"""Shapes of the Triton kernels' tiles, by architecture and dtype, and where they can run."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cce_dist.core.slower import warn_slower
from cce_dist.core.tracing import is_fake
from cce_dist.options import TOKEN_BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 0)
# Multiprocessors for kernels that wait for other ranks: 10 of 4 programs, and what torch's stages
# send. Where none were left, a microbatch's gradients waited for the next stage's whole backward.
LEFT_TO_OTHERS = 48


@dataclass(frozen=True)
class KernelTiles:
    """Tiles of the forward and of `exact` (128 tokens x columns, 128 tokens or columns x as many
    dims; `dims` at a time along the sum), and of the filtered backward's products.

    A task of the latter takes `pair` tiles of 128 columns, or 128 tokens or columns x
    `slice_dims`, `backward_dims` at a time along the sum.
    """

    columns: int
    dims: int
    stages: int
    pair: int
    slice_dims: int
    backward_dims: int
    backward_stages: int
    backward_warps: int = 8
    residents: int = 1  # programs of the backward a multiprocessor
    # Slices of all tiles or blocks before the next ones: `slice_of`.
    slices_at_once: int = 4
    warps: int = 8
    # Of the targets' product, whose rows lie anywhere in memory; None: as many as the forward's.
    target_stages: int | None = None
    tail_dims: int = 256  # of a task of the tail's centroids


# `cce-dist bench tiles` times candidates beside it: docs/performance.md#tiles.
TABLE = {
    ("sm90", 2): KernelTiles(
        256,
        64,
        4,
        pair=1,
        slice_dims=128,
        backward_dims=64,
        backward_stages=3,
        backward_warps=4,
        residents=2,
        target_stages=6,
    ),
    ("sm80", 2): KernelTiles(
        128, 32, 3, pair=1, slice_dims=128, backward_dims=32, backward_stages=3
    ),
    ("sm90", 4): KernelTiles(
        128, 32, 3, pair=1, slice_dims=128, backward_dims=32, backward_stages=2, tail_dims=64
    ),
    ("sm80", 4): KernelTiles(
        128, 32, 2, pair=1, slice_dims=128, backward_dims=32, backward_stages=2, tail_dims=64
    ),
    # 8 bits: the forward alone.
    ("sm90", 1): KernelTiles(
        256, 128, 4, pair=1, slice_dims=128, backward_dims=64, backward_stages=3
    ),
    ("sm80", 1): KernelTiles(
        128, 64, 3, pair=1, slice_dims=128, backward_dims=32, backward_stages=3
    ),
}
# Not timed, but as the shared memory of devices wants it: test_compiles.py.
TABLE |= {
    # Products take their operands from shared memory, and so need more of it.
    ("sm100", 2): replace(TABLE["sm90", 2], backward_stages=2),
    ("sm100", 4): TABLE["sm90", 4],
    ("sm100", 1): TABLE["sm90", 1],
    # 99 KB a block.
    ("sm86", 2): replace(TABLE["sm80", 2], tail_dims=128),
    ("sm86", 4): TABLE["sm80", 4],
    ("sm86", 1): TABLE["sm80", 1],
}


def interpreted() -> bool:
    """Tells whether Triton interprets its kernels, in NumPy on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def key_of(tensor: Tensor) -> tuple[str, int]:
    """Returns the key of `TABLE` for the tensor's device and dtype."""
    capability = (9, 0) if interpreted() else torch.cuda.get_device_capability(tensor.device)
    if capability[0] in (10, 11):
        name = "sm100"
    elif capability[0] == 9:
        name = "sm90"
    else:
        # A device that is not known yet may have as little shared memory as 12.0.
        name = "sm80" if capability in ((8, 0), (8, 7)) else "sm86"
    return name, tensor.dtype.itemsize


def tiles_for(tensor: Tensor) -> KernelTiles:
    """The tiles for the tensor's device and dtype."""
    return TABLE[key_of(tensor)]


def num_programs(tensor: Tensor) -> int:
    """Programs of a persistent kernel: one per multiprocessor; one at a time when interpreted."""
    if interpreted():
        return 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


# Parts of the backward's products: all; those before the hidden gradient; those after it.
# Apart where ranks sum the hidden gradient beside the rest.
ALL, UNTIL_HIDDEN, AFTER_HIDDEN = 0, 1, 2


def rounds_exp2(tensor: Tensor) -> bool:
    """Tells whether exponentials need more digits than the hardware's have; NumPy's have them."""
    return tensor.dtype == torch.float32 and not interpreted()


def cached_blocks(weight: Tensor, element_size: int) -> int:
    """Token blocks whose hidden states, with such elements, the second-level cache holds, the
    weight's rows beside them."""
    if interpreted():
        return 2**20
    # A part of it holds the other half's lines a second time.
    room = torch.cuda.get_device_properties(weight.device).L2_cache_size * 2 // 5
    return max(1, room // (TOKEN_BLOCK * weight.shape[1] * element_size))


def takes_tma(matrix: Tensor) -> bool:
    """Tells whether a tensor descriptor can read the matrix, of inner stride 1, and store tiles of
    its dtype."""
    if not interpreted():
        capability = torch.cuda.get_device_capability(matrix.device)
        # 99 KB of shared memory have no room for a tile of fp32 logits, twice.
        if capability < (9, 0) or (capability >= (12, 0) and matrix.element_size() > 2):
            return False
    return is_aligned(matrix)


def is_aligned(matrix: Tensor) -> bool:
    """Tells whether each row begins at a multiple of 16 bytes: descriptors need it."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def warn_of_layout(weight: Tensor) -> None:
    """Warns once of a layout of the weight that costs more than a tenth of a call."""
    if interpreted():
        return
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        warn_slower(
            f"weight has strides {weight.stride()}, and every call copies it, as the kernels read "
            "rows whose elements lie side by side; pass a contiguous weight"
        )
    elif not is_aligned(weight):
        warn_slower(
            f"weight's rows are {weight.stride(0) * weight.element_size()} bytes apart and begin "
            f"{weight.data_ptr() % 16} bytes after a multiple of 16, so neither descriptors nor "
            "16 bytes at a time load them; pass a weight whose rows begin at multiples of 16 bytes"
        )


def takes_branches(tensor: Tensor) -> bool:
    """Tells whether a product's use may stand in a branch: for Blackwell's tensor memory Triton 3.6
    does not compile that. https://github.com/triton-lang/triton/pull/9212"""
    return interpreted() or torch.cuda.get_device_capability(tensor.device) < (10, 0)


def why_not_screened(hidden: Tensor, dtype: str, *, by_kernels: bool) -> str | None:
    """Why there are no 8-bit logits of it, where what computes them has no objection."""
    if hidden.dtype.itemsize > 2:
        return f"hidden is {hidden.dtype}, whose digits 8-bit logits would lose"
    if not by_kernels or interpreted() or dtype != "e4m3":
        return None
    if is_fake(hidden) and not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(hidden.device)
    if capability < (8, 9):
        return f"the device has compute capability {capability}, and Screen.dtype e4m3 needs (8, 9)"
    return None


def warn_of_torch(hidden: Tensor) -> None:
    """Says, once, what could be changed for the kernels to run, where torch takes their place."""
    # Of fp64 and of older devices the kernels have nothing faster.
    if not hidden.is_cuda or hidden.dtype not in DTYPES:
        return
    if importlib.util.find_spec("triton") is None:
        warn_slower(
            f'backend="auto" took "torch" on {hidden.device.type}: triton is not installed; '
            "install it, or PyTorch's CUDA wheel, which brings it"
        )
    elif interpreted():
        warn_slower(
            f'backend="auto" took "torch" on {hidden.device.type}, as TRITON_INTERPRET=1 keeps '
            "kernels from being compiled; unset it"
        )


def why_not(hidden: Tensor) -> str | None:
    """Why the Triton kernels cannot compute on `hidden`'s device and dtype; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if hidden.dtype not in DTYPES:
        return f"hidden is {hidden.dtype}, and its kernels take bf16, fp16 and fp32"
    if interpreted():
        # https://github.com/triton-lang/triton: its interpreter's bf16 product is wrong.
        return "Triton's interpreter has no bf16 product" if hidden.dtype == DTYPES[0] else None
    if not hidden.is_cuda:
        return f"hidden is on {hidden.device}, and its kernels need a CUDA device"
    if is_fake(hidden) and not torch.cuda.is_available():
        return None  # of a GPU that is elsewhere: of those that compute this, most can
    capability = torch.cuda.get_device_capability(hidden.device)
    if capability < LEAST_CAPABILITY:
        need = LEAST_CAPABILITY
        return f"the device has compute capability {capability}, and its kernels need {need}"
    return None
