"""The two texts of `cce-dist bench converge`, and a model's loss on their held-out tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.evidence.records import Cell
from benchmarks.fidelity.tenths import UNSEEN, name_of, tenths_of
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.data.tokens import TokenCache
from cce_dist.train.model.decoder import Decoder
from cce_dist.train.model.head import head_layout, make_token_nll
from cce_dist.train.ranks import Ranks

# Share of the tokens in the first text.
FIRST_SHARE = 2 / 3


class Text(NamedTuple):
    """Token ids, and `tenths`, the tenth of `train` that each id belongs to: [V] int64."""

    train: np.ndarray
    held_out: np.ndarray
    tenths: np.ndarray


def texts_of(
    cache: TokenCache,
    vocab_size: int,
    held_out_tokens: int,
    sequence_length: int,
    starts: Sequence[str],
) -> dict[str, Text]:
    """Returns the text of each start: "random" has two thirds of the documents, "checkpoint" the
    rest. The checkpoint's own run is on the first text.

    Raises:
        ValueError: a text is too short.
    """
    tokens = cache.tokens()
    # Every document ends with the same token as the last one.
    ends = np.flatnonzero(tokens == tokens[-1])
    cut = int(ends[np.searchsorted(ends, FIRST_SHARE * len(tokens))]) + 1
    parts = {"random": tokens[:cut], "checkpoint": tokens[cut:]}
    return {
        start: _split(part, vocab_size, held_out_tokens, sequence_length)
        for start, part in parts.items()
        if start in ("random", *starts)
    }


def _split(tokens: np.ndarray, vocab_size: int, held_out_tokens: int, sequence_length: int) -> Text:
    num_held_out = held_out_tokens // sequence_length * sequence_length + 1
    num_train = len(tokens) - num_held_out
    if num_train <= sequence_length:
        raise ValueError(
            f"each text must have more than {num_held_out + sequence_length} tokens for "
            f"held_out_tokens={held_out_tokens} and sequence_length={sequence_length}, got "
            f"{len(tokens)}: add documents, or lower them"
        )
    train = tokens[:num_train]
    tenths = tenths_of(np.bincount(train, minlength=vocab_size))
    return Text(train, tokens[num_train:], tenths)


@torch.no_grad()
def evaluate(model: Decoder, text: Text, config: TrainConfig, ranks: Ranks) -> dict[str, Cell]:
    """Returns nats per held-out token, for "all" and for each group that has held-out tokens.

    The same function computes them, whichever loss the model was trained with.
    """
    token_nll = make_token_nll(config, head_layout(config, ranks))
    held_out = torch.from_numpy(text.held_out.astype(np.int64)).to(ranks.device)
    ids, targets = (x.view(-1, config.data.sequence_length) for x in (held_out[:-1], held_out[1:]))
    nll = [
        token_nll(model(some_ids), model.head_weight, some_targets.flatten(), ()).loss
        for some_ids, some_targets in zip(
            ids.split(config.batch), targets.split(config.batch), strict=True
        )
    ]
    tenths = text.tenths[text.held_out[1:]]
    counts = np.bincount(tenths, minlength=UNSEEN + 1)
    nats = np.bincount(tenths, torch.cat(nll).double().cpu().numpy(), UNSEEN + 1)
    groups = [tenth for tenth in range(1, UNSEEN + 1) if counts[tenth]]
    means = {name_of(tenth): float(nats[tenth] / counts[tenth]) for tenth in groups}
    return {"all": float(nats.sum() / counts.sum()), **means}
