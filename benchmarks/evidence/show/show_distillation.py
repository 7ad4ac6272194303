"""Page of the records of kind "distillation"."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evidence.distillation import summarize, times_of
from benchmarks.evidence.figures import Chart
from benchmarks.evidence.markdown import number, table, value_of
from benchmarks.evidence.records import Record

TITLE = "Do students learn as much as from dense logits?"
HOW_TO_READ = (
    "Nats per held-out token: the student's loss, and KL(teacher || student). `topk` is forward KL "
    "from the teacher's 64 most probable ids and the rest as one class; `cross_entropy` has no "
    "teacher. A spread is the standard deviation between seeds. The methods of a seed start with "
    "the same weights and see the same batches, so *ours - dense* is taken seed by seed: its mean "
    "is also in units of dense's spread. Positive is worse. `reordered` is dense with tokens and "
    "vocabulary in reverse: it differs from dense by rounding alone. Within a spread is not equal, "
    "and few seeds decide little."
)


def introduction(records: Sequence[Record]) -> list[str]:
    return [HOW_TO_READ]


def section(record: Record) -> list[str]:
    """Returns the teachers' losses, the comparison after each evaluation, and the steps' times."""
    parts = []
    teachers = [row for row in record.rows if row["part"] == "teacher"]
    losses = [f"{value_of(row, 'all'):.4f} at V={row['vocab']}" for row in teachers]
    if losses:
        steps = number(teachers[0].get("steps"))
        parts.append(f"The teacher's held-out loss after {steps} steps: {', '.join(losses)}.")
    for rows in (summarize(record.rows, last_step=False), times_of(record.rows)):
        if rows:
            parts.append(table(list(rows[0]), [list(row.values()) for row in rows]))
    return parts


def figures(records: Sequence[Record]) -> dict[str, list[Chart]]:
    return {}
