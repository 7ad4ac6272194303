"""Each token's largest logit by the forward's kernel, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist.backends.protocol import Room
from cce_dist.backends.triton.forward.extras import merge_extras
from cce_dist.backends.triton.forward.operands import ForwardLaunch
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.core.types import Head, Tokens, Wanted


def largest(tokens: Tokens, head: Head, room: Room) -> tuple[Tensor, Tensor]:
    """Returns the same as `backends.torch.forward.largest`, by one product whose logits stay in
    registers."""
    state = ForwardState.of(tokens, head, Wanted(correct=True), False, None)
    launches = state.launches(False)
    last = ForwardLaunch(launches[-1].number, 0, state.num_tiles, robust=True)
    for launch in (*launches, last):
        state.launch(None, launch)
    assert state.buffers.extras is not None
    operands = (state.buffers.extras, state.shape, state.count, state.targets)
    merged = merge_extras(*operands, state.wanted, head, segments=1)
    value, index = (row[0, : len(tokens)] for row in merged[:2])
    # The kernel's maximum may pass over a NaN; lse does not. lse is also NaN where the largest
    # logit is infinite, which is a number here.
    is_number = ~state.merge(last).lse[: len(tokens)].isnan() | (value == torch.inf)
    value = value.where(is_number, torch.nan)
    return value, index.where(is_number & index.isfinite(), 0).long()
