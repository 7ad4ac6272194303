"""Tiny models and tokenizers of transformers, and what a dealt one has in common with its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tests.integrations.architectures import make, prepared  # noqa: E402

ROOT = Path(__file__).parents[2]
TEXTS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/guide").glob("*.md"))]
SAMPLE = "Ranks share the vocabulary: 3.5 GiB, naïve Ω, 你好, <s>[CLS] and 🤗\n\n  def f(x): ..."
SPECIAL = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}


def byte_level(size: int, special: list[str]) -> Any:
    """As Llama 3's: special tokens are added after the model's."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - len(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = tokenizers.processors.Sequence(
        [
            tokenizers.processors.ByteLevel(trim_offsets=False),
            tokenizers.processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            ),
        ]
    )
    return tokenizer


def word_piece(size: int, special: list[str]) -> Any:
    special = [*special, "[CLS]", "[SEP]"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    pairs = [(name, tokenizer.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = tokenizers.processors.BertProcessing(*pairs)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("<pad>"), pad_token="<pad>")
    return tokenizer


def unigram(size: int, special: list[str]) -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[int, list[str]], Any]] = {
    "byte_level": byte_level,
    "word_piece": word_piece,
    "unigram": unigram,
}


def save(folder: Path, kind: str, model_type: str = "llama", rows: int = 0, **changes: Any) -> Path:
    """Saves a tiny model and a tokenizer that has learned the guide's text."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](400, list(SPECIAL.values())),
        **{f"{name}_token": token for name, token in SPECIAL.items()},
    )
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
    ids["pad_token_id"] = tokenizer.pad_token_id
    torch.manual_seed(0)
    model = prepared(make(model_type, vocab_size=rows or len(tokenizer), **ids, **changes))
    model.generation_config.update(**ids, bad_words_ids=[[7, 8], [9]])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder)).eval()
    return model, transformers.AutoTokenizer.from_pretrained(str(folder))


def check_same(old: Path, new: Path) -> None:
    """The same text has the same tokens, probabilities and continuation."""
    (model, tokenizer), (renamed, other) = load(old), load(new)
    new_ids = torch.from_numpy(np.load(new / "new_ids.npy"))
    assert new_ids.sort().values.equal(torch.arange(model.config.vocab_size))
    for text in (SAMPLE, TEXTS[0][:300]):
        ids, found = (each(text, return_tensors="pt").input_ids for each in (tokenizer, other))
        assert found.equal(new_ids[ids])
        assert other.decode(found[0]) == tokenizer.decode(ids[0])
        with torch.no_grad():
            logits, moved = model(ids[:, :48]).logits, renamed(found[:, :48]).logits
        assert moved[..., new_ids].equal(logits)
    for name in ("bos", "eos", "pad"):
        assert getattr(other, f"{name}_token") == getattr(tokenizer, f"{name}_token")
        of_config = getattr(model.config, f"{name}_token_id")
        if of_config is not None:
            assert getattr(renamed.config, f"{name}_token_id") == new_ids[of_config]
    assert renamed.generation_config.bad_words_ids == [
        new_ids[word].tolist() for word in model.generation_config.bad_words_ids
    ]
    start = tokenizer("Ranks share", return_tensors="pt").input_ids
    options = {"max_new_tokens": 8, "do_sample": False}
    answers = [tokenizer.decode(model.generate(start, **options)[0])]
    answers.append(other.decode(renamed.generate(new_ids[start], **options)[0]))
    assert answers[0] == answers[1]
