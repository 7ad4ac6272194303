"""The largest logit of each token, for metrics and greedy decoding: no logits in memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.backends.choose import choose_backend
from cce_dist.backends.protocol import Room
from cce_dist.core.tracing import is_fake, unseen_by_checkpointing
from cce_dist.core.types import Head, Tokens, accumulate_dtype
from cce_dist.frontend import validation
from cce_dist.frontend.dtensor import arrived, require_plain
from cce_dist.frontend.prepare import cast_by_autocast
from cce_dist.options import Backend, LossOptions


class LargestLogits(NamedTuple):
    """Largest logits and their rows; each field has hidden's shape without D."""

    # fp32 (float64 for float64 inputs); -inf if the weight has no rows, NaN if a logit is NaN
    value: Tensor
    index: Tensor  # int64: row of weight, the first of equal logits; 0 for -inf and NaN


@torch.no_grad()
def largest_logits(
    hidden: Tensor,  # [..., D] bf16 | fp16 | fp32 | float64
    weight: Tensor,  # [V_local, D] hidden's dtype
    *,
    bias: Tensor | None = None,  # [V_local]
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
) -> LargestLogits:
    """Returns each token's largest logit over this rank's rows, and the row that has it.

    Logits are logit_scale * softcap * tanh((hidden @ weight.T + bias) / softcap), in fp32 (float64
    for float64 inputs), and are never stored. The result is that of `logits.max(dim=-1)`. Over
    several ranks the caller takes the largest of the ranks' values. Not differentiable. No
    collectives.

    Args: see `linear_cross_entropy`.
    Raises:
        ValueError: an argument is out of range, or shapes, dtypes or devices don't fit; or a
            DTensor is given.
    """
    options = LossOptions(
        gradient="exact",
        softcap=softcap,
        logit_scale=logit_scale,
        backend=backend,
        workspace_bytes=workspace_bytes,
    )
    for name, tensor in {"hidden": hidden, "weight": weight, "bias": bias}.items():
        require_plain(name, tensor)
    validation.require_plain_call(weight, hidden, bias)
    hidden, weight = cast_by_autocast(arrived(hidden), arrived(weight))
    validation.check_hidden_and_weight(hidden, weight)
    validation.check_vector("bias", bias, [weight.shape[0]], "V_local, from weight", hidden)
    flat, shape = hidden.reshape(-1, hidden.shape[-1]), hidden.shape[:-1]
    nobody = torch.full((flat.shape[0],), -1, dtype=torch.int64, device=hidden.device)
    head = Head(weight, bias, None, weight.shape[0], softcap, options.logit_scale)
    chosen = choose_backend(options, hidden, len(flat), weight.shape[0])
    room = Room(options.workspace_for(len(flat)))
    if is_fake(hidden):
        dtype = accumulate_dtype(hidden.dtype)
        return LargestLogits(hidden.new_empty(shape, dtype=dtype), nobody.view(shape))
    with torch.autocast(hidden.device.type, enabled=False), unseen_by_checkpointing():
        value, index = chosen.largest(Tokens(flat, None, nobody), head, room)
    return LargestLogits(value.view(shape), index.view(shape))
