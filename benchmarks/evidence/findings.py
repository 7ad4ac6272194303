"""How a comparison of our methods stands in a table's cell."""

from __future__ import annotations

from collections.abc import Iterable


def marked(text: str, worse: bool) -> str:
    """Args: worse: ours is, by the numbers alone."""
    return f"**{text}**" if worse and text else text


def span(values: Iterable[float], digits: str = ".3g") -> str:
    """From the least to the largest, as far as they can be told apart."""
    found = sorted(values)
    low, high = f"{found[0]:{digits}}", f"{found[-1]:{digits}}"
    return low if low == high else f"{low} to {high}"


def is_tie(ratio: float, digits: str = ".3g") -> bool:
    """As it would be printed."""
    return float(f"{ratio:{digits}}") == 1
