"""A checkpoint's files under new ids: configurations, and rows of the embedding and the head."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Keys of config.json and generation_config.json whose numbers are token ids.
_ID_SUFFIXES = ("token_id", "token_ids", "token_index")
_ID_KEYS = {"suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"}
# Keys that have ids beside other numbers, and that of a model's own code.
_NOT_RENAMED = {"forced_decoder_ids", "sequence_bias", "auto_map"}
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx")


def check_config(name: str, config: dict[str, Any]) -> None:
    """Raises: ValueError: a key has ids beside other numbers, or the model has code of its own."""
    for key, value in config.items():
        if value and key in _NOT_RENAMED:
            raise ValueError(f"{name}: {key!r} must not be set: nobody knows what it does with ids")
        if key == "text_config" and isinstance(value, dict):
            check_config(name, value)


def rename_config(config: dict[str, Any], new_ids: Sequence[int]) -> dict[str, Any]:
    """Returns a config.json or generation_config.json under new ids."""
    renamed: dict[str, Any] = {}
    for key, value in config.items():
        if key == "text_config" and isinstance(value, dict):
            renamed[key] = rename_config(value, new_ids)
        elif key.endswith(_ID_SUFFIXES) or key in _ID_KEYS:
            renamed[key] = _renamed_value(value, new_ids)
        else:
            renamed[key] = value
    return renamed


def _renamed_value(value: Any, new_ids: Sequence[int]) -> Any:
    if isinstance(value, list):
        return [_renamed_value(each, new_ids) for each in value]
    # -1 and the like stand for no token.
    return new_ids[value] if isinstance(value, int) and 0 <= value < len(new_ids) else value


def vocabulary_of(model: Path) -> tuple[int, set[str]]:
    """Returns the rows V of a model's embedding, and the names of the tensors that have a row for
    each id: embedding, head, the head's bias. Makes no weights.

    Raises:
        ValueError: transformers has no causal language model of this kind, its head is no linear
            map of V rows, another tensor has a dim of V, or another table is looked up by ids.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    config = AutoConfig.from_pretrained(str(model))
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("config.json must have no quantization_config: deal ids before quantizing")
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config)
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise ValueError(f"the head must be a torch.nn.Linear, got a {type(head).__name__}")
    parts = [embedding.weight, head.weight, head.bias]
    num_rows = embedding.weight.shape[0]
    if head.weight.shape[0] != num_rows:
        raise ValueError(
            f"the head must have as many rows as the embedding, got {head.weight.shape[0]} and "
            f"{num_rows}"
        )
    tensors = [*causal.named_parameters(remove_duplicate=False), *causal.named_buffers()]
    names = {name for name, tensor in tensors if any(tensor is part for part in parts)}
    for name, module in causal.named_modules():
        # A whole model may have it as an attribute alone.
        looks_up = not isinstance(module, PreTrainedModel)
        looks_up = looks_up and getattr(module, "padding_idx", None) is not None
        if looks_up and getattr(module, "weight", None) is not embedding.weight:
            raise ValueError(
                f"{name}, a {type(module).__name__}, must not have a padding_idx: it looks rows up "
                "by ids, or counts positions from the padding's id"
            )
    tables = {
        name: type(module).__name__
        for name, module in causal.named_modules()
        if not isinstance(module, PreTrainedModel) and _looks_up(module, embedding.weight)
    }
    if tables:
        innermost = [x for x in tables if not any(y.startswith(f"{x}.") for y in tables)]
        raise ValueError(
            "the model must look up ids in its embedding alone, got modules that take ids or "
            f"n-grams of them: {'; '.join(f'{x}, {tables[x]}' for x in innermost)}"
        )
    _refuse_others(((name, x.shape) for name, x in tensors if name not in names), num_rows)
    return num_rows, names


def _looks_up(module: Any, weight: Tensor) -> bool:
    """Tells whether a module, other than the embedding, looks up ids. Args: weight: embedding's."""
    from torch.nn import Embedding

    if any(x is weight for x in module.parameters()):
        return False
    # Of n-grams there are more than of ids, of positions in real models fewer.
    if isinstance(module, Embedding):
        return module.num_embeddings > len(weight)
    parameters = inspect.signature(module.forward).parameters
    return "input_ids" in parameters and parameters["input_ids"].default is inspect.Parameter.empty


def rename_weights(
    model: Path, out: Path, names: set[str], num_rows: int, old_ids: Tensor
) -> list[str]:
    """Writes a model's safetensors anew, one file after the other: row i of a tensor of `names` is
    its row old_ids[i].

    Returns: the names, as the files have them, of the tensors whose rows have moved.
    Raises:
        ValueError: a file cannot be read or written; a tensor has a dim of `num_rows` and is none
            of `names`, or none has.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file, save_file

    moved: list[str] = []
    files = sorted(model.glob("*.safetensors"))
    _require_all(model, files)
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                metadata = opened.metadata()
            tensors = load_file(path)
            of_ids = {name for name in tensors if _is_one_of(name, names)}
            others = ((name, x.shape) for name, x in tensors.items() if name not in of_ids)
            _refuse_others(others, num_rows)
            for name in of_ids:
                if len(tensors[name]) != num_rows:
                    raise ValueError(
                        f"{name} of {path} must have a row for each of config.json's {num_rows} "
                        f"ids, got {tuple(tensors[name].shape)}"
                    )
                tensors[name] = tensors[name].index_select(0, old_ids)
            save_file(tensors, out / path.name, metadata)
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be renamed: {error}") from None
        moved += sorted(of_ids)
    if files and not moved:
        raise ValueError(f"{model} must have one of the tensors {sorted(names)}, got none")
    return moved


def _require_all(model: Path, files: Sequence[Path]) -> None:
    """Checks that every file of the checkpoint's index is there: rows that are not here would keep
    their old ids.

    Raises:
        ValueError: a file is missing, or the index cannot be read.
    """
    for index in sorted(model.glob("*.safetensors.index.json")):
        try:
            expected = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} must have a weight_map, got {error!r}") from None
        missing = sorted(expected - {path.name for path in files})
        if missing:
            raise ValueError(
                f"{model} must have every file that {index.name} names, lacks {missing}"
            )


def _is_one_of(name: str, names: Iterable[str]) -> bool:
    """Tells whether a file's tensor is one of the model's, whose names may have a longer prefix."""
    return any(name == each or f".{each}".endswith(f".{name}") for each in names)


def _refuse_others(tensors: Iterable[tuple[str, Sequence[int]]], num_rows: int) -> None:
    for name, shape in tensors:
        if num_rows in shape:
            raise ValueError(
                f"{name} must have no dim of {num_rows}, as many as there are ids, got "
                f"{tuple(shape)}: nobody knows whether it has a row for each id"
            )
