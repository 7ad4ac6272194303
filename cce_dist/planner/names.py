"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_name(name: str, names: Iterable[str]) -> str:
    """Returns the end of a message that refuses `name`: the nearest of `names`, or ""."""
    spelt = {each.lower(): each for each in names}
    matches = get_close_matches(name.lower(), spelt, n=1)
    return f"; the nearest is {spelt[matches[0]]!r}" if matches else ""
