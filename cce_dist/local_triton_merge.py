"""The merge of the ranks' lse and target logits: two kernels, where torch takes some forty."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from cce_dist.kernels.merge import merge_kernel, pack_stats_kernel
from cce_dist.local_triton_launch import start
from cce_dist.partials import MergeKernels

BLOCK = 256


def pack_lse_and_target(lse: Tensor, target_logit: Tensor, numbers: Sequence[int]) -> Tensor:
    """[N], [N], six numbers below 2^24 -> [2 N + 6] fp32."""
    out = lse.new_empty(2 * len(lse) + 6)
    start(pack_stats_kernel, (max(triton.cdiv(len(lse), BLOCK), 1),))(
        lse.contiguous(),
        target_logit.contiguous(),
        out,
        len(lse),
        *(float(number) for number in numbers),
        BLOCK_N=BLOCK,
    )
    return out


def merge_lse_and_target(
    parts: Tensor,  # [W, 2 N + 6] fp32: lse, target logit, the shard's bounds as three pairs
    count: Tensor | None,  # [1] int32: tokens that count
    digit: int,  # what the first of a pair is multiplied by
) -> tuple[Tensor, Tensor]:
    """lse and target logit of all shards [2, N], 0 where no token counts; whether the shards tile
    the vocabulary, [1] int32. As `partials.merge_parts`."""
    ranks, stride = parts.shape
    num_tokens = (stride - 6) // 2
    out = parts.new_empty(2, num_tokens)
    tiles = torch.empty(1, dtype=torch.int32, device=parts.device)
    start(merge_kernel, (triton.cdiv(num_tokens, BLOCK) + 1,))(
        parts,
        tiles if count is None else count,
        out,
        tiles,
        ranks,
        num_tokens,
        stride,
        BLOCK_N=BLOCK,
        BLOCK_RANKS=triton.next_power_of_2(ranks),
        DIGIT=digit,
        HAS_COUNT=count is not None,
    )
    return out, tiles


KERNELS = MergeKernels(pack_lse_and_target, merge_lse_and_target)
