"""Predictions from measured stage times, in a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cce_dist.planner.names import read_json

from .predict import Prediction, StageTimes, predict

# Keys of a file and their types. A float may be an integer; a tuple is a list of floats.
_TIMES: dict[str, type] = {
    "chunks": int,
    **dict.fromkeys(("forward", "backward", "statistics", "gradients", "embedding"), tuple),
    **dict.fromkeys(("latency", "head_latency", "weight_share"), float),
}
_STEP: dict[str, type] = {"framework": str, "microbatches": int, "schedule": str}


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
    entries = read_json(file, "times must be a readable JSON file")
    if not isinstance(entries, dict):
        raise ValueError(f"times must be an object, got {type(entries).__name__} in {file}")
    replaced = {"schedule": schedule, "microbatches": microbatches}
    entries |= {key: value for key, value in replaced.items() if value is not None}
    unknown = sorted({*entries} - {*_TIMES, *_STEP})
    if unknown:
        keys = sorted({*_TIMES, *_STEP})
        raise ValueError(f"keys of times must be among {keys}, got {unknown} in {file}")
    for key in ("forward", "backward", "microbatches"):
        if key not in entries:
            raise ValueError(
                f"times must have the key {key!r}, got {sorted(entries)} in {file}: add it"
            )
    times, step = (
        {key: _value(key, kind, entries[key]) for key, kind in kinds.items() if key in entries}
        for kinds in (_TIMES, _STEP)
    )
    return predict(StageTimes(**times), chunks=times.get("chunks", 1), **step)


def _value(key: str, kind: type, value: Any) -> Any:
    """Returns a file's value as `kind`."""
    if kind is tuple:
        if not isinstance(value, list) or not all(_is_a(float, each) for each in value):
            raise ValueError(f"{key} must be a list of numbers, got {value!r}")
        return tuple(float(each) for each in value)
    if not _is_a(kind, value):
        raise ValueError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def _is_a(kind: type, value: Any) -> bool:
    kinds = (int, float) if kind is float else kind
    return isinstance(value, kinds) and not isinstance(value, bool)
