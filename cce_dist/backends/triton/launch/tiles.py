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
# Multiprocessors that are left for kernels that wait for other ranks: 10 kernels of 4 programs, and
# the sends of torch's stages. With none left, a microbatch's gradients waited for the next stage's
# whole backward.
LEFT_TO_OTHERS = 48


@dataclass(frozen=True)
class KernelTiles:
    """Sizes of the kernels' tiles for one architecture and dtype.

    The forward and `exact`: a tile of logits is 128 tokens x `columns`; a tile of a gradient is 128
    tokens or columns x `columns` dims; each step of the sum takes `dims` numbers. The filtered
    backward: a task is `pair` tiles of 128 columns, or 128 tokens or columns x `slice_dims` dims;
    each step of the sum takes `backward_dims` numbers.
    """

    columns: int
    dims: int
    stages: int
    pair: int
    slice_dims: int
    backward_dims: int
    backward_stages: int
    backward_warps: int = 8
    residents: int = 1  # programs of the backward on one multiprocessor
    slices_at_once: int = 4  # slices that all tiles or blocks finish before the next: `slice_of`
    warps: int = 8
    # Stages of the targets' product, whose rows lie anywhere in memory; None: `stages`.
    target_stages: int | None = None
    tail_dims: int = 256  # dims of a task of the tail's centroids


# Only the row of sm90 in 16 bits is tuned: docs/design/forward.md#tiles.
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
    # In 8 bits there is a forward alone.
    ("sm90", 1): KernelTiles(
        256, 128, 4, pair=1, slice_dims=128, backward_dims=64, backward_stages=3
    ),
    ("sm80", 1): KernelTiles(
        128, 64, 3, pair=1, slice_dims=128, backward_dims=32, backward_stages=3
    ),
}
# Not timed: chosen so that tiles fit the devices' shared memory, as test_compiles.py checks.
TABLE |= {
    # Products read their operands from shared memory, and so need more of it.
    ("sm100", 2): replace(TABLE["sm90", 2], backward_stages=2),
    ("sm100", 4): TABLE["sm90", 4],
    ("sm100", 1): TABLE["sm90", 1],
    # A block has 99 KB of shared memory.
    ("sm86", 2): replace(TABLE["sm80", 2], tail_dims=128),
    ("sm86", 4): TABLE["sm80", 4],
    ("sm86", 1): TABLE["sm80", 1],
}


# Tiles of a segment's split, if hidden states have WIDE dims or more.
TURNS, WIDE = 5, 3072


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
        # An unknown device may have as little shared memory as capability 12.0.
        name = "sm80" if capability in ((8, 0), (8, 7)) else "sm86"
    return name, tensor.dtype.itemsize


def tiles_for(tensor: Tensor) -> KernelTiles:
    """Returns the tiles for the tensor's device and dtype."""
    return TABLE[key_of(tensor)]


def num_programs(tensor: Tensor) -> int:
    """Returns the programs of a persistent kernel: one a multiprocessor, or one if interpreted."""
    if interpreted():
        return 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def splits_of_segment(columns: int, weight: Tensor, tiles: KernelTiles) -> int:
    """Returns the splits of a segment of the shard, each of a few tiles: so many that few tokens
    keep most of a device busy, so few that a split's start and end cost little."""
    turns = max(TURNS, TURNS * WIDE // weight.shape[1])
    return -(-columns // (tiles.columns * turns))


# Stages of the backward's products: all at once; or those up to the hidden gradient, then those
# after it, which overlap the ranks' sum of the hidden gradient.
ALL, UNTIL_HIDDEN, AFTER_HIDDEN = 0, 1, 2


def is_wide(tensor: Tensor) -> bool:
    """Tells whether kernels compute with fp32's last digits, which 16-bit inputs don't have."""
    return tensor.dtype == torch.float32


def cached_blocks(weight: Tensor, element_size: int, beside: int = 0) -> int:
    """Returns the number of token blocks whose hidden states, of that element size, fit the
    second-level cache beside rows of the weight, and beside `beside` bytes more a token."""
    if interpreted():
        return 2**20
    # The cache has two halves, and each also holds copies of the other half's lines.
    room = torch.cuda.get_device_properties(weight.device).L2_cache_size * 2 // 5
    return max(1, room // (TOKEN_BLOCK * (weight.shape[1] * element_size + beside)))


def takes_tma(matrix: Tensor) -> bool:
    """Tells whether a tensor descriptor can read the matrix, whose inner stride is 1, and store
    tiles of its dtype."""
    if not interpreted():
        capability = torch.cuda.get_device_capability(matrix.device)
        # Two tiles of fp32 logits do not fit 99 KB of shared memory.
        if capability < (9, 0) or (capability >= (12, 0) and matrix.element_size() > 2):
            return False
    return is_aligned(matrix)


def is_aligned(matrix: Tensor) -> bool:
    """Tells whether each row starts at a multiple of 16 bytes, as descriptors need."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def warn_of_layout(weight: Tensor) -> None:
    """Warns, once, if the weight's layout costs more than a tenth of a call."""
    if interpreted():
        return
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        warn_slower(
            f"weight has strides {weight.stride()}, and every call copies it: the kernels read "
            "rows whose elements lie side by side; pass a contiguous weight"
        )
    elif not is_aligned(weight):
        warn_slower(
            f"weight's rows are {weight.stride(0) * weight.element_size()} bytes apart and begin "
            f"{weight.data_ptr() % 16} bytes after a multiple of 16, so neither descriptors nor "
            "16 bytes at a time load them; pass a weight whose rows begin at multiples of 16 bytes"
        )


def takes_branches(tensor: Tensor) -> bool:
    """Tells whether a branch may use a product. With Blackwell's tensor memory, Triton 3.6 does not
    compile that. https://github.com/triton-lang/triton/pull/9212"""
    return interpreted() or torch.cuda.get_device_capability(tensor.device) < (10, 0)


def why_not_screened(hidden: Tensor, dtype: str, *, by_kernels: bool) -> str | None:
    """Says why logits cannot be screened on hidden's device and dtype, by a backend that can itself
    run there; None if they can."""
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
    """Warns, once, where torch takes the kernels' place, and says how to have them run."""
    # The kernels do not support fp64.
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
    elif (reason := why_not(hidden)) is not None:
        warn_slower(f'backend="auto" took "torch": {reason}; backend="torch" says so by name')


def why_not(hidden: Tensor) -> str | None:
    """Says why the Triton kernels cannot run on hidden's device and dtype; None if they can."""
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
        return None  # traced for a GPU of another machine, which most likely can
    capability = torch.cuda.get_device_capability(hidden.device)
    if capability < LEAST_CAPABILITY:
        need = LEAST_CAPABILITY
        return f"the device has compute capability {capability}, and its kernels need {need}"
    return None
