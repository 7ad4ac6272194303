"""`cce-dist bench fidelity`."""

from __future__ import annotations

import math
import re
import sys
from typing import Annotated

import typer

from cce_dist.bench.arguments import (
    BackendName,
    Captured,
    Device,
    Dtype,
    Failed,
    Names,
    PeerPath,
    RecordPath,
    Repeats,
    Threads,
    Timeout,
    Title,
    Tokens,
    cases_of,
    machine_of,
    reasons_of,
    refusals,
)

# The columns of the terminal's table.
SHOWN = (
    *("method", "threshold", "kept", "tail_mass", "screened", "loss_error"),
    *("grad_hidden_error", "grad_weight_error", "grad_weight_update_error"),
    *("median_ms", "p10_ms", "p90_ms", "failed"),
)


def fidelity_command(
    inputs: Captured,
    tokens: Tokens = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    threads: Threads = 0,
    method: Annotated[Names, typer.Option(help="Only these methods; may be repeated.")] = None,
    keep: Annotated[
        Names,
        typer.Option(
            help="Mass at which our methods keep a column, 2^-9.5 or 1e-3; may be repeated. "
            "[2^-13 to 2^-5, and their defaults]"
        ),
    ] = None,
    tenths: Annotated[bool, typer.Option(help="Also measure by the frequency of tokens.")] = True,
    repeats: Repeats = 10,
    backend: BackendName = "auto",
    peer_path: PeerPath = None,
    peer_timeout_seconds: Timeout = 120.0,
    title: Title = "",
    record: RecordPath = None,
    failed: Failed = None,
) -> None:
    """Gradients of every method over its thresholds against float64, by token frequency.

    Methods: dense, exact, in_forward, filtered, no-tail, screened; with --peer-path Apple's cce and
    cce-kahan-full-c. The terminal shows all tokens together; the record has the tenths.
    """
    from benchmarks.fidelity.candidates import DEFAULT_KEEP, candidates_of, choose_names
    from benchmarks.fidelity.fidelity import GOLDEN, bench_fidelity
    from benchmarks.fidelity.recording import Recording
    from benchmarks.fidelity.tenths import ALL
    from cce_dist.bench.methods import DeviceLostError, parse_backend, restart_without
    from cce_dist.bench.report import Report

    sys.path[:0] = [str(folder.resolve()) for folder in peer_path or ()]
    settings = {"backend": backend, "repeats": repeats}
    with refusals():
        names = choose_names(method or (), with_apple=bool(peer_path))
        machine = machine_of(device, threads, peers=names)
        keeps = [parse_power("keep", text) for text in keep or ()] or DEFAULT_KEEP
        chosen = parse_backend(backend)
        cases = cases_of(list(inputs), None, tokens, 0, 0, dtype, device)
        recording = Recording(record, title, machine, settings)
    report = Report(machine, None, None, None)
    try:
        for make in cases:
            case = make().without_ignored()
            with refusals():
                candidates = candidates_of(names, case, keeps, chosen)
                rows = bench_fidelity(
                    case,
                    candidates,
                    tenths=tenths,
                    repeats=repeats,
                    timeout_seconds=peer_timeout_seconds,
                    failed=reasons_of(failed),
                    say=report.say,
                )
                recording.add(case, rows)
            shown = [row for row in rows if row["group"] == ALL and row["method"] != GOLDEN]
            report.add(case.description, [{name: row.get(name) for name in SHOWN} for row in shown])
            report.finish_case()
    except DeviceLostError as error:
        restart_without(error)


def parse_power(name: str, text: str) -> float:
    """Returns the number that `text` is: a power such as "2^-9.5", or a number as Python reads it.

    Raises:
        ValueError: `text` is neither, or not a finite number above 0.
    """
    power = re.fullmatch(r"2\^([+-]?\d+(?:\.\d+)?)", text)
    try:
        value = 2.0 ** float(power[1]) if power else float(text)
    except (ValueError, OverflowError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a number above 0 such as 2^-9.5 or 1e-3, got {text!r}")
    return value
