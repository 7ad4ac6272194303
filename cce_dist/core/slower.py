"""The warning that a call takes a slower path than it could."""

from __future__ import annotations

import functools
import warnings


@functools.cache
def warn_slower(reason: str) -> None:
    """Warns, once a process for each reason, of a path that costs more than a tenth of the time.

    Args: reason: the path, the reason why it is taken, and the remedy.
    """
    warnings.warn(f"cce_dist is slower than it could be: {reason}", stacklevel=2)
