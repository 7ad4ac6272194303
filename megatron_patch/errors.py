"""Errors where Megatron and the patch meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PatchError(RuntimeError):
    """An error for a Megatron or a model that the patch does not support; names the flag to change.

    Megatron itself raises a RuntimeError for a configuration that cannot run, so this is one, too.
    """


@contextmanager
def failing_in(place: str) -> Iterator[None]:
    """Adds `place` to errors of gloo and NCCL, which name an address at best, and never a stage's
    pass. Other errors stay as they are."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise RuntimeError(f"vocab_over_pipeline: {place}: {error}") from error
