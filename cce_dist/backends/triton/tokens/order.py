"""An order of the tokens in which similar tokens stand side by side."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.kernels.tokens.sort_tokens import order_kernel
from cce_dist.backends.triton.kernels.tokens.token_keys import SEEDS, similar_kernel
from cce_dist.backends.triton.launch.arguments import rows_of, with_unit_inner_stride
from cce_dist.backends.triton.launch.start import is_compiling_only, start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.core.types import Tokens

# The most tokens for `order_kernel`, whose work grows with their square; torch sorts more.
MOST_COUNTED = 2**16


def similar_order(tokens: Tokens) -> Tensor:
    """Returns an order in which tokens of similar hidden states stand side by side, those that
    count before those that don't, [N] int64. docs/design/forward.md#the-order-of-tokens."""
    return in_similar_order(tokens)[1]


def in_similar_order(tokens: Tokens) -> tuple[Tokens, Tensor]:
    """Returns the tokens in `similar_order`, and that order."""
    rows, count = rows_of(tokens)
    key, tally = similar_keys(tokens.hidden, rows, count)
    num_tokens = len(tokens)
    if num_tokens > MOST_COUNTED:
        order = torch.sort(key, stable=True).indices
        return tokens.reordered(order), order
    order = torch.empty(num_tokens, dtype=torch.int64, device=rows.device)
    if is_compiling_only():
        # torch's kernels run even then, and read the order.
        torch.arange(num_tokens, out=order)
    # Where a token's row is its number, rows and order are one tensor, written twice.
    ordered_rows = order if tokens.rows is None else torch.empty_like(rows)
    targets = tokens.local_targets.contiguous()
    ordered_targets = torch.empty_like(targets)
    # The interpreter takes few tallies at a time, so that some tests have several times.
    block, parts = (2 * part_tokens(), 4) if interpreted() else (128, 128)
    start(order_kernel, (triton.cdiv(num_tokens, block),))(
        key,
        tally,
        rows,
        targets,
        order,
        ordered_rows,
        ordered_targets,
        num_tokens,
        PART=part_tokens(),
        PARTS=parts,
        BLOCK=block,
        num_warps=8,
    )
    scale = None if tokens.scale is None else tokens.scale.index_select(0, order)
    return Tokens(tokens.hidden, ordered_rows, ordered_targets, tokens.count, scale=scale), order


def part_tokens() -> int:
    """Returns the tokens of one program of `similar_kernel`."""
    return 512 if interpreted() else 32


def similar_keys(hidden: Tensor, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each token's key of `similar_kernel`, [N] uint8, and how many of each `part_tokens`
    tokens have each key, [parts, SEEDS] int16."""
    hidden = with_unit_inner_stride(hidden)
    num_tokens, parts = rows.shape[0], triton.cdiv(rows.shape[0], part_tokens())
    key = torch.empty(num_tokens, dtype=torch.uint8, device=hidden.device)
    tally = torch.empty(parts, SEEDS.value, dtype=torch.int16, device=hidden.device)
    start(similar_kernel, (parts,))(
        hidden,
        rows,
        count,
        key,
        tally,
        num_tokens,
        hidden.shape[1],
        hidden.stride(0),
        BLOCK_N=part_tokens(),
        BLOCK_D=128,
        PRECISION="ieee",
    )
    return key, tally
