"""Tokens grouped by their frequency in a text: a gradient filter hurts rare tokens first."""

from __future__ import annotations

import numpy as np

from cce_dist.train.evaluate.scores import NUM_GROUPS, frequency_groups

# Group of the ids that the text does not have; it comes after the rarest.
UNSEEN = NUM_GROUPS + 1


def tenths_of(counts: np.ndarray) -> np.ndarray:
    """Returns the tenth of each id, [V] int64: 1 has the most frequent ids, 10 the rarest.

    An id that the text does not have gets UNSEEN. Each tenth has about a tenth of the text, as in
    `cce-dist eval`: tenths of the ids would put nearly all of a text into the first tenth.

    Args:
        counts: [V], how often the text has each id.
    """
    tenths = frequency_groups(counts) + 1
    tenths[counts == 0] = UNSEEN
    return tenths


def name_of(tenth: int) -> str:
    """Returns a tenth's name, which is the `group` of a row: "1" to "10", or "never"."""
    return "never" if tenth == UNSEEN else str(tenth)
