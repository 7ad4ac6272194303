"""`exact`: the three products of every column, chunk by chunk of the vocabulary.

Chunks, allocations, grids, launches.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.backward.state import Backward, GradBuffers
from cce_dist.backends.triton.filter.kept_logits import Region, tiles_in
from cce_dist.backends.triton.filter.lists import TILE
from cce_dist.backends.triton.kernels.backward.exact_logits import (
    exact_logits_kernel,
    exact_targets_kernel,
)
from cce_dist.backends.triton.kernels.backward.exact_products import exact_products_kernel
from cce_dist.backends.triton.launch.arguments import descriptor_of, padded_dim
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import (
    REST,
    WHOLE,
    cached_blocks,
    num_programs,
    rounds_exp2,
    takes_tma,
)
from cce_dist.options import TOKEN_BLOCK

# Multiprocessors that the last DDS leaves to NCCL's kernels, which start after it.
LEFT_TO_COLLECTIVES = 32


def products_of_every_column(run: Backward, grads: GradBuffers) -> Callable[[int], None]:
    """Prepares SDD, then DDS and DSD, of one chunk after the other.

    Returns: a function that launches them, or a part: `REST` is the last chunk's DDS.
    """
    weight, table, of_tokens = run.weight, run.table, run.of_tokens
    padded = run.num_blocks * TOKEN_BLOCK
    hidden = weight.new_empty(padded, padded_dim(weight))[:, : weight.shape[1]]
    # In the order of the blocks. Those that don't count have d_logits of 0.
    torch.index_select(run.hidden, 0, of_tokens.read_rows, out=hidden)
    regions = list(_chunks(run))
    # A pointer for each launch that is aligned as the first one's: one binary for all.
    queue = torch.zeros(len(regions) + 1, 4, dtype=torch.int32, device=weight.device)
    use_tma, block_k = takes_tma(weight), table.dims
    common = run.product_arguments(grads)

    def dds_and_dsd(index: int, region: Region, part: int) -> None:
        left = LEFT_TO_COLLECTIVES if part == REST else 0
        start(exact_products_kernel, (max(1, num_programs(weight) - left),))(
            **common,
            hidden=descriptor_of(hidden, block_k, table.columns, use_tma),
            weight=descriptor_of(weight, block_k, table.columns, use_tma),
            workspace_columns=descriptor_of(region.memory, TILE, block_k, use_tma),
            workspace_tokens=descriptor_of(region.memory, block_k, TOKEN_BLOCK, use_tma),
            workspace_ptr=region.memory,
            row_ptr=of_tokens.rows,
            queue_ptr=queue[index + 1 if part == REST else index],
            part=part,
            first_column=region.first_column,
            num_columns=region.num_columns,
            rows=region.memory.shape[0],
            N=padded,
            stride_hn=hidden.stride(0),
            SLICE=table.columns,
            BLOCK_K=block_k,
            USE_TMA=use_tma,
            IS_FIRST=index == 0,
            num_warps=table.warps,
            num_stages=table.stages,
        )

    def launch(part: int) -> None:
        last = len(regions) - 1
        if part == REST:
            dds_and_dsd(last, regions[last], part)
            return
        for index, region in enumerate(regions):
            _d_logits(run, hidden, region)
            dds_and_dsd(index, region, part if index == last else WHOLE)

    return launch


# fp16 holds the difference to a reference that is not further below lse (log2) with an error of
# 2^-8 at most where p is large, as bf16 holds p; and no such difference overflows.
FURTHEST = 16.0


def _blocks_of_bad_ref(run: Backward, ref: Tensor) -> Tensor:
    """Returns [num_blocks + 1] int32: 1 for blocks with a token whose reference was a poor bound
    of lse (a sum had overflowed, or nothing was seen yet), then whether there is any."""
    lse = run.of_tokens.factors[5]
    counts = torch.arange(len(lse), device=lse.device) < run.count
    bad_ref = counts & ~((lse - ref).abs() <= FURTHEST)
    bad_ref = bad_ref.view(-1, TOKEN_BLOCK).any(1)
    return torch.cat([bad_ref, bad_ref.any(0, keepdim=True)]).int()


def _arguments(run: Backward, region: Region) -> dict[str, Any]:
    """Returns the arguments of the kernels that make d_logits."""
    head, of_tokens = run.head, run.of_tokens
    return {
        "workspace_ptr": region.memory,
        "class_weight_ptr": run.or_dummy(head.class_weight),
        "upstream_ptr": of_tokens.factors,
        "first_column": region.first_column,
        "num_columns": region.num_columns,
        "N": region.memory.shape[1],
        "scale": of_tokens.scale,
        "softcap": head.softcap or 1.0,
        "BLOCK_N": TOKEN_BLOCK,
        "WIDE": rounds_exp2(run.weight),
        "HAS_SOFTCAP": head.softcap is not None,
        "HAS_ENTROPY": run.has_entropy,
        "HAS_SMOOTH": run.has_smooth,
        "HAS_CLASS_WEIGHT": head.class_weight is not None,
    }


def _d_logits(run: Backward, hidden: Tensor, region: Region) -> None:
    bad_ref = None if region.ref is None else _blocks_of_bad_ref(run, region.ref)
    if bad_ref is not None:
        _launch_logits(run, hidden, region, bad_ref, has_logits=True)
    _launch_logits(run, hidden, region, bad_ref)
    start(exact_targets_kernel, (run.num_blocks,))(
        **_arguments(run, region), target_ptr=run.of_tokens.targets
    )


def _launch_logits(
    run: Backward,
    hidden: Tensor,
    region: Region,
    bad_ref: Tensor | None,
    *,
    has_logits: bool = False,
) -> None:
    weight, head, table = run.weight, run.head, run.table
    # Logits that are there already take no product, and a smaller tile.
    columns = table.dims if has_logits else table.columns
    use_tma = takes_tma(weight)
    start(exact_logits_kernel, (num_programs(weight) * (4 if has_logits else 1),))(
        hidden=descriptor_of(hidden, TOKEN_BLOCK, table.dims, use_tma),
        weight=descriptor_of(weight, columns, table.dims, use_tma),
        workspace=descriptor_of(region.memory, columns, TOKEN_BLOCK, use_tma),
        **_arguments(run, region),
        bad_ref_ptr=run.or_dummy(bad_ref),
        ONLY_BAD_REF=bad_ref is not None and not has_logits,
        logit_ptr=region.as_logits(),
        ref_ptr=run.or_dummy(region.ref),
        bias_ptr=run.or_dummy(head.bias),
        count_ptr=run.count,
        cached_blocks=cached_blocks(weight, weight.element_size()),
        V=weight.shape[0],
        D=weight.shape[1],
        stride_hn=hidden.stride(0),
        stride_wv=weight.stride(0),
        BLOCK_V=columns,
        BLOCK_D=table.dims,
        USE_TMA=use_tma,
        PRECISION="ieee",
        HAS_LOGITS=has_logits,
        HAS_BIAS=head.bias is not None,
        num_warps=table.warps,
        # The tile that is stored through a descriptor needs room of its own.
        num_stages=max(2, table.stages - 1),
    )


def _chunks(run: Backward) -> Iterator[Region]:
    """Yields the regions that the forward kept, then others in chunks that fit the workspace."""
    weight, kept = run.weight, run.logits
    columns, padded = run.table.columns, run.num_blocks * TOKEN_BLOCK
    left, memory = weight.shape[0], None
    if kept is not None:
        yield from kept.regions
        left, memory = kept.first_column, kept.workspace
    num_tiles = triton.cdiv(left, columns)
    if num_tiles == 0:
        return
    room = max(1, tiles_in(run.room, weight, padded))
    if memory is not None:
        room = memory.shape[0] // columns
    per_chunk = choose_tiles_per_chunk(num_tiles, room, run.num_blocks, num_programs(weight))
    if memory is None:
        memory = weight.new_empty(per_chunk * columns, padded)
    for tile in range(0, num_tiles, per_chunk):
        first = tile * columns
        yield Region(first, min(per_chunk * columns, left - first), memory)


def choose_tiles_per_chunk(num_tiles: int, room: int, num_blocks: int, programs: int) -> int:
    """Chooses the tiles of a chunk: of the larger half of those that fit the number whose SDD tasks
    fill whole waves best."""
    if room >= num_tiles:
        return num_tiles

    def waste(tiles: int) -> float:
        tasks = tiles * num_blocks
        return triton.cdiv(tasks, programs) * programs / tasks

    return min(range(room, max(1, room // 2) - 1, -1), key=waste)
