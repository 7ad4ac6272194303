"""How often each token occurs in a text: rare tokens are what a filter of gradients hurts first."""

from __future__ import annotations

import numpy as np

from cce_dist.train.evaluate.scores import NUM_GROUPS, frequency_groups

# Of ids that the text does not have: behind the rarest.
UNSEEN = NUM_GROUPS + 1


def frequency_tenths(
    tokens: np.ndarray,  # [num_tokens] any integers in [0, vocab_size)
    vocab_size: int,
) -> np.ndarray:
    """[V] int64: of each id 1, of the most frequent, to 10, of the rarest; UNSEEN if it has none.

    Each tenth has about a tenth of `tokens`, as `cce-dist eval` has them: tenths of the ids would
    put nearly all of a text into the first.
    """
    counts = np.bincount(tokens, minlength=vocab_size)
    tenths = frequency_groups(counts) + 1
    tenths[counts == 0] = UNSEEN
    return tenths


def name_of(tenth: int) -> str:
    """The `group` of a row: "1" to "10", or "never"."""
    return "never" if tenth == UNSEEN else str(tenth)
