"""Launches of the kernels of tiles of two models' logits.

The logits are products of the library's; a kernel reads a tile once.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

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

KINDS = {
    "forward_kl": FORWARD_KL.value,
    "reverse_kl": REVERSE_KL.value,
    "jsd": JSD.value,
    "tvd": TVD.value,
}
# Columns that a program has at once, and a warp of it.
COLUMNS, WARP_COLUMNS = 2048, 256


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
        first: int,  # column of the shard
        totals: tuple[Tensor, Tensor, Tensor],  # student's and teacher's lse, KL: [n], written
        targets: tuple[Tensor, Tensor, Tensor] | None,  # local ids; lse and logit, written
    ) -> None:
        """Merges a tile's sums with those of the tiles before it."""
        local, lse, logit = targets or (totals[0],) * 3
        start(tile_sums_kernel, (len(z),))(
            z,
            y,
            local,
            *totals,
            lse,
            logit,
            first,
            z.shape[1],
            z.stride(0),
            y.stride(0),
            1 / self.temperature,
            KIND=KINDS[self.divergence],
            HAS_TARGETS=targets is not None,
            **self._block(z),
        )

    def add_terms(
        self, z: Tensor, y: Tensor, lses: tuple[Tensor, Tensor], value: Tensor, mean: Tensor
    ) -> None:
        """Adds a tile's part of the value and of the mean slope, [n]. Args: lses: of both."""
        start(tile_terms_kernel, (len(z),))(
            z,
            y,
            *lses,
            value,
            mean,
            z.shape[1],
            z.stride(0),
            y.stride(0),
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
