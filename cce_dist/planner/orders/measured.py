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


def predict_file(
    path: str | Path, *, schedule: str | None = None, microbatches: int | None = None
) -> Prediction:
    """Predicts a step from a file's times: arguments of StageTimes and predict, by their names.

    Args:
        schedule, microbatches: replace the file's values; None keeps them.
    Raises:
        ValueError: an unreadable file, an unknown or a missing key, a value of a wrong type, or a
            value that `StageTimes` or `predict` refuses.
    """
    file = Path(path)
    try:
        entries = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"times must be a readable JSON file, got {file}: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"times must be an object, got {type(entries).__name__}")
    replaced = {"schedule": schedule, "microbatches": microbatches}
    entries |= {key: value for key, value in replaced.items() if value is not None}
    unknown = sorted(set(entries) - set(KEYS))
    if unknown:
        raise ValueError(f"keys of times must be among {sorted(KEYS)}, got {unknown}")
    for key in ("forward", "backward", "microbatches"):
        if key not in entries:
            raise ValueError(f"times must have the key {key!r}, got {sorted(entries)}")
    values = {key: _checked(key, value) for key, value in entries.items()}
    options = {key: values.pop(key) for key in ("schedule", "chunks", "framework") if key in values}
    count = values.pop("microbatches")
    times = StageTimes(**values, chunks=options.get("chunks", 1))
    return predict(times, count, **options)


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
