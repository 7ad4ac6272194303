"""Output files of commands, checked before the work whose results they get."""

from __future__ import annotations

import os
from pathlib import Path


def check_output(option: str, path: Path | None) -> None:
    """Checks that a file can be written; None and "-", for stdout, always pass.

    Raises:
        ValueError: the file, or the first existing folder above it, cannot be written.
    """
    if path is None or str(path) == "-":
        return
    # By os.path: Path's methods raise for paths that this user may not see.
    if os.path.isdir(path):
        raise ValueError(f"{option} must name a file, got the folder {path}")
    existing = path
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if existing != path and not os.path.isdir(existing):
        raise ValueError(f"{option} must lie in a folder, got {path}: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{option} must be writable, got {path}: {existing} is not")


def write_output(option: str, path: Path, text: str) -> None:
    """Writes a file, and the folders above it.

    Raises:
        ValueError: the file cannot be written, although it has passed `check_output`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} cannot be written, got {path}: {error.strerror}") from None
