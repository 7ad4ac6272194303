"""Made-up records of every kind, small, as their commands would write them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.evidence.convergence import GROUPS
from benchmarks.evidence.records import Cell, Kind, Record, make_record

GPU = "NVIDIA H200, 1980 MHz, driver 580.159.04"
STEPS = (0, 20, 40, 60, 80)


def record_of(
    kind: Kind, rows: Sequence[dict[str, Cell]], *, device: str = GPU, name: str | None = None
) -> Record:
    machine = {
        "date": "2026-11-23",
        "device": device,
        "torch": "2.11.0+cu130",
        "commit": "0123abc",
        "command": f"cce-dist bench {kind}",
    }
    title = f"Made up {kind}"
    settings = {"dim": 64, "lr": 3e-4}
    return make_record(
        kind, name or kind, title, machine, seeds=(0, 1, 2), settings=settings, rows=rows
    )


def loss_at(step: int, group: str, seed: int) -> float:
    """Nats of dense: groups differ, and seeds by 0.01 from one to the next."""
    return 4 + 6 / (1 + step / 20) + 0.3 * GROUPS.index(group) + 0.01 * (seed - 1)


def convergence(
    offsets: dict[str, float],
    *,
    starts: Sequence[str] = ("random",),
    seeds: int = 3,
    vocab: int = 32768,
) -> Record:
    """Each method's loss is dense's and an offset, which grows with the group and with the step."""
    rows: list[dict[str, Cell]] = []
    for start in starts:
        for number, group in enumerate(GROUPS[1:], 1):
            text = {"group": group, "num_ids": number**3, "num_trained": 1000, "num_held_out": 90}
            rows.append({"part": "text", "vocab": vocab, "start": start, **text})
        for seed, (method, offset) in itertools.product(range(seeds), offsets.items()):
            about: dict[str, Cell] = {"vocab": vocab, "start": start, "method": method}
            about["seed"] = seed
            for step in STEPS:
                grown = offset * step / STEPS[-1] / len(GROUPS)
                nats = {
                    group: loss_at(step, group, seed) + grown * (1 + GROUPS.index(group))
                    for group in GROUPS
                }
                rows.append({"part": "curve", **about, "step": step, **nats})
            timing = {"steps": STEPS[-1], "seconds": 2.0, "median_step_ms": 20.0 + 100 * offset}
            rows.append({"part": "run", **about, **timing, "peak_gib": 1.5})
        failed = {"method": "screened", "seed": 0, "failed": "ValueError: not here"}
        rows.append({"part": "run", "vocab": vocab, "start": start, **failed})
    return record_of("convergence", rows)


def fidelity() -> Record:
    rows: list[dict[str, Cell]] = []
    for step in (10, 1000):
        about: dict[str, Cell] = {"inputs": f"step-{step}", "step": step}
        for place, group in enumerate(GROUPS):
            sizes = {"num_tokens": 100, "num_ids": 10 + place}
            rows.append({**about, "method": "float64", "group": group, **sizes})
            dense = {"grad_hidden_error": 5e-3, "grad_weight_error": 3e-3 * (1 + place / 4)}
            time = {"median_ms": 60.0} if group == "all" else {}
            rows.append({**about, "method": "dense", "group": group, **dense, **time})
            for method, factor in (("filtered", 1.0), ("cce", 20.0)):
                for power in (-12, -10, -8):
                    error = factor * 2.0**power * (1 + place / 4)
                    found: dict[str, Cell] = {
                        "threshold": 2.0**power,
                        "by": "mass" if method == "filtered" else "probability",
                        "default": power == -10,
                        "grad_hidden_error": 2 * error,
                        "grad_weight_error": error,
                        "grad_weight_cosine_distance": error**2 / 2,
                    }
                    if group == "all":
                        found |= {"median_ms": 10 - power + factor, "kept": 0.01, "tail_mass": 0.02}
                    rows.append({**about, "method": method, "group": group, **found})
        rows.append(
            {**about, "method": "screened", "group": "all", "failed": "ValueError: not here"}
        )
    return record_of("fidelity", rows)


def end_to_end() -> Record:
    rows: list[dict[str, Cell]] = []
    speeds = {"filtered": 300.0, "dense": 250.0, "liger": 280.0}
    for (loss, speed), batch in itertools.product(speeds.items(), (8, 16, 64)):
        largest = batch if batch < 64 or loss != "filtered" else 200
        tokens = {"batch": largest, "tokens_a_step": 1024 * largest, "tokens_per_s": speed * 1000}
        if loss == "filtered" and batch == 16:
            tokens["tokens_per_s"] = 200_000.0
        rows.append({"loss": loss, "dp": 1, "tp": 1, **tokens, "peak_gib": largest / 2})
    rows.append({"loss": "cce", "dp": 1, "tp": 1, "failed": "ModuleNotFoundError: no such module"})
    return record_of("end-to-end", rows)


def every_kind() -> list[Record]:
    offsets = {"dense": 0.0, "exact": 0.0, "filtered": 0.004, "no-tail": 0.5}
    return [
        convergence(offsets, starts=("random", "checkpoint")),
        fidelity(),
        end_to_end(),
    ]
