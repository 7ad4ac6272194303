"""The operands of a forward, launch by launch, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from cce_dist.backends.triton.filter.kept_logits import Region


@dataclass(frozen=True)
class ForwardLaunch:
    """One launch of the forward kernel, and its tiles of columns, [start_tile, end_tile)."""

    number: int
    start_tile: int  # 0 unless the launch keeps logits
    end_tile: int  # the launches that keep no logits take turns over the tiles before it
    region: Region | None = None  # the columns whose logits it keeps
    robust: bool = False


@dataclass(frozen=True)
class ForwardBuffers:
    """Memory that one launch of a forward leaves to the next one. S: segments of the shard.

    `size` is at least (splits + 1) x N_padded: see `ForwardState`.
    """

    lower: Tensor  # [S * N_padded] fp32: a lower bound of each token's lse in a segment, log2
    split_states: Tensor  # [SLOTS, or 1 with segments, 4, size] fp32: `state_ptr`
    mass: Tensor | None  # [num_blocks, V_local] bf16; None: columns are not scored
    extras: Tensor | None  # [NUM_EXTRAS, size] fp32: see `add_extras`; None: not wanted
    keys: Tensor | None  # [size] int64: `key_ptr` of Hopper's kernel; None: not wanted

    def __post_init__(self) -> None:
        # Kernels count the states' numbers in 32 bits.
        if self.split_states.numel() >= 2**31:
            raise ValueError(
                "hidden must have fewer tokens in one call of the kernels: of "
                f"{self.lower.numel()} tokens the forward keeps {self.split_states.numel()} sums, "
                "and at most 2147483647 are allowed; pass the tokens in several calls"
            )

    @property
    def size(self) -> int:
        return self.split_states.shape[2]


@dataclass(frozen=True)
class EightBit:
    """The operands of a forward of 8 bits, in place of the packed hidden states and the weight."""

    hidden: Tensor  # [N_padded, stride] int8 | e4m3, the first D of a row
    weight: Tensor  # [V_local, stride]
    of_columns: Tensor  # [2, V_local] fp32: factor and shift of a product
    of_tokens: Tensor  # [2, N_padded] fp32

    @property
    def accumulator(self) -> Any:
        return tl.int32 if self.weight.dtype == torch.int8 else tl.float32


@dataclass
class Finished:
    """The splits merged, [N_padded] in the order of the blocks; logarithms are natural."""

    lse: Tensor
    dropped: Tensor | None  # log of the sum over columns not kept of exp(z) softcap'(z)
    unkept: Tensor | None  # log of the sum over columns not kept of exp(z), where logits are 8-bit
    # Of all columns; where logits are 8-bit, of the softmax over columns not kept
    entropy: Tensor | None
    sum_p2: Tensor | None
    target_logit: Tensor
    lse_rest: Tensor | None = None  # of fp32 inputs: see `Stats`
    # The largest logit and its column, fp32; None: not wanted
    largest: tuple[Tensor, Tensor] | None = None
