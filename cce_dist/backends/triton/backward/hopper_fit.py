"""The conditions and the memory of Hopper's kernel for `exact`."""

from __future__ import annotations

import triton
from torch import Tensor

from cce_dist.backends.triton.forward.hopper import num_groups
from cce_dist.backends.triton.launch.arguments import padded_dim
from cce_dist.backends.triton.launch.tiles import KernelTiles
from cce_dist.options import TOKEN_BLOCK

# As in kernels/backward/exact_schedule.py: rows of a task's product.
ROWS = 256
# The fewest tiles of ROWS columns in a chunk beside the packed hidden states: each chunk reads and
# writes the whole hidden gradient.
LEAST_TILES = 4


def runs_on_hopper(
    weight: Tensor, tiles: KernelTiles, *, has_hidden: bool, has_bias_alone: bool
) -> bool:
    """Tells whether the kernel can compute these gradients. It sums a bias's gradient beside the
    weight's.

    Args:
        has_hidden: the hidden gradient is needed.
        has_bias_alone: the bias's gradient is needed, and the weight's is not.
    """
    # Rows of a padded weight may be aligned where the fp32 hidden gradient's are not.
    adds = not has_hidden or weight.shape[1] % 4 == 0
    return num_groups(weight, tiles) == 2 and adds and not has_bias_alone


def round_to_pairs(num_blocks: int) -> int:
    """Rounds the tokens of all blocks up to whole pairs of blocks."""
    return triton.cdiv(num_blocks * TOKEN_BLOCK, ROWS) * ROWS


def least_bytes(weight: Tensor, num_blocks: int) -> int:
    """Returns the bytes of the packed hidden states and of a chunk of LEAST_TILES."""
    tiles = min(LEAST_TILES, triton.cdiv(weight.shape[0], ROWS))
    chunk = round_to_pairs(num_blocks) * tiles * ROWS
    return weight.element_size() * (num_blocks * TOKEN_BLOCK * padded_dim(weight) + chunk)
