"""Names that are nearly right."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_name(name: str, names: Iterable[str]) -> str:
    """The end of a sentence that refuses the name: one of these that is like it, or nothing."""
    spelt = {each.lower(): each for each in names}
    matches = get_close_matches(name.lower(), spelt, n=1)
    return f"; the nearest is {spelt[matches[0]]!r}" if matches else ""
