"""The one place that says that a call takes a slower path than it could."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_slower(reason: str) -> None:
    """Warns, once a process and reason.

    Args: reason: what is slower and why, and what to do: of a path that costs more than a tenth.
    """
    warnings.warn(f"cce_dist is slower than it could be: {reason}", stacklevel=2)
