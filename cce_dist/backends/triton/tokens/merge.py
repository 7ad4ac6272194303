"""The merge of the ranks' lse and target logits: two kernels, where torch takes some forty."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.kernels.tokens.merge import merge_ranks_kernel, pack_stats_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.core.stats import MergeKernels
from cce_dist.ranks.merge_header import DIGIT, LEAST_SPREAD, LEAST_TOKENS, LOOK_AT, NUM_DIGITS, SAME

BLOCK = 256


def pack_lse_and_target(lse: Tensor, target_logit: Tensor, header: Sequence[int]) -> Tensor:
    """Packs lse [N], target logit [N] and eight numbers below 2^24 into [8 + 2 N] fp32."""
    out = lse.new_empty(NUM_DIGITS + 2 * len(lse))
    start(pack_stats_kernel, (max(triton.cdiv(len(lse), BLOCK), 1),))(
        lse.contiguous(),
        target_logit.contiguous(),
        out,
        len(lse),
        *(float(number) for number in header),
        BLOCK_N=BLOCK,
    )
    return out


def merge_lse_and_target(
    parts: Tensor,  # [W, 8 + 2 N] fp32: header, lse, target logit
    count: Tensor | None,  # [1] int32: tokens that count
) -> tuple[Tensor, Tensor]:
    """Merges the shards as `stats.merge_parts`; checks their headers as `merge_header.is_sound`.

    Returns: lse and target logit, [2, N], 0 for tokens that don't count; [1] int32: 1 if the ranks'
        parts belong together.
    """
    ranks, stride = parts.shape
    num_tokens = (stride - NUM_DIGITS) // 2
    out = parts.new_empty(2, num_tokens)
    sound = torch.empty(1, dtype=torch.int32, device=parts.device)
    start(merge_ranks_kernel, (triton.cdiv(num_tokens, BLOCK) + 1,))(
        parts,
        sound if count is None else count,
        out,
        sound,
        ranks,
        num_tokens,
        stride,
        BLOCK_N=BLOCK,
        BLOCK_RANKS=triton.next_power_of_2(ranks),
        DIGIT=DIGIT,
        HAS_COUNT=count is not None,
        LOOK_AT=LOOK_AT,
        LEAST_TOKENS=LEAST_TOKENS,
        SAME=SAME,
        LEAST_SPREAD=LEAST_SPREAD,
    )
    return out, sound


KERNELS = MergeKernels(pack_lse_and_target, merge_lse_and_target)
