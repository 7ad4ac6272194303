"""A tokenizer's files under new ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cce_dist.planner.names import read_json

# Files that have the ids of a tokenizer in another form; tokenizer.json has all that they say.
OTHER_FORMS = (
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
_BY_DICT = ("BPE", "WordLevel", "WordPiece")
# A sample is as many neighbouring ids as this, as text.
SAMPLE = 32
# Scripts, spaces, a character for private use: most vocabularies have no token for some of it.
UNSEEN = "naïve Ωμέγα, Жук; عين नमस्ते 你好 こんにちは 한글 🤗🏽 x\u00a0y\ue000z \t\n\n   a_b=-1.5e+3"
# Of transformers: it takes tokenizer.json as it is. A model's own class may have ids in its code:
# T5's says that the unknown token is 2.
PLAIN_CLASS = "PreTrainedTokenizerFast"


def read_spec(model: Path) -> dict[str, Any]:
    """Reads a tokenizer as transformers has it: a class may add tokens and steps to what the file
    says. Returns the content of its tokenizer.json.

    Raises:
        ValueError: transformers cannot load it, or not as one that a tokenizer.json describes.
    """
    tokenizer = _load(model)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{model} must have a tokenizer of tokenizer.json, got a {tokenizer!r}")
    return json.loads(backend.to_str())


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # of the tokenizers' library, whose errors have no class
        raise ValueError(f"{folder} must have a tokenizer that loads: {error}") from error


def write_tokenizer(model: Path, out: Path, spec: dict[str, Any], new_ids: Sequence[int]) -> int:
    """Writes a tokenizer under new ids, and checks it as `check_tokenizers` does.

    The class in tokenizer_config.json stays, if it takes the new ids; else it is PLAIN_CLASS.

    Args: spec: of `read_spec`.
    Returns: the number of samples of text.
    Raises:
        ValueError: an id has no row, or neither class has the old tokens under new ids.
    """
    settings = model / "tokenizer_config.json"
    write_json(out / "tokenizer.json", rename_spec(spec, new_ids))
    renamed = rename_settings(read_object(settings) if settings.is_file() else {}, new_ids)
    write_json(out / settings.name, renamed)
    try:
        return check_tokenizers(model, out, new_ids)
    except ValueError:
        write_json(out / settings.name, {**renamed, "tokenizer_class": PLAIN_CLASS})
        return check_tokenizers(model, out, new_ids)


def num_tokens(spec: dict[str, Any]) -> int:
    """Returns the number of ids that may be dealt, those from 0 on.

    Args: spec: of a tokenizer.json.
    Raises:
        ValueError: the tokenizer is of an unknown kind, or leaves ids out.
    """
    model = spec["model"]
    kind = model.get("type")
    if kind == "Unigram":
        # The place in its list is a piece's id, and tokens that were added come after all of them.
        return len(model["vocab"])
    if kind not in _BY_DICT:
        raise ValueError(f"tokenizer.json must have a BPE, Unigram or word model, got {kind!r}")
    ids = {*model["vocab"].values(), *(token["id"] for token in spec["added_tokens"])}
    missing = set(range(max(ids, default=-1) + 1)) - ids
    if missing:
        raise ValueError(f"tokenizer.json must leave no id out, got no token of {min(missing)}")
    return len(ids)


def rename_spec(spec: dict[str, Any], new_ids: Sequence[int]) -> dict[str, Any]:
    """Returns a tokenizer.json under new ids.

    Raises:
        ValueError: an added token's id has no new one: the model has no row for it.
    """
    model = dict(spec["model"])
    added = [{**token, "id": _new_id(token["id"], new_ids)} for token in spec["added_tokens"]]
    if model["type"] == "Unigram":
        pieces: list[Any] = [None] * len(model["vocab"])
        for old, piece in enumerate(model["vocab"]):
            pieces[new_ids[old]] = piece
        model["vocab"] = pieces
        if model.get("unk_id") is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
    else:
        vocab = {token: new_ids[old] for token, old in model["vocab"].items()}
        # An added token that the model lacks would get the first id after the model's.
        vocab.update((token["content"], token["id"]) for token in added)
        model["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    padding = spec.get("padding")
    if padding is not None:
        padding = {**padding, "pad_id": new_ids[padding["pad_id"]]}
    return {
        **spec,
        "model": model,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "post_processor": _renamed_processor(spec.get("post_processor"), new_ids),
        "padding": padding,
    }


def _renamed_processor(
    processor: dict[str, Any] | None, new_ids: Sequence[int]
) -> dict[str, Any] | None:
    if processor is None:
        return None
    kind = processor["type"]
    if kind == "Sequence":
        parts = [_renamed_processor(part, new_ids) for part in processor["processors"]]
        return {**processor, "processors": parts}
    if kind == "TemplateProcessing":
        special = {
            name: {**token, "ids": [new_ids[i] for i in token["ids"]]}
            for name, token in processor["special_tokens"].items()
        }
        return {**processor, "special_tokens": special}
    if kind in ("BertProcessing", "RobertaProcessing"):
        pairs = {name: [processor[name][0], new_ids[processor[name][1]]] for name in ("sep", "cls")}
        return {**processor, **pairs}
    return processor


def rename_settings(settings: dict[str, Any], new_ids: Sequence[int]) -> dict[str, Any]:
    """Returns a tokenizer_config.json under new ids. Raises: as `rename_spec`."""
    added = settings.get("added_tokens_decoder")
    if not added:
        return settings
    renamed = {str(_new_id(int(old), new_ids)): token for old, token in added.items()}
    return {**settings, "added_tokens_decoder": renamed}


def _new_id(old: int, new_ids: Sequence[int]) -> int:
    if old >= len(new_ids):
        raise ValueError(f"token ids must be below the model's {len(new_ids)} rows, got {old}")
    return new_ids[old]


def check_tokenizers(old: Path, new: Path, new_ids: Sequence[int]) -> int:
    """Compares two folders' tokenizers, as transformers loads them, at every id, on samples of text
    made of them, and on characters that they may not have.

    Returns: the number of samples.
    Raises:
        ValueError: the second is not the first under new ids.
    """
    before, after = _load(old), _load(new)
    for token, id in before.get_vocab().items():
        renamed = after.convert_tokens_to_ids(token)
        if id >= len(new_ids) or renamed != new_ids[id]:
            raise ValueError(f"{token!r}, {id}, must be an id that can be renamed, got {renamed}")
    texts = [UNSEEN]
    for first in range(0, len(before), SAMPLE):
        ids = range(first, min(first + SAMPLE, len(before)))
        texts += [before.decode(list(ids)), " ".join(before.decode([id]) for id in ids)]
    # Where an added token has no match of its own, a model that knew its name would make one.
    for token in before.added_tokens_decoder.values():
        name = token.content
        texts += [name.lower(), name.upper(), name.title()]
        texts += [f"{name}s are", f"{name}_19", f"x{name}"]
    for text in texts:
        expected = [new_ids[id] for id in before(text).input_ids]
        renamed = after(text).input_ids
        if renamed != expected:
            raise ValueError(
                f"the renamed tokenizer must have {expected} for {text!r}, got {renamed}"
            )
    return len(texts)


def read_object(path: Path) -> dict[str, Any]:
    """Raises: ValueError: the file is no JSON object."""
    content = read_json(path, "model must have files of JSON")
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got a {type(content).__name__}")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
