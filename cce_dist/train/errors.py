"""Errors that end a job with one message and no traceback, and one-line texts of any error."""

from __future__ import annotations

import contextlib
import sys
import traceback


class JobError(Exception):
    """A failure that the user can put right, as its text tells. Exit code 1."""

    exit_code = 1


class ConfigError(JobError):
    """An invalid key of the configuration, or an invalid text that a key names. Exit code 2."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """Returns an error's type and the beginning of its text: torch adds pages to some texts."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def say_error(message: str) -> None:
    """Writes a message to stderr, if possible: a log may be on a full disk."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()


def say_traceback(error: BaseException) -> None:
    """Writes the traceback of an unexpected error to stderr, if possible."""
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
