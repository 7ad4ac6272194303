"""Errors where Megatron and the patch meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PatchError(RuntimeError):
    """An error for a Megatron or a model that the patch does not support; names the flag to change.

    It is a RuntimeError, which Megatron itself raises for a configuration that cannot run.
    """


@contextmanager
def failing_in(place: str) -> Iterator[None]:
    """Adds `place` to errors of gloo and NCCL, which name an address at best and no pass of a
    stage. Other errors are the caller's own, and stay as they are."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise RuntimeError(f"vocab_over_pipeline: {place}: {error}") from error
