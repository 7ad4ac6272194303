"""The first microbatches of a head over pipeline ranks, of zeros, before anyone depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cce_dist.adapters.pipeline_head import PipelineHead


def rehearse(head: PipelineHead) -> None:
    """Every phase, so that its kernels are on the device. A kernel is brought there at its first
    launch, which may wait for all that the device has begun: within a step for what other ranks
    send when this one has gone on."""
    device, root = head.weight.device, 0
    hidden = torch.zeros(head.hidden_shape, dtype=head.hidden_dtype, device=device)
    targets = torch.zeros(head.targets_shape, dtype=torch.int64, device=device)
    given = (hidden, targets) if head.rank == root else (None, None)
    head.start_step()
    # The second adds to what the first has made.
    for index in (-1, -2):
        head.post(index, root, *given)
        head.statistics(index)
        if head.options.reduction == "none":
            losses = head.losses(index)
            head.weigh(index, root, losses if head.rank == root else None)
        head.gradients(index, root)
        head.take(index)
    head.post(-3, root, *given)
    head.statistics(-3, record=False)
    head.value(-3)
    head.forget()
    torch.cuda.synchronize(device)
