"""Ways of the gradient that tests of the Triton backend share."""

from __future__ import annotations

from typing import Any

from cce_dist import Filter

# Everything kept by the sum, by a threshold in reach, and every column.
WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": Filter(keep=0.05)},
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward"},
}
