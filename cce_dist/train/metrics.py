"""metrics.jsonl, one JSON object for each step, and the same numbers as TensorBoard's events.

An unfinished line of metrics.jsonl does not count.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .disk import writing
from .errors import ConfigError, first_line
from .progress import StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
EVENTS = "TensorBoard's events"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Reads every complete line; a killed job may have left half a line at the end."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            try:
                record = json.loads(line)
                record["step"] += 0
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"{path} must have a JSON object of a step in each line, got in line {number}: "
                    f"{first_line(error)}; restore the line, or remove it"
                ) from None
            records.append(record)
    return records


def truncate_metrics(run_dir: Path, step: int) -> None:
    """Removes the steps after `step`: the resumed run repeats them."""
    kept = [record for record in read_metrics(run_dir) if record["step"] <= step]
    partial = run_dir / f"{METRICS_FILE}.partial"
    with writing(METRICS_FILE, run_dir):
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        partial.replace(run_dir / METRICS_FILE)


def append_metrics(run_dir: Path, record: StepRecord, events: SummaryWriter | None = None) -> None:
    """Appends a step to metrics.jsonl, and to TensorBoard's events if the run has them."""
    values = {key: value for key, value in asdict(record).items() if value is not None}
    with writing(METRICS_FILE, run_dir), (run_dir / METRICS_FILE).open("a") as file:
        file.write(json.dumps(values) + "\n")
    if events is not None:
        append_events(events, values.pop("step"), values)


def open_events(run_dir: Path, step: int) -> SummaryWriter:
    """Opens TensorBoard's events of a run that goes on after `step`; later ones are repeated."""
    # The import takes seconds, and its package may be missing.
    from torch.utils.tensorboard import SummaryWriter

    with writing(EVENTS, run_dir):
        return SummaryWriter(str(run_dir), purge_step=step + 1)


def append_events(events: SummaryWriter, step: int, values: dict[str, Any]) -> None:
    """Appends a step's scalars by name; a list gives one for each place."""
    with writing(EVENTS, Path(events.log_dir)):
        for name, value in values.items():
            if isinstance(value, list):
                for place, each in enumerate(value):
                    events.add_scalar(f"{name}/{place}", each, step)
            else:
                events.add_scalar(name, value, step)
        # As metrics.jsonl is: what a killed job has logged is on the disk.
        events.flush()


def reset_peak_memory(device: torch.device) -> None:
    """Resets the peak on a GPU; on the CPU a process's peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak of tensors since the reset on a GPU; on the CPU the process's peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
