"""Deals a model's ids out to ranks: tokenizer, configuration and weights, into a new folder."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from cce_dist.dealing.checkpoint import (
    PICKLED,
    check_config,
    rename_config,
    rename_weights,
    vocabulary_of,
)
from cce_dist.dealing.tokenizer import (
    OTHER_FORMS,
    num_tokens,
    read_object,
    read_spec,
    write_json,
    write_tokenizer,
)
from cce_dist.vocab_shard import dealt_ids

CONFIGS = ("config.json", "generation_config.json")
NEW_IDS = "new_ids.npy"


@dataclass(frozen=True)
class Dealt:
    """The result of `deal`, in numbers and names."""

    num_ids: int  # that were dealt; the ids after them are what they were
    num_rows: int  # of a rank
    tensors: tuple[str, ...]  # whose rows have moved; none of a folder without weights
    samples: int  # of text that both tokenizers agree on


def deal(model: Path, out: Path, *, ranks: int, divisible_by: int = 1) -> Dealt:
    """Gives every token of a model a new id, so that each rank of a contiguous split of the
    vocabulary gets as many frequent tokens as the others.

    Tokenizers count from the most frequent token. Here they go to the ranks in turn.

    Args:
        model: a folder of transformers: config.json, tokenizer.json and, unless training starts
            anew, *.safetensors.
        out: the new folder, which must not exist. It has new_ids.npy too, [V] int64: the new id of
            each old one, for tokens that are already on disk.
        ranks: W, that share the vocabulary.
        divisible_by: the vocabulary is padded to a multiple of this times W: Megatron's
            --make-vocab-size-divisible-by. 1: rank r has the r-th ceil(V / W) rows, as a DTensor.
    Raises:
        ValueError: an argument, or what the folder has.
    """
    import numpy as np
    import torch

    if ranks < 2:
        raise ValueError(f"ranks must be >= 2, got {ranks}")
    if divisible_by < 1:
        raise ValueError(f"divisible_by must be >= 1, got {divisible_by}")
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise ValueError(f"model must be a folder with {name}, got {model}")
    if out.exists():
        raise ValueError(f"out must not exist, got {out}")
    pickled = sorted(path.name for kind in PICKLED for path in model.glob(kind))
    if pickled and not any(model.glob("*.safetensors")):
        raise ValueError(f"{model} must have its weights in safetensors, got {pickled[0]}")
    configs = {name: read_object(model / name) for name in CONFIGS if (model / name).is_file()}
    for name, config in configs.items():
        check_config(name, config)
    vocab_size, names = vocabulary_of(model)
    spec = read_spec(model)
    num_ids = num_tokens(spec)
    if num_ids > vocab_size:
        raise ValueError(f"the model must have a row for each of {num_ids} ids, got {vocab_size}")
    padded = -(-vocab_size // (divisible_by * ranks)) * divisible_by * ranks
    new = np.arange(vocab_size)
    new[:num_ids] = dealt_ids(num_ids, ranks, padded // ranks).numpy()
    new_ids = new.tolist()
    out.parent.mkdir(parents=True, exist_ok=True)
    # Nothing has the name of `out` before all of it is right.
    part = out.with_name(f"{out.name}.partial-{os.getpid()}")
    part.mkdir()
    try:
        _copy_others(model, part)
        for name, config in configs.items():
            write_json(part / name, rename_config(config, new_ids))
        np.save(part / NEW_IDS, new)
        samples = write_tokenizer(model, part, spec, new_ids)
        old_ids = torch.from_numpy(new).argsort()
        tensors = rename_weights(model, part, names, vocab_size, old_ids)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Dealt(num_ids, padded // ranks, tuple(tensors), samples)


def _copy_others(model: Path, out: Path) -> None:
    """Copies the files that have neither ids nor weights."""
    written = {*CONFIGS, *OTHER_FORMS, NEW_IDS, "tokenizer.json", "tokenizer_config.json"}
    kinds = ("*.safetensors", *PICKLED)
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name not in written and not any(map(path.match, kinds)):
            shutil.copy2(path, out / path.name)
