"""A run of every phase before the first step, to load the phases' kernels.

A kernel's first launch loads the kernel, and may wait for all work on the device. Within a step
that work may wait for other ranks, which may wait for this rank.
"""

from __future__ import annotations

from typing import Any

import torch

ROOT = 0


def warm_up_head(head: Any) -> None:
    """Runs three microbatches of zeros on GPUs, on every rank of the `PipelineHead`.

    Leaves no trace.
    """
    device = head.weight.device
    if device.type != "cuda":
        return
    hidden = torch.zeros(head.hidden_shape, dtype=head.hidden_dtype, device=device)
    targets = torch.zeros(head.targets_shape, dtype=torch.int64, device=device)
    is_root = head.rank == ROOT
    microbatch = (hidden, targets) if is_root else (None, None)
    head.start_step()
    # The second microbatch adds to the first one's gradients, by other kernels.
    for index in (-1, -2):
        head.post(index, ROOT, *microbatch)
        head.statistics(index)
        if head.weighs:
            head.weigh(index, ROOT, head.losses(index) if is_root else None)
        head.gradients(index, ROOT)
        head.take(index)
    head.post(-3, ROOT, *microbatch)
    head.statistics(-3, record=False)
    head.value(-3)
    head.forget()
    torch.cuda.synchronize(device)


def warm_up_embedding(embedding: Any, head: Any) -> None:
    """Runs a microbatch of zeros through a head's `TiedEmbedding`, as `warm_up_head` does."""
    device = head.weight.device
    if device.type != "cuda":
        return
    tokens = torch.zeros(head.targets_shape, dtype=torch.int64, device=device)
    embedding.ask(-1, tokens if embedding.is_first else None)
    embedding.look_up(-1)
    if embedding.is_first:
        embedding.keep(-1, embedding.rows(-1))
    embedding.give(-1)
    embedding.finish_step()
    head.grads.forget()
    torch.cuda.synchronize(device)
