"""The text model in a config.json of a model that also takes images or sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .huggingface_keys import keys_not_used
from .huggingface_types import FLAT, PART_DEFAULTS, TEXT_OF

_TIE = "tie_word_embeddings"


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the text model's keys, and notes on whatever else the file has.

    Raises:
        ValueError: a text_config that is no object, or that does not say which model it is; whole
            and part that differ in whether the head is tied.
    """
    kind, part = config.get("model_type"), config.get("text_config")
    if part is None and kind in FLAT:
        part = {key: value for key, value in config.items() if not key.endswith("_config")}
        text_config = part | {"model_type": TEXT_OF[kind]}
        return text_config, [_left_out(config, TEXT_OF[kind])]
    if "text_config" not in config and kind not in TEXT_OF:
        return config, []
    if not isinstance(part, Mapping):
        raise ValueError(f"text_config of {kind} must be an object, got {part!r}")
    text_config = PART_DEFAULTS.get(str(kind), {}) | dict(part)
    of_text = text_config.get("model_type") or TEXT_OF.get(str(kind))
    if of_text is None:
        raise ValueError(
            f"text_config of {kind} must have the model_type of a text model, got None; add it"
        )
    # Flat files, and parts saved by some versions, have the whole's name.
    text_config["model_type"] = TEXT_OF[kind] if of_text == kind and kind in FLAT else of_text
    notes = [_left_out(config, text_config["model_type"]), *_tie(config, text_config, str(kind))]
    if config.get("quantization_config"):
        text_config["quantization_config"] = config["quantization_config"]
    unused = keys_not_used(config, [_TIE, *(key for key in config if key.endswith("_config"))])
    if unused:
        notes.append(f"beside text_config, not used by the planner: {', '.join(unused)}")
    return text_config, notes


def _left_out(config: Mapping[str, Any], of_text: str) -> str:
    ours = ("text_config", "quantization_config")
    parts = sorted(key for key in config if key.endswith("_config") and key not in ours)
    others = f", without {', '.join(parts)}" if parts else ""
    return f"{config.get('model_type')}: its text model alone, {of_text}{others}"


def _tie(config: Mapping[str, Any], text_config: dict[str, Any], kind: str) -> list[str]:
    """Notes; whole and part may each say whether the head is tied, and transformers' versions
    differ in which of them decides."""
    whole, part = config.get(_TIE), text_config.get(_TIE)
    if whole is None:
        # A text model's own default, where it does not say, is noted beside this.
        said = "of its text model" if part is None else f"{part} of its text_config"
        return [f"{_TIE}: not said by {kind}, {said}; transformers 5 may tie them all the same"]
    if part is not None and bool(whole) != bool(part):
        if kind not in FLAT:
            raise ValueError(
                f"{_TIE} of {kind} and of its text_config must be the same, got {whole} and "
                f"{part}; set both to whether the checkpoint has no head of its own"
            )
        whole = True
    text_config[_TIE] = whole
    return []
