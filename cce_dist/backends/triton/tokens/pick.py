"""Tokens that count, and their targets' places: three kernels, where torch takes some thirty."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.kernels.tokens.compact_tokens import (
    count_kernel,
    place_kernel,
    require_in_range_kernel,
)
from cce_dist.backends.triton.launch.start import compile_together, start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.core.types import Picked
from cce_dist.vocab_shard import VocabShard

BLOCK = 1024


def pick_on_device(ids: Tensor, ignore_index: int, shard: VocabShard) -> Picked:
    """Moves the ids, of [N] int64 with N > 0, that are not ignored to the front. The host doesn't
    wait: a target that is no class fails an assertion on the device, unless kernels are
    interpreted."""
    pick = functools.partial(_pick_and_check, ids, ignore_index, shard)
    compile_together(("pick", ids.device, ignore_index, shard), ids.device, pick)
    return pick()


def _pick_and_check(ids: Tensor, ignore_index: int, shard: VocabShard) -> Picked:
    picked = pick_unchecked(ids, ignore_index, shard)
    if interpreted():
        return picked
    start(require_in_range_kernel, (1,))(picked.in_range, num_warps=1)
    return picked._replace(in_range=True)


def pick_unchecked(ids: Tensor, ignore_index: int, shard: VocabShard) -> Picked:
    ids = ids.contiguous()
    size, device = ids.shape[0], ids.device
    grid = (triton.cdiv(size, BLOCK),)

    def new(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    parts = new(2, *grid, dtype=torch.int32)
    start(count_kernel, grid)(ids, parts, size, ignore_index, shard.vocab_size, BLOCK=BLOCK)
    counts = new(size, dtype=torch.bool)
    picked = Picked(
        targets=new(size, dtype=torch.int64),
        rows=new(size, dtype=torch.int64),
        count=new(1, dtype=torch.int32),
        counts=counts,
        local_targets=new(size, dtype=torch.int32),
        in_range=new(1, dtype=torch.int32),
        number=new(1, dtype=torch.float32),
    )
    start(place_kernel, grid)(
        ids,
        parts,
        picked.rows,
        picked.targets,
        picked.local_targets,
        counts.view(torch.uint8),
        picked.count,
        picked.in_range,
        picked.number,
        size,
        ignore_index,
        shard.start,
        shard.num_classes,
        BLOCK=BLOCK,
    )
    return picked
