"""Lists that hold most columns: the device computes every column instead, which takes less time.

A flat softmax, as in the first steps of training, keeps all columns of a small vocabulary. The
kernels of the lists then do nothing, and `hopper_exact_kernel` computes exact gradients in the
workspace of the lists. Where lists are short, that kernel ends at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.backward.exact import gather_hidden
from cce_dist.backends.triton.backward.hopper_exact import HopperMemory, products_on_hopper
from cce_dist.backends.triton.backward.hopper_fit import ROWS, least_bytes, round_to_pairs
from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.filter.lists import Lists
from cce_dist.backends.triton.launch.arguments import padded_dim
from cce_dist.backends.triton.launch.tiles import AFTER_HIDDEN
from cce_dist.options import TOKEN_BLOCK


def products_if_long(
    state: BackwardState,
    lists: Lists,
    grads: GradBuffers,
    workspace: Tensor,
    queue: Tensor,
    left: int,
) -> Callable[[int], None]:
    """Prepares the products of every column for the case that lists are too long.

    Args:
        workspace: of the lists, [.., 128], which the kernels of the lists do not use in that case.
        queue: [8] int32 zeros.
        left: multiprocessors that are left to other kernels.
    Returns: a function that launches a stage of them.
    """
    hidden, chunk = _places(state, workspace.flatten())
    memory = HopperMemory(hidden, chunk, queue, torch.empty_like(state.count))
    launch_products = products_on_hopper(state, grads, memory, left)

    def launch(stage: int) -> None:
        if stage != AFTER_HIDDEN:
            gather_hidden(state, hidden, (lists.num_chunks, memory.count))
        launch_products(stage)

    return launch


def _places(state: BackwardState, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the places of the packed hidden states and of a chunk's d_logits in the memory."""
    weight, dim = state.weight, padded_dim(state.weight)
    least_numel = least_bytes(weight, state.num_blocks) // weight.element_size()
    # While kernels are only compiled, the workspace may be that of a few tokens.
    memory = memory if memory.numel() >= least_numel else weight.new_empty(least_numel)
    padded, rows = state.num_blocks * TOKEN_BLOCK, round_to_pairs(state.num_blocks)
    hidden, rest = memory[: padded * dim].view(padded, dim), memory[padded * dim :]
    tiles = min(rest.numel() // rows // ROWS, triton.cdiv(weight.shape[0], ROWS))
    return hidden[:, : weight.shape[1]], rest[: rows * tiles * ROWS].view(rows, tiles * ROWS)
