"""torch.distributed.checkpoint with one-line errors: its own is a BaseException of pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from .disk import reason_of
from .errors import JobError, first_line


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Writes each rank's share of the tensors, and their index.

    Raises:
        OSError: ranks could not write; the text names them and the reason.
        JobError: a rank failed in another way.
    Collectives: those of torch.distributed.checkpoint.save.
    """
    try:
        dcp.save(state, checkpoint_id=folder, storage_writer=_Writer(folder))
    except CheckpointException as error:
        errors = [failure for failure, _ in error.failures.values()]
        text = _describe_failures(error)
        if all(isinstance(each, OSError) for each in errors):
            raise OSError(text) from None
        raise JobError(f"torch could not write a checkpoint to {folder}: {text}") from None


def read_state(state: dict[str, Any], folder: Path) -> None:
    """Fills the tensors in place.

    Raises:
        JobError: a file cannot be read, on any rank.
    Collectives: those of torch.distributed.checkpoint.load.
    """
    try:
        dcp.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise _unreadable(folder, _describe_failures(error)) from None


def read_tensors(folder: Path) -> Mapping[str, Any]:
    """Returns torch's notes of each tensor, by name.

    Raises:
        JobError: the index cannot be read.
    """
    try:
        return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        # A broken pickle raises anything.
        raise _unreadable(folder, first_line(error)) from None


class _Writer(dcp.FileSystemWriter):
    """A writer that fails with the disk's own error.

    torch's archive hides that error behind another ("unexpected pos"), and sends only the latter to
    other ranks.
    """

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise cause from None


def _unreadable(folder: Path, why: str) -> JobError:
    return JobError(
        f"checkpoint {folder} could not be read: {why}: restore its files, or remove the "
        "checkpoint's folder to go on from the one before"
    )


def _describe_failures(error: CheckpointException) -> str:
    """Shortens torch's text, which has a traceback for each rank."""
    ranks_of: dict[str, list[str]] = {}
    for rank, (failure, _) in error.failures.items():
        is_disk = isinstance(failure, OSError)
        text = reason_of(failure) if is_disk else first_line(failure)
        ranks_of.setdefault(text, []).append(str(rank))
    return "; ".join(f"{text} (rank {', '.join(of)})" for text, of in ranks_of.items())
