"""What the records say for our methods and against them, by the numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Findings:
    """Sentences in Markdown."""

    wins: Sequence[str] = ()
    losses: Sequence[str] = ()
