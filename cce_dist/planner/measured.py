"""Stage times that someone has measured, from a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .predict import Prediction, StageTimes, predict

KEYS = {
    "forward": list,
    "backward": list,
    "statistics": list,
    "gradients": list,
    "embedding": list,
    "latency": float,
    "head_latency": float,
    "weight_share": float,
    "microbatches": int,
    "chunks": int,
    "schedule": str,
    "framework": str,
}


def predict_file(path: str | Path, **instead: Any) -> Prediction:
    """A step from the times of a file: StageTimes' and predict's arguments by their names.

    Args:
        instead: of what the file says; None: nothing.
    Raises:
        ValueError: not such a file, a key that is not known or missing, a value of another type, or
            what `StageTimes` and `predict` refuse.
    """
    file = Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"times must be a readable JSON file, got {file}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"times must be an object, got {type(found).__name__}")
    found |= {key: value for key, value in instead.items() if value is not None}
    unknown = sorted(set(found) - set(KEYS))
    if unknown:
        raise ValueError(f"keys of times must be among {sorted(KEYS)}, got {unknown}")
    for key in ("forward", "backward", "microbatches"):
        if key not in found:
            raise ValueError(f"times must have the key {key!r}, got {sorted(found)}")
    values = {key: _checked(key, value) for key, value in found.items()}
    options = {key: values.pop(key) for key in ("schedule", "chunks", "framework") if key in values}
    microbatches = values.pop("microbatches")
    times = StageTimes(**values, chunks=options.get("chunks", 1))
    return predict(times, microbatches, **options)


def _checked(key: str, value: Any) -> Any:
    kind = KEYS[key]
    if kind is list:
        numbers = isinstance(value, list) and all(_is_number(each) for each in value)
        if not numbers:
            raise ValueError(f"{key} must be a list of numbers, got {value!r}")
        return tuple(float(each) for each in value)
    right = _is_number(value) if kind is float else isinstance(value, kind)
    if not right or isinstance(value, bool):
        raise ValueError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
