"""Tiles of the logits in eager torch: their sizes, their computation, products that accumulate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cce_dist.core.types import Head, Tokens, accumulate_dtype
from cce_dist.options import TOKEN_BLOCK

# A CPU tile of 512 x 2048 fp32 (4 MiB) stays in the last-level cache between its five passes, and
# its matrix products run as fast as those of larger tiles.
CPU_TOKENS, CPU_COLUMNS = 512, 2048
GPU_TOKENS, GPU_COLUMNS = 4096, 8192
# Takes first and last column, then first and last token; returns (z, softcap'(z)) of the tile,
# which the caller may overwrite.
LogitTiles = Callable[[int, int], Callable[[int, int], tuple[Tensor, Tensor | None]]]
# Tiles in memory at once: z, softcap's slope, the gradient, and one temporary.
TILES_ALIVE = 4


def operand_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype in which matrix products read their operands.

    16-bit tensors stay 16-bit on a GPU, whose products accumulate in fp32. A CPU's 16-bit product
    would round its result to 16 bits, so there operands are widened.
    """
    if tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.dtype
    return accumulate_dtype(tensor.dtype)


@dataclass(frozen=True)
class TileSize:
    """Token chunks (a multiple of 128, the block of the filter) and vocabulary columns."""

    tokens: int
    columns: int

    @classmethod
    def choose(cls, weight: Tensor, workspace_bytes: int) -> TileSize:
        tokens, columns = (GPU_TOKENS, GPU_COLUMNS) if weight.is_cuda else (CPU_TOKENS, CPU_COLUMNS)
        budget = workspace_bytes // (TILES_ALIVE * accumulate_dtype(weight.dtype).itemsize)
        # At least four tiles cover the shard, so that not even a small one is held whole.
        columns = min(columns, max(16, -(-weight.shape[0] // 4)))
        columns = max(1, min(columns, budget // TOKEN_BLOCK))
        tokens = max(TOKEN_BLOCK, min(tokens, budget // columns) // TOKEN_BLOCK * TOKEN_BLOCK)
        return cls(tokens, columns)

    @classmethod
    def tallest(cls, weight: Tensor, num_tokens: int, elements: int) -> TileSize:
        """Returns tiles of at most so many elements, of as many tokens as may be.

        Products that sum over a tile's columns, or its tokens, then have many rows.
        """
        tokens, columns = (GPU_TOKENS, GPU_COLUMNS) if weight.is_cuda else (CPU_TOKENS, CPU_COLUMNS)
        # At least four tiles cover the shard, as in `choose`.
        columns = min(columns, max(16, -(-weight.shape[0] // 4)))
        tokens = min(tokens, max(TOKEN_BLOCK, elements // 16 // TOKEN_BLOCK * TOKEN_BLOCK))
        # Chunks of one size.
        chunks = max(1, -(-num_tokens // tokens))
        tokens = -(-max(1, num_tokens) // (chunks * TOKEN_BLOCK)) * TOKEN_BLOCK
        columns = max(1, min(columns, elements // tokens))
        return cls(
            tokens, columns if columns < TOKEN_BLOCK else columns // TOKEN_BLOCK * TOKEN_BLOCK
        )

    @classmethod
    def invariant(cls, num_columns: int) -> TileSize:
        """Returns a size that follows from the columns alone, for `whole_blocks`."""
        return cls(TOKEN_BLOCK, max(1, min(CPU_COLUMNS, num_columns)))


def whole_blocks(tokens: Tokens) -> Tokens:
    """Returns the tokens, packed, and tokens of zeros after them up to a multiple of 128. A
    product's rows depend on their number, if not on each other."""
    num_tokens = len(tokens)
    missing = -num_tokens % TOKEN_BLOCK
    hidden = tokens.take(0, num_tokens)
    scale = tokens.scale
    return Tokens(
        hidden=torch.cat([hidden, hidden.new_zeros(missing, hidden.shape[1])]),
        rows=None,
        local_targets=torch.nn.functional.pad(tokens.local_targets, (0, missing), value=-1),
        scale=None if scale is None else torch.nn.functional.pad(scale, (0, missing), value=1.0),
    )


def spans(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of consecutive chunks."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b, accumulated and returned in `accumulate_dtype`."""
    wanted = accumulate_dtype(a.dtype)
    if a.dtype == wanted:
        return a @ b
    return torch.mm(a, b, out_dtype=wanted)


# With a factor of 1 cuBLAS rounds a product to 16 bits before it adds it, on Hopper: twice. This
# factor of the earlier sum is 1 in 16 bits.
NEARLY_ONE = 1 - 2**-24


def add_product(out: Tensor, a: Tensor, b: Tensor, scale: Tensor | None = None) -> None:
    """Adds scale * (a @ b) to out in its dtype, rounded once; `scale` undoes the operand scaling of
    fp16."""
    wanted = accumulate_dtype(a.dtype)
    if scale is None and a.dtype == out.dtype:
        out.addmm_(a, b, beta=NEARLY_ONE if out.element_size() == 2 else 1)
    elif scale is None and a.dtype != wanted == out.dtype:
        torch.addmm(out, a, b, out_dtype=wanted, out=out)
    else:
        result = product(a, b)
        out.add_(result if scale is None else result * scale)


def put_product(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """Writes a @ b to `out`, or adds it. `out` has the operands' dtype or is fp32."""
    if accumulate:
        add_product(out, a, b)
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def squash(
    x: Tensor,  # [n, columns]
    head: Head,
    scale: Tensor | None = None,  # [n], see `Tokens.scale`
    *,
    wants_slope: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Turns E . C + bias into (z, softcap'(z)), in place; the slope is None without a softcap, and
    if it is not wanted."""
    slope = None
    if head.softcap is not None:
        x = x.div_(head.softcap).tanh_()
        slope = 1 - x * x if wants_slope else None
        x = x.mul_(head.softcap)
    if head.logit_scale != 1:
        x = x.mul_(head.logit_scale)
    return (x if scale is None else x.mul_(scale[:, None])), slope


def logits_tile(
    hidden: Tensor,  # [n, D] in operand_dtype
    weight: Tensor,  # [columns, D] in operand_dtype
    bias: Tensor | None,  # [columns]
    head: Head,
    scale: Tensor | None = None,  # [n], see `Tokens.scale`
    *,
    wants_slope: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes (z, softcap'(z)) of some tokens and columns, [n, columns] in accumulate_dtype."""
    x = product(hidden, weight.T)
    if bias is not None:
        x.add_(bias.to(x.dtype))
    return squash(x, head, scale, wants_slope=wants_slope)


def exact_tiles(tokens: Tokens, head: Head, *, wants_slope: bool = True) -> LogitTiles:
    """Returns a function that computes tiles of the exact logits."""
    operands = operand_dtype(head.weight)

    def of_columns(v0: int, v1: int) -> Callable[[int, int], tuple[Tensor, Tensor | None]]:
        columns = head.weight[v0:v1].to(operands)
        bias = None if head.bias is None else head.bias[v0:v1]

        def of_tokens(i0: int, i1: int) -> tuple[Tensor, Tensor | None]:
            hidden = tokens.take(i0, i1).to(operands)
            scale = tokens.scale_of(i0, i1)
            return logits_tile(hidden, columns, bias, head, scale, wants_slope=wants_slope)

        return of_tokens

    return of_columns


def sum_over_blocks(scale: Tensor, values: Tensor) -> Tensor:
    """Sums scale_i values_iv over each block of 128 tokens: [n], [n, C] -> [blocks, C]."""
    full = scale.shape[0] // TOKEN_BLOCK
    whole, remainder = full * TOKEN_BLOCK, scale.shape[0] - full * TOKEN_BLOCK
    sums = torch.bmm(
        scale[:whole].view(full, 1, TOKEN_BLOCK),
        values[:whole].view(full, TOKEN_BLOCK, values.shape[1]),
    )[:, 0]
    if not remainder:
        return sums
    return torch.cat([sums, (scale[whole:, None] * values[whole:]).sum(0, keepdim=True)])


def max_over_blocks(values: Tensor) -> Tensor:
    """Returns the largest value of each block of 128 tokens, [n, ...] -> [blocks, ...]."""
    return torch.stack([block.amax(0) for block in values.split(TOKEN_BLOCK)])


def find_targets(local_targets: Tensor, columns: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Finds tokens whose target is among the columns, and its position there."""
    if isinstance(columns, slice):
        inside = (local_targets >= columns.start) & (local_targets < columns.stop)
        rows = inside.nonzero()[:, 0]
        return rows, local_targets[rows] - columns.start
    if columns.shape[0] == 0:
        return columns, columns
    at = torch.searchsorted(columns, local_targets.clamp_min(0)).clamp_max(columns.shape[0] - 1)
    rows = ((columns[at] == local_targets) & (local_targets >= 0)).nonzero()[:, 0]
    return rows, at[rows]
