"""The text model in a config.json of a model that also takes images or sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .huggingface_keys import keys_not_used
from .huggingface_types import FLAT, TEXT_DEFAULTS, TEXT_OF

_TIE = "tie_word_embeddings"


def text_model_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the text model's keys, and notes on the file's other keys.

    Raises:
        ValueError: model_type is no string, text_config is no object or has no model_type, or the
            file and its text_config differ in whether the head is tied.
    """
    kind, nested = config.get("model_type"), config.get("text_config")
    if kind is not None and not isinstance(kind, str):
        raise ValueError(f"model_type must be a string, got {kind!r}")
    if nested is None and kind in FLAT:
        flat = {key: value for key, value in config.items() if not key.endswith("_config")}
        text_config = flat | {"model_type": TEXT_OF[kind]}
        return text_config, [_left_out(config, TEXT_OF[kind])]
    if "text_config" not in config and kind not in TEXT_OF:
        return config, []
    if not isinstance(nested, Mapping):
        raise ValueError(f"text_config of {kind} must be an object, got {nested!r}")
    text_config = TEXT_DEFAULTS.get(str(kind), {}) | dict(nested)
    of_text = text_config.get("model_type") or TEXT_OF.get(str(kind))
    if of_text is None:
        raise ValueError(
            f"text_config of {kind} must have the model_type of a text model, got None; add it"
        )
    # Some versions save a text_config with the model_type of the model around it.
    text_config["model_type"] = TEXT_OF[kind] if of_text == kind and kind in FLAT else of_text
    notes = [_left_out(config, text_config["model_type"]), *_tie(config, text_config, str(kind))]
    if config.get("quantization_config"):
        text_config["quantization_config"] = config["quantization_config"]
    unused = keys_not_used(config, [_TIE, *(key for key in config if key.endswith("_config"))])
    if unused:
        notes.append(f"beside text_config, not used by the planner: {', '.join(unused)}")
    return text_config, notes


def _left_out(config: Mapping[str, Any], of_text: str) -> str:
    """Returns a note that names the models, such as vision_config's, that are left out."""
    planned = ("text_config", "quantization_config")
    left_out = sorted(key for key in config if key.endswith("_config") and key not in planned)
    without = f", without {', '.join(left_out)}" if left_out else ""
    return f"{config.get('model_type')}: its text model alone, {of_text}{without}"


def _tie(config: Mapping[str, Any], text_config: dict[str, Any], kind: str) -> list[str]:
    """Decides whether the head is tied, and returns notes.

    The file and its text_config may each have the key; transformers' versions differ in which of
    the two they read.
    """
    of_file, of_text = config.get(_TIE), text_config.get(_TIE)
    if of_file is None:
        # If of_text is None too, another note names the text model's default.
        source = "of its text model" if of_text is None else f"{of_text} of its text_config"
        return [f"{_TIE}: not said by {kind}, {source}; transformers 5 may tie them all the same"]
    if of_text is not None and bool(of_file) != bool(of_text):
        if kind not in FLAT:
            raise ValueError(
                f"{_TIE} of {kind} and of its text_config must be the same, got {of_file} and "
                f"{of_text}; set both to false if the checkpoint has a head of its own, else to "
                "true"
            )
        of_file = True
    text_config[_TIE] = of_file
    return []
