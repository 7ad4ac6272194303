"""Suggestions for misspelt names, and files of a user."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def nearest_name(name: str, names: Iterable[str]) -> str:
    """Returns the end of a message that refuses `name`: the nearest of `names`, or ""."""
    spelt = {each.lower(): each for each in names}
    matches = get_close_matches(name.lower(), spelt, n=1)
    return f"; the nearest is {spelt[matches[0]]!r}" if matches else ""


def read_json(path: Path, rule: str) -> Any:
    """Reads a JSON file.

    Args:
        rule: the beginning of a message that refuses the file.
    Raises:
        ValueError: the file is not readable, or no JSON.
    """
    try:
        # Some editors write a byte-order mark at the start of a file.
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{rule}, got {path}: {error}") from None
