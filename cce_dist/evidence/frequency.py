"""How often each token occurs in a text: rare tokens are what a filter of gradients hurts first."""

from __future__ import annotations

import numpy as np

NUM_DECILES = 10
# Of ids that the text does not have.
UNSEEN = 0


def frequency_deciles(
    tokens: np.ndarray,  # [num_tokens] any integers in [0, vocab_size)
    vocab_size: int,
) -> np.ndarray:
    """[vocab_size] int8: of each id 1, the rarest, to 10, the most frequent; UNSEEN if it has none.

    Each decile has about a tenth of `tokens`, not of the ids: tenths of the ids would put nearly
    all of a text into the last. Ids stand in the order of their counts, those of one count in their
    own; an id belongs to the decile that the middle one of its occurrences falls into.
    """
    counts = np.bincount(tokens, minlength=vocab_size)
    order = np.argsort(counts, kind="stable")
    ordered = counts[order]
    middle = np.cumsum(ordered) - ordered / 2
    share = middle / max(len(tokens), 1)
    deciles = np.empty(vocab_size, dtype=np.int8)
    deciles[order] = np.minimum(share * NUM_DECILES, NUM_DECILES - 1).astype(np.int8) + 1
    deciles[counts == 0] = UNSEEN
    return deciles
