"""A run of every phase before the first step, to load the phases' kernels.

A kernel's first launch loads the kernel, and may wait for all work on the device. Within a step
that work may wait for other ranks, which may wait for this rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch

ROOT = 0
# The Triton backend records the second call of a kind, and plays the third, which has operators of
# its own, such as the one that fills its memory with zeros.
ROUNDS = 3


def warm_up_head(head: Any) -> None:
    """Runs steps of made-up microbatches on GPUs, on every rank of the `PipelineHead`.

    Leaves no trace.
    """
    device = head.weight.device
    if device.type == "cuda":
        run_every_phase(head)
        torch.cuda.synchronize(device)


def run_every_phase(head: Any) -> None:
    """Runs `ROUNDS` steps, each of two microbatches with gradients and one without."""
    device, dtype = head.weight.device, head.hidden_dtype
    # Kernels of eager torch start only if there are values for them: zeros would hide some.
    hidden = torch.linspace(-1, 1, math.prod(head.hidden_shape), dtype=dtype, device=device)
    targets = torch.arange(math.prod(head.targets_shape), device=device) % head.shard.vocab_size
    microbatch = hidden.view(head.hidden_shape), targets.view(head.targets_shape)
    is_root = head.rank == ROOT
    microbatch = microbatch if is_root else (None, None)
    for _ in range(ROUNDS):
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
