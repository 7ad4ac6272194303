"""Columns summed by group: the tail's centroids, and the mean column of label smoothing."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.kernels.filter.tail import centroid_kernel, merge_centroids_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import key_of, num_programs, tiles_for
from cce_dist.core.types import Head

# The most groups of token blocks: a group's dropped part is one product of marginals.
# docs/design/tail.md#the-marginals
TAIL_GROUPS = 16


def padded_groups(groups: int, has_mean: bool) -> int:
    """Returns the number of the tail's groups, of one model or two, and the mean logit's, rounded
    up to a size that a matrix product takes."""
    return 2 * TAIL_GROUPS if groups > TAIL_GROUPS or (groups and has_mean) else TAIL_GROUPS


def dims_of_centroids(weight: Tensor, padded: int, has_class_weight: bool) -> int:
    """Returns the dims of a task of `centroid_kernel`: as many as fit its shared memory."""
    dims = tiles_for(weight).tail_dims
    if not has_class_weight or weight.element_size() > 2:
        return dims
    # Triton 3.8 keeps the tile that class weights multiply in fp32 as well.
    if triton.__version__.startswith("3.8."):
        return dims // 4
    is_small = key_of(weight)[0] in ("sm80", "sm86")
    return dims // 2 if is_small and padded > TAIL_GROUPS else dims


def centroids(
    head: Head, weight: Tensor, share: Tensor | None, *, with_mean: bool, every: int = 1
) -> tuple[Tensor, Tensor, Callable[[], None]]:
    """Prepares each group's normalised sum of share_v C_v over columns; reads the weight once.

    Args: every: sums about each `every`-th tile of columns alone, as an estimate.
    Returns:
        [padded_groups, D] fp32: groups of `share`, then (with_mean) sum_v class_weight_v C_v.
        [padded_groups] fp32: 1 over each group's total share; 0 where that is 0, 1 for the mean.
        A function that launches the kernels that fill these two.
    """
    num_columns, dim = weight.shape
    groups = 0 if share is None else share.shape[0]
    padded = padded_groups(groups, with_mean)
    has_class_weight = with_mean and head.class_weight is not None
    block_v, block_d = 128, dims_of_centroids(weight, padded, has_class_weight)
    slices = triton.cdiv(dim, block_d)
    tiles = triton.cdiv(num_columns, block_v)
    splits = max(1, min(tiles, 2 * num_programs(weight) // slices))
    part = weight.new_empty(splits, padded, dim, dtype=torch.float32)
    seen = weight.new_empty(splits, padded, dtype=torch.float32)
    total = weight.new_empty(slices * splits, padded, dtype=torch.float32)
    sum_up = functools.partial(
        start(centroid_kernel, (slices, splits)),
        weight,
        total if share is None else share,
        head.class_weight if has_class_weight else total,
        part,
        seen,
        total,
        num_columns,
        dim,
        groups,
        # A rank with few columns takes a larger share of its tiles: at least two a split.
        max(1, min(every, tiles // (2 * splits))),
        weight.stride(0),
        BLOCK_V=block_v,
        BLOCK_D=block_d,
        GROUPS=padded,
        PRECISION="tf32" if weight.element_size() == 2 else "ieee",
        HAS_TAIL=share is not None,
        HAS_MEAN=with_mean,
        HAS_CLASS_WEIGHT=has_class_weight,
    )
    centroid = weight.new_empty(padded, dim, dtype=torch.float32)
    inverse = weight.new_empty(padded, dtype=torch.float32)
    merge = functools.partial(
        start(merge_centroids_kernel, (padded, slices)),
        part,
        seen,
        total,
        centroid,
        inverse,
        dim,
        groups,
        splits,
        BLOCK_D=block_d,
        GROUPS=padded,
        LANES=256,
    )

    def launch() -> None:
        sum_up()
        merge()

    return centroid, inverse, launch


def mean_column(head: Head, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sum_v class_weight_v C_v [D] in fp32."""
    centroid, inverse, launch = centroids(head, weight, None, with_mean=True)
    launch()
    return centroid[0], inverse
