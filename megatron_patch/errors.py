"""Errors where Megatron and the patch meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PatchError(RuntimeError):
    """Megatron, or this model of it, is not what the patch works with; says which flag to change.

    A RuntimeError: Megatron's own way to say that a configuration cannot run.
    """


@contextmanager
def failing_in(place: str) -> Iterator[None]:
    """Says where a step has failed, of errors that do not: gloo's and NCCL's know an address at
    best, and no pass of a stage. Others are the caller's own, and stay as they are."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise RuntimeError(f"vocab_over_pipeline: {place}: {error}") from error
