"""Each token's largest logit by the forward's kernel, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist.backends.protocol import Room
from cce_dist.backends.triton.forward.extras import largest_of
from cce_dist.backends.triton.forward.operands import Launch
from cce_dist.backends.triton.forward.state import Forward
from cce_dist.core.types import Head, Tokens, Wanted


def largest(tokens: Tokens, head: Head, room: Room) -> tuple[Tensor, Tensor]:
    """As `torch_forward.largest`. One product; the logits stay in registers."""
    run = Forward.of(tokens, head, Wanted(correct=True), False, None)
    launches = run.launches(False)
    last = Launch(launches[-1].number, 0, run.num_tiles, robust=True)
    for launch in (*launches, last):
        run.launch(None, launch)
    stride = run.packed.shape[0]
    value, index = largest_of(run.parts["extras"], stride, run.shape[1], len(tokens))
    # The kernel's maximum may pass over a NaN; its sum does not. Of infinite logits
    # that is none either.
    is_number = ~run.merge(last).lse[: len(tokens)].isnan() | (value == torch.inf)
    value = value.where(is_number, torch.nan)
    return value, index.where(is_number & index.isfinite(), 0).long()
