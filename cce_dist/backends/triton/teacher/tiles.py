"""Launches of the kernels of tiles of two models' logits.

The logits are products of the library's; a kernel reads a tile once.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.kernels.teacher.merge import (
    BEFORE,
    merge_sums_kernel,
    pack_sums_kernel,
)
from cce_dist.backends.triton.kernels.teacher.tiles import (
    FORWARD_KL,
    JSD,
    REVERSE_KL,
    TVD,
    tile_gradient_kernel,
    tile_sums_kernel,
    tile_terms_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.ranks.merge_header import DIGIT, LEAST_SPREAD, LEAST_TOKENS, LOOK_AT, SAME

KINDS = {
    "forward_kl": FORWARD_KL.value,
    "reverse_kl": REVERSE_KL.value,
    "jsd": JSD.value,
    "tvd": TVD.value,
}
# Columns that a program has at once, and a warp of it.
COLUMNS, WARP_COLUMNS = 2048, 256
# Tokens of a program that merges the ranks' sums, and numbers of one that packs them.
MERGED_TOKENS, PACKED_NUMBERS = 128, 1024


@dataclass(frozen=True)
class TileKernels:
    """The kernels of one divergence at one temperature."""

    divergence: str
    beta: float
    temperature: float

    def add_sums(
        self,
        z: Tensor,  # [n, columns] fp32, the student's logits at temperature 1
        y: Tensor,  # [n, columns] fp32, the teacher's
        first: int,  # column of the shard; at 0 the sums are written, and not read
        sums: Tensor,  # [3 or 5, n] fp32, rows as of `FirstPass`
        targets: Tensor | None,  # [n] local ids; None: there are three rows
    ) -> None:
        """Merges a tile's sums with those of the tiles before it."""
        start(tile_sums_kernel, (len(z),))(
            z,
            y,
            sums if targets is None else targets,
            sums,
            first,
            z.shape[1],
            z.stride(0),
            y.stride(0),
            sums.stride(0),
            1 / self.temperature,
            KIND=KINDS[self.divergence],
            HAS_TARGETS=targets is not None,
            **self._block(z),
        )

    def pack(self, sums: Tensor, full: Tensor | None, header: Sequence[int]) -> Tensor:
        """Packs a rank's message, [9 + 3 N or 5 N]: header, `full` [1] or 1, sums [3 or 5, N]."""
        length = sums.numel()
        out = sums.new_empty(BEFORE.value + length)
        start(pack_sums_kernel, (max(1, triton.cdiv(length, PACKED_NUMBERS)),))(
            sums,
            sums if full is None else full,
            out,
            length,
            *(float(number) for number in header),
            HAS_FULL=full is not None,
            BLOCK=PACKED_NUMBERS,
        )
        return out

    def merge(self, parts: Tensor) -> Tensor:
        """Merges the ranks' sums, [W, 3 or 5, N], as `Divergences.merge`: [3 or 5, N]."""
        out = parts.new_empty(parts.shape[1:])
        self._merge(parts, out, None)
        return out

    def merge_messages(self, messages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Merges what `pack` returned on each rank, [W, 9 + rows N], rows 3 or 5.

        Returns: the merged sums, [rows, N]; [1] int32: 1 if they are those of one softmax.
        """
        out = messages.new_empty(rows, (messages.shape[1] - BEFORE.value) // rows)
        sound = torch.empty(1, dtype=torch.int32, device=messages.device)
        self._merge(messages, out, sound)
        return out, sound

    def _merge(self, parts: Tensor, out: Tensor, sound: Tensor | None) -> None:
        checks = sound is not None
        start(merge_sums_kernel, (max(1, triton.cdiv(out.shape[1], MERGED_TOKENS)) + checks,))(
            parts,
            out,
            out if sound is None else sound,
            len(parts),
            out.shape[1],
            parts.stride(0),
            KIND=KINDS[self.divergence],
            HAS_TARGETS=len(out) > 3,
            CHECKS=checks,
            BLOCK=MERGED_TOKENS,
            BLOCK_RANKS=triton.next_power_of_2(len(parts)),
            DIGIT=DIGIT,
            LOOK_AT=LOOK_AT,
            LEAST_TOKENS=LEAST_TOKENS,
            SAME=SAME,
            LEAST_SPREAD=LEAST_SPREAD,
        )

    def add_terms(
        self,
        z: Tensor,
        y: Tensor,
        first: int,  # as in `add_sums`
        lses: tuple[Tensor, Tensor],  # [n] of both
        terms: Tensor,  # [2, n] fp32, value and mean slope
    ) -> None:
        """Adds a tile's terms to those of the tiles before it."""
        start(tile_terms_kernel, (len(z),))(
            z,
            y,
            *lses,
            terms,
            first,
            z.shape[1],
            z.stride(0),
            y.stride(0),
            terms.stride(0),
            1 / self.temperature,
            self.beta,
            math.log(self.beta),
            *self._rest(),
            KIND=KINDS[self.divergence],
            **self._block(z),
        )

    def gradient(
        self,
        z: Tensor,  # contiguous, overwritten
        y: Tensor,
        slope: Tensor | None,  # of the student's softcap
        first: int,
        local_targets: Tensor,  # [n]
        sums: tuple[Tensor, ...],  # [n]: both lses, the mean slope, lse at temperature 1
        upstream: tuple[Tensor, Tensor | None],  # [n] by divergence and nll
        logit_scale: float,
        scale: Tensor | None,  # [] that divides the gradient
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns the gradient by the student's E . C + bias, [n, columns], in z's memory."""
        out = z.view(dtype)[:, : z.shape[1]]
        of_divergence, of_nll = upstream
        start(tile_gradient_kernel, (len(z),))(
            z,
            y,
            z if slope is None else slope,
            local_targets,
            *sums,
            of_divergence,
            of_divergence if of_nll is None else of_nll,
            of_divergence if scale is None else scale,
            out,
            first,
            z.shape[1],
            z.stride(0),
            y.stride(0),
            0 if slope is None else slope.stride(0),
            out.stride(0),
            1 / self.temperature,
            logit_scale,
            self.beta,
            *self._rest(),
            KIND=KINDS[self.divergence],
            HAS_SLOPE=slope is not None,
            HAS_NLL=of_nll is not None,
            HAS_SCALE=scale is not None,
            **self._block(z),
        )
        return out

    def _rest(self) -> tuple[float, float]:
        """Returns log(1 - beta), and log((1 - beta) / beta)."""
        rest = math.log(1 - self.beta)
        return rest, rest - math.log(self.beta)

    @staticmethod
    def _block(z: Tensor) -> dict[str, int]:
        block = min(COLUMNS, max(16, triton.next_power_of_2(z.shape[1])))
        return {"BLOCK": block, "num_warps": max(1, block // WARP_COLUMNS)}
