"""The k largest logits of each token, in eager torch: a tile at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist.backends.protocol import Room
from cce_dist.backends.torch.tiles import TileSize, logits_tile, operand_dtype, spans
from cce_dist.core.types import Head, Tokens, accumulate_dtype


def top(tokens: Tokens, head: Head, room: Room, k: int) -> tuple[Tensor, Tensor]:
    """Returns each token's k largest logits, falling, and their columns, int64, [N, k] each. Of
    equal logits the first column comes first. -inf and -1 where there are fewer columns. A NaN is
    larger than any number. `Tokens.scale` is not read. Not differentiable."""
    weight, size = head.weight, TileSize.choose(head.weight, room.workspace_bytes)
    dtype, shape = accumulate_dtype(weight.dtype), (len(tokens), k)
    values = weight.new_full(shape, -torch.inf, dtype=dtype)
    columns = torch.full(shape, -1, dtype=torch.int64, device=weight.device)
    for start, stop in spans(len(tokens), size.tokens):
        hidden = tokens.take(start, stop).to(operand_dtype(weight))
        for first, last in spans(weight.shape[0], size.columns):
            part = weight[first:last].to(operand_dtype(weight))
            bias = None if head.bias is None else head.bias[first:last]
            z, at = first_largest(logits_tile(hidden, part, bias, head, wants_slope=False)[0], k)
            # What was found before has lower columns.
            z, at = (
                torch.cat([values[start:stop], z], 1),
                torch.cat([columns[start:stop], at + first], 1),
            )
            values[start:stop], best = first_largest(z, k)
            columns[start:stop] = at.gather(1, best)
    return values, columns.masked_fill(values == -torch.inf, -1)


def first_largest(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the at most k largest of each row of z [n, m], falling, and their places. Of equal
    numbers the first place comes first, which torch.topk leaves open."""
    k = min(k, z.shape[1])
    if z.dtype == torch.float64:
        value, at = torch.sort(z, dim=1, descending=True, stable=True)
        return value[:, :k], at[:, :k]
    # An int64 of the number's bits, ordered as numbers are, and of its place. -0 becomes 0, and
    # each NaN the same one.
    bits = torch.where(z.isnan(), torch.nan, z + 0.0).view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    key += torch.arange(z.shape[1] - 1, -1, -1, device=z.device)
    at = torch.topk(key, k, dim=1).indices
    return z.gather(1, at), at
