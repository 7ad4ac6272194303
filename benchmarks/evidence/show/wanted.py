"""List of the evidence that there should be, and of the part that no record has yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from benchmarks.evidence.convergence import cases_of
from benchmarks.evidence.records import Kind, Record

VOCABULARIES = (32768, 131072, 262144)
STARTS = {"random": "from random weights", "checkpoint": "from a checkpoint"}
METHODS = (
    "dense",
    "exact",
    "in_forward",
    "filtered",
    "no-tail",
    "screened",
    "cce",
    "cce-kahan-full-c",
)
NUM_SEEDS = 3
STEPS = (0, 10, 100, 1000, 5000)
# Losses of which whole training steps should be measured.
TRAINED = ("filtered", "dense", "liger", "cce")
GPUS = {1: "one GPU", 4: "four GPUs"}


def is_on_gpu(record: Record) -> bool:
    return "driver" in record.machine.get("device", "")


def missing(records: Sequence[Record]) -> list[str]:
    """Returns a sentence for each gap; kinds without a record come first."""
    kinds = {record.kind for record in records}
    gaps = [f"**{kind}**: no record at all" for kind in get_args(Kind) if kind not in kinds]
    measured = [record for record in records if is_on_gpu(record)]
    gaps += [
        f"**{kind}**: no record from a GPU"
        for kind in get_args(Kind)
        if kind in kinds and kind not in {record.kind for record in measured}
    ]
    if any(record.kind == "convergence" for record in measured):
        gaps += _missing_runs(measured)
    for kind in ("fidelity", "probabilities"):
        mine = [record for record in measured if record.kind == kind]
        steps = {row.get("step") for record in mine for row in record.rows}
        absent = [str(step) for step in STEPS if step not in steps]
        if mine and absent:
            gaps.append(f"**{kind}**: steps {', '.join(absent)}")
    trained = [record for record in measured if record.kind == "end-to-end"]
    if trained:
        gaps += _missing_steps(trained)
    return gaps


def _missing_steps(records: Sequence[Record]) -> list[str]:
    done = {
        (int(row.get("dp") or 1) * int(row.get("tp") or 1), row["loss"])
        for record in records
        for row in record.rows
        if "failed" not in row
    }
    sizes = {size for size, _ in done}
    gaps = []
    for size, words in GPUS.items():
        absent = [loss for loss in TRAINED if (size, loss) not in done]
        if size not in sizes:
            gaps.append(f"**end-to-end**: on {words}")
        elif absent:
            gaps.append(f"**end-to-end**, on {words}: {', '.join(absent)}")
    return gaps


def _missing_runs(records: Sequence[Record]) -> list[str]:
    """Returns a sentence for each vocabulary and start without NUM_SEEDS seeds of each method."""
    done: dict[tuple[int, str, str], int] = {}
    # Methods whose 8-bit logits were refused in every step: they trained with full logits.
    refused: set[tuple[int, str, str]] = set()
    for record in records:
        for case in cases_of(record) if record.kind == "convergence" else ():
            for method in case.methods:
                key = (case.vocab_size, case.start, method)
                if case.is_itself(method):
                    done[key] = max(done.get(key, 0), len(case.seeds(method)))
                else:
                    refused.add(key)
    gaps = []
    for vocab_size in VOCABULARIES:
        for start, words in STARTS.items():
            place = f"**convergence**, V={vocab_size} {words}"
            keys = {method: (vocab_size, start, method) for method in METHODS}
            short = [
                f"{method} ({done.get(key, 0)})"
                for method, key in keys.items()
                if done.get(key, 0) < NUM_SEEDS and key not in refused
            ]
            if short:
                gaps.append(f"{place}: {NUM_SEEDS} seeds of {', '.join(short)}")
            gaps += [
                f"{place}: of {method} every step was refused, and computed in full"
                for method, key in keys.items()
                if key in refused and key not in done
            ]
    return gaps
