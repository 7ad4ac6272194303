"""The forward for Hopper, whose groups of warps have different tasks: where it runs, its launch."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import KernelTiles, interpreted, takes_tma
from cce_dist.core.slower import warn_slower
from cce_dist.core.types import Head, Wanted
from cce_dist.options import TOKEN_BLOCK

if TYPE_CHECKING:
    from cce_dist.backends.triton.forward.operands import EightBit, ForwardBuffers

# Up to this softcap a tanh that is exact to 2^-22 gives a logit that is exact to 2^-16: little
# beside the rounding to 8 bits.
ROUGH_SOFTCAP = 64.0
# The functions of Gluon that the kernels call, with the arguments that it passes by position: Gluon
# is not yet stable.
GLUON = {
    "warp_specialize": ("functions_and_args", "worker_num_warps", "worker_num_regs"),
    "allocate_shared_memory": ("element_ty", "shape", "layout"),
    "barrier": (),
    "shared_memory_descriptor.reinterpret": (),
    "hopper.warpgroup_mma": ("a", "b", "acc"),
    "hopper.mbarrier.wait": ("mbarrier", "phase"),
    "hopper.mbarrier.expect": ("mbarrier",),
    "hopper.tma.async_load": ("tensor_desc", "coord", "barrier", "result"),
    # Of `exact`'s kernel alone.
    "atomic_add": ("pointer", "val", "mask", "sem"),
    "hopper.fence_async_shared": (),
    "hopper.tma.store_wait": ("pendings",),
    "hopper.tma.async_store": ("tensor_desc", "coord", "src"),
}
# Names in older releases. `kernels/gluon_names.py` takes whichever of a pair is there.
FORMER = {
    "barrier": "thread_barrier",
    "shared_memory_descriptor.reinterpret": "shared_memory_descriptor._reinterpret",
    "hopper.tma.async_load": "hopper.tma.async_copy_global_to_shared",
    "hopper.tma.async_store": "hopper.tma.async_copy_shared_to_global",
}
# Releases of Triton with which tests/backends/triton/kernels/test_hopper.py compiles the kernel.
RELEASES = "3.6 to 3.9"


@functools.cache
def why_no_gluon() -> str | None:
    """Says why this Triton cannot compile the kernels; None if it can."""
    installed = f"triton {triton.__version__}"
    try:
        from triton._C.libtriton.gluon_ir import GluonOpBuilder
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    except ImportError as error:
        return f"{installed} has no Gluon: {error}"
    del TensorDescriptor
    for name, expected in GLUON.items():
        root, former = hopper if name.startswith("hopper.") else language, FORMER.get(name, name)
        function = None
        for each in (former, name):
            with contextlib.suppress(AttributeError):
                function = operator.attrgetter(each.removeprefix("hopper."))(root)
        if function is None:
            return f"{installed} has no {name} in Gluon"
        taken = tuple(inspect.signature(function).parameters)
        if taken[: len(expected)] != expected:
            return f"{installed}: {name} takes {taken}, and {expected} was expected"
    # See `gluon_names.async_add`.
    has_add = hasattr(GluonOpBuilder, "create_async_tma_reduce")
    return None if has_add else f"{installed} has no create_async_tma_reduce in Gluon"


def num_groups(weight: Tensor, tiles: KernelTiles) -> int:
    """Returns the number of splits that one program computes side by side; 1 where Hopper's kernel
    cannot run."""
    if interpreted() or weight.element_size() != 2 or tiles.columns < 256:
        return 1
    # Later architectures have other tensor cores.
    if torch.cuda.get_device_capability(weight.device)[0] != 9 or not takes_tma(weight):
        return 1
    reason = why_no_gluon()
    if reason is not None:
        warn_slower(
            f"Hopper's own kernels do not run: {reason}; install a Triton from "
            f"{RELEASES}, or the PyTorch that brings one"
        )
    return 1 if reason else 2


@dataclass(frozen=True)
class Groups:
    """The grid of a forward, Hopper's or the portable one, its tiles, and the filter."""

    programs: int
    groups: int  # splits of the vocabulary that a program computes side by side
    tiles: KernelTiles
    threshold: float  # as of `ColumnFilter`
    by_largest: bool

    @property
    def rows(self) -> int:
        """The rows of the weight in a tile of one group."""
        return self.tiles.columns // self.groups

    def descriptors(self, hidden: Tensor, weight: Tensor) -> tuple[Any, Any]:
        """Returns descriptors of both operands for the tiles of one group."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        def describe(matrix: Tensor, rows: int) -> Any:
            tile = [rows, self.tiles.dims]
            return TensorDescriptor.from_tensor(matrix, tile, layout_of(*tile, weight.dtype))

        return describe(hidden, TOKEN_BLOCK), describe(weight, self.rows)


def launch_forward(
    hidden: Tensor,
    weight: Tensor,
    head: Head,
    scale: float | Tensor,
    buffers: ForwardBuffers,
    count: Tensor,
    shape: Tensor,
    number: int,
    grouping: Groups,
    eight: EightBit | None,
    wanted: Wanted,
    segment: int,
) -> None:
    """Launches one of the forwards that `forward_kernel` numbers.

    Args:
        hidden: [N_padded, D] packed; of 8 bits with `eight`.
        weight: [V_local, D]; of 8 bits with `eight`.
        scale: factor of all logits, or, without `eight`, [N_padded] of each token's.
        count: [1] int32: tokens that count.
        shape: [3] int32: see `forward_kernel`.
        number: of the launch.
        segment: columns of a segment; 0: there is but one.
    """
    from cce_dist.backends.triton.kernels.forward.hopper import hopper_forward_kernel

    mass, tiles = buffers.mass, grouping.tiles
    start(hopper_forward_kernel, (grouping.programs,))(
        *grouping.descriptors(hidden, weight),
        count if head.bias is None else head.bias,
        count if eight is None else eight.of_columns,
        count if eight is None else eight.of_tokens,
        count,
        shape,
        buffers.lower,
        buffers.split_states,
        count if mass is None else mass,
        count if buffers.extras is None else buffers.extras,
        count if buffers.keys is None else buffers.keys,
        number,
        buffers.size,
        hidden.shape[0],
        weight.shape[0],
        weight.shape[1],
        scale,
        head.softcap or 1.0,
        grouping.threshold,
        BLOCK_N=TOKEN_BLOCK,
        ROWS=grouping.rows,
        BLOCK_D=tiles.dims,
        STAGES=tiles.stages,
        HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_SCORE=mass is not None,
        BY_LARGEST=grouping.by_largest,
        IS_SCREENED=eight is not None,
        FINE=head.softcap is not None and head.softcap > ROUGH_SOFTCAP,
        HAS_SURPLUS=wanted.entropy,
        HAS_SQUARES=wanted.sum_p2,
        HAS_ARGMAX=wanted.correct or wanted.moments,
        HAS_MOMENTS=wanted.moments,
        SEGMENT=segment,
        num_warps=4,
    )


@functools.cache
def layout_of(rows: int, columns: int, dtype: torch.dtype) -> object:
    """Returns the layout of a tile of an operand in shared memory."""
    from triton.experimental.gluon import language as gl

    elements = {
        torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
        torch.int8: gl.int8,
        torch.float8_e4m3fn: gl.float8e4nv,
        torch.float32: gl.float32,
    }
    return gl.NVMMASharedLayout.get_default_for([rows, columns], elements[dtype])
