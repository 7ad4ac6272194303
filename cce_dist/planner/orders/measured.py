"""Predictions from measured stage times, in a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast

from .predict import Prediction, StageTimes, predict

KEYS = (
    "forward",
    "backward",
    "statistics",
    "gradients",
    "embedding",
    "latency",
    "head_latency",
    "weight_share",
    "microbatches",
    "chunks",
    "schedule",
    "framework",
)


def predict_file(
    path: str | Path, *, schedule: str | None = None, microbatches: int | None = None
) -> Prediction:
    """Predicts a step from a file whose keys are arguments of `StageTimes` and `predict`.

    Args:
        schedule, microbatches: replace the file's values; None keeps them.
    Raises:
        ValueError: the file is unreadable, a key is unknown or missing, a value has a wrong type,
            or `StageTimes` or `predict` refuses a value.
    """
    file = Path(path)
    try:
        entries = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"times must be a readable JSON file, got {file}: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"times must be an object, got {type(entries).__name__} in {file}")
    replaced = {"schedule": schedule, "microbatches": microbatches}
    entries |= {key: value for key, value in replaced.items() if value is not None}
    unknown = sorted(set(entries) - set(KEYS))
    if unknown:
        raise ValueError(f"keys of times must be among {sorted(KEYS)}, got {unknown} in {file}")
    for key in ("forward", "backward", "microbatches"):
        if key not in entries:
            raise ValueError(
                f"times must have the key {key!r}, got {sorted(entries)} in {file}: add it"
            )
    chunks = _integer(entries, "chunks", 1)
    times = StageTimes(
        forward=_numbers(entries, "forward"),
        backward=_numbers(entries, "backward"),
        statistics=_numbers(entries, "statistics"),
        gradients=_numbers(entries, "gradients"),
        embedding=_numbers(entries, "embedding"),
        latency=_number(entries, "latency", 0.0),
        head_latency=_number(entries, "head_latency", 0.0),
        weight_share=_number(entries, "weight_share", 0.5),
        chunks=chunks,
    )
    framework = _text(entries, "framework", "megatron")
    return predict(
        times,
        _integer(entries, "microbatches", 1),
        schedule=_text(entries, "schedule", "1f1b"),
        chunks=chunks,
        # `predict` refuses other words.
        framework=cast(Literal["torch", "megatron"], framework),
    )


def _numbers(entries: dict[str, Any], key: str) -> tuple[float, ...]:
    value = entries.get(key, [])
    if not isinstance(value, list) or not all(_is_number(each) for each in value):
        raise ValueError(f"{key} must be a list of numbers, got {value!r}")
    return tuple(float(each) for each in value)


def _number(entries: dict[str, Any], key: str, default: float) -> float:
    value = entries.get(key, default)
    if not _is_number(value):
        raise ValueError(f"{key} must be of type float, got {value!r}")
    return value


def _integer(entries: dict[str, Any], key: str, default: int) -> int:
    value = entries.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} must be of type int, got {value!r}")
    return value


def _text(entries: dict[str, Any], key: str, default: str) -> str:
    value = entries.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be of type str, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
