"""Several inputs and shapes, one after another, into one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .inputs import BenchInputs
from .loss import Settings, bench_loss
from .methods import Method
from .report import Report
from .table import Row, format_cell


def measure_all(
    cases: Sequence[Callable[[], BenchInputs]],
    methods: Sequence[Method],
    settings: Settings,
    report: Report,
    failed: Mapping[str, str],
    *,
    labels: Mapping[str, str] | None = None,
) -> None:
    """`cases` make their inputs when their turn comes: together they would not fit.

    `labels` are columns more, the same in every row.
    """
    for make in cases:
        inputs = make()
        description = {**(labels or {}), **inputs.description}

        def save(rows: list[Row], description: Mapping[str, str | int] = description) -> None:
            report.add(description, [row.cells for row in rows])
            report.say(_progress(rows[-1]))

        bench_loss(inputs, methods, settings, save=save, failed=failed)
        report.finish_case()


def _progress(row: Row) -> str:
    found = ("median_ms", "peak_extra_mib", "grad_hidden_error", "grad_weight_error", "failed")
    values = [(name, format_cell(name, row.cells[name])) for name in found]
    return f"{row.method}: " + ", ".join(f"{name} {value}" for name, value in values if value)
