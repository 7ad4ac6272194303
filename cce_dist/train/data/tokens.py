"""Byte-level BPE and the token ids of the text, trained once and cached."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cce_dist.train.config.schema import DataConfig
from cce_dist.train.disk import require_space, writing
from cce_dist.train.errors import ConfigError

from .text import collect_documents

END_OF_TEXT = "<eos>"
# This version is part of every cache key: raise it if the ids of a text would change.
FORMAT_VERSION = 1
BATCH_DOCUMENTS = 512
CACHE_REMEDY = "free space, or set data.cache to another folder"


@dataclass(frozen=True)
class TokenCache:
    """A folder that holds tokenizer.json, tokens.npy and info.json.

    Args:
        key: a hash of the text, the vocabulary size and the version of tokenizers.
        num_merged: the tokenizer's real number of ids; at most data.vocab_size.
    """

    folder: Path
    key: str
    num_merged: int

    def tokens(self) -> np.ndarray:
        """Returns the ids, [num_tokens] uint16 or uint32, memory-mapped."""
        with _reading(self.folder):
            return np.load(self.folder / "tokens.npy", mmap_mode="r")


def prepare_tokens(
    config: DataConfig, say: Callable[[str], None], *, key: str | None = None
) -> TokenCache:
    """Returns the cached token ids of the text; makes them if the cache lacks them.

    Args:
        key: the cache key of a run to resume. If the cache still has the key, the text is not read
            again: a run can be resumed even if a package has been installed since.
    Raises:
        ConfigError: there is no usable text, or the cache cannot be written.
        JobError: the new tokenizer or ids cannot be written.
    """
    if key is not None and is_cached(config.cache, key):
        return open_tokens(config.cache, key)
    documents = collect_documents(config.paths, config.megabytes)
    text_key = _cache_key(documents, config.vocab_size)
    if not is_cached(config.cache, text_key):
        # The work below may take minutes.
        require_space(config.cache, "data.cache", 0)
        num_chars = sum(len(text) for text in documents)
        say(
            f"training a byte-level BPE of {config.vocab_size} ids on {len(documents)} documents, "
            f"{num_chars / 1e6:.1f} M characters"
        )
        _build(documents, config, text_key)
    return open_tokens(config.cache, text_key)


def is_cached(cache: Path, key: str) -> bool:
    # Unlike Path's method, os.path raises nothing for a folder that this user may not read.
    return os.path.exists(cache / key / "info.json")


def open_tokens(cache: Path, key: str) -> TokenCache:
    text = (cache / key / "info.json").read_text()
    with _reading(cache / key):
        info = json.loads(text)
        return TokenCache(folder=cache / key, key=key, num_merged=info["num_merged"])


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raises: ConfigError: a file of the cache is not as it was written."""
    try:
        yield
    # The tokenizer's package raises nothing more special than Exception.
    except Exception as error:
        # The disk's fault, not the cache's, unless a file is missing.
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        raise ConfigError(
            f"data.cache must have tokens as they were written in {folder}, got "
            f"{type(error).__name__}: {error}; remove that folder: the next run makes it anew"
        ) from None


def encode_texts(cache: TokenCache, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes each text as uint32 ids after END_OF_TEXT, as training encodes documents.

    The tokenizer is the cached one; tokens.npy is not read.
    """
    from tokenizers import Tokenizer

    with _reading(cache.folder):
        tokenizer = Tokenizer.from_file(str(cache.folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.array([end, *encoding.ids], dtype=np.uint32) for encoding in encodings]


def _cache_key(documents: Sequence[str], vocab_size: int) -> str:
    import tokenizers

    digest = hashlib.sha256()
    digest.update(f"{FORMAT_VERSION} {vocab_size} {tokenizers.__version__}".encode())
    for text in documents:
        data = text.encode()
        # The length keeps "ab" + "c" apart from "a" + "bc".
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:20]


def _build(documents: Sequence[str], config: DataConfig, key: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END_OF_TEXT],
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    end = tokenizer.token_to_id(END_OF_TEXT)
    dtype = np.uint16 if config.vocab_size <= 2**16 else np.uint32
    pieces = []
    for first in range(0, len(documents), BATCH_DOCUMENTS):
        batch = list(documents[first : first + BATCH_DOCUMENTS])
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            pieces.append(np.array([*encoding.ids, end], dtype=dtype))
    info = {"num_merged": tokenizer.get_vocab_size(), "num_documents": len(documents)}
    _publish(config.cache / key, tokenizer.to_str(), np.concatenate(pieces), info)


def _publish(folder: Path, tokenizer: str, tokens: np.ndarray, info: dict[str, int]) -> None:
    # A job that is killed here, or two jobs at once, must leave no unfinished folder under the key.
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    with writing("the token ids", folder.parent, CACHE_REMEDY, scrap=partial):
        partial.mkdir(parents=True, exist_ok=True)
        (partial / "tokenizer.json").write_text(tokenizer, encoding="utf8")
        np.save(partial / "tokens.npy", tokens)
        (partial / "info.json").write_text(json.dumps(info))
    try:
        partial.rename(folder)
    except OSError:
        # Another job published the same content first.
        shutil.rmtree(partial)
        if not (folder / "info.json").exists():
            raise
