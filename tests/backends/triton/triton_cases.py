"""Ways of the gradient that tests of the Triton backend share."""

from __future__ import annotations

from typing import Any

import pytest

from cce_dist import Filter

# Everything kept by the sum, by a threshold in reach, and every column.
WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": Filter(keep=0.05)},
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward"},
}


def give_programs(patch: pytest.MonkeyPatch, programs: int) -> None:
    """Splits the vocabulary as on a device that runs so many programs at a time, each of which
    starts in no time: so few tiles would not be split else."""
    from cce_dist.backends.triton.forward import state

    whole = state.ForwardState.for_shape

    def for_shape(self: Any, *sizes: int) -> tuple[int, ...]:
        return (*whole(self, *sizes)[:-1], 2**20)

    patch.setattr(state, "num_programs", lambda tensor: programs)
    patch.setattr(state.ForwardState, "for_shape", for_shape)
