"""Text of a table's cell that compares our methods with others."""

from __future__ import annotations

from collections.abc import Iterable


def marked(text: str, worse: bool) -> str:
    """Returns `text`, in bold if `worse`: our method's number is worse than the other's."""
    return f"**{text}**" if worse and text else text


def span(values: Iterable[float], digits: str = ".3g") -> str:
    """Returns the least and the largest value as text; one of them if both print the same."""
    ordered = sorted(values)
    low, high = f"{ordered[0]:{digits}}", f"{ordered[-1]:{digits}}"
    return low if low == high else f"{low} to {high}"


def is_tie(ratio: float, digits: str = ".3g") -> bool:
    """Tells whether `ratio` prints as 1."""
    return float(f"{ratio:{digits}}") == 1
