"""Output files of commands: known to be writable before the work."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(option: str, path: Path | None) -> None:
    """
    Args: path: None, or "-" for stdout: nothing to check.
    Raises:
        ValueError: the file, or the first folder above it that there is, cannot be written.
    """
    if path is None or str(path) == "-":
        return
    # Of paths that this user may not see the methods of Path raise.
    if os.path.isdir(path):
        raise ValueError(f"{option} must name a file, got the folder {path}")
    there = path
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    if there != path and not os.path.isdir(there):
        raise ValueError(f"{option} must lie in a folder, got {path}: {there} is a file")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{option} must be writable, got {path}: {there} is not")


def write_output(option: str, path: Path, text: str) -> None:
    """
    Raises:
        ValueError: the file cannot be written, although `check_output` has let it pass.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} cannot be written, got {path}: {error.strerror}") from None
