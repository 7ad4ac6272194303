"""A record of kind "end-to-end": made of the rows of `cce-dist bench train`, and for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .findings import Findings
from .methods import OURS, title_of
from .page import Block, Table, Words, number
from .records import Cell, Record, RecordError, Row, make_record

# What all rows of a record share.
SETTINGS = ("V", "D", "layers", "dtype")


def end_to_end_record(
    rows: Sequence[Mapping[str, Cell]],
    machine: Mapping[str, str],
    name: str,
    title: str,
    *,
    seed: int = 0,
) -> Record:
    """Of the rows of `cce-dist bench train`.

    Args:
        machine: as `cce_dist.bench.cases.machine_of` gives it.
        seed: of weights and text.
    Raises:
        RecordError: the rows are of several models.
    """
    models = list(dict.fromkeys(tuple(row[key] for key in SETTINGS) for row in rows))
    if len(models) != 1:
        raise RecordError(f"rows must be of one model {SETTINGS}, got {models}")
    cells = [
        {key: value for key, value in row.items() if key not in SETTINGS and value != ""}
        for row in rows
    ]
    settings: dict[str, Cell] = dict(zip(SETTINGS, models[0], strict=True))
    return make_record(
        "end-to-end", name, title, machine, seeds=(seed,), settings=settings, rows=cells
    )


def blocks(record: Record) -> list[Block]:
    found: list[Block] = [
        Words(
            "Whole training steps: forward, loss, backward, and AdamW. The largest batch is about "
            "the most that fits into the device's memory, found from two smaller ones."
        )
    ]
    for layout, rows in _layouts(record.rows).items():
        found += [Words(f"**{layout}**"), _table(rows)]
    return found


def findings(record: Record) -> Findings:
    """Our losses against the best of the others: tokens a second at the same batch, largest batch,
    tokens a second at each one's largest."""
    wins: list[str] = []
    losses: list[str] = []
    layouts = _layouts(record.rows)
    for layout, rows in layouts.items():
        where = f" ({layout})" if len(layouts) > 1 else ""
        aspects = [
            (f"tokens a second at batch {batch:g}", _speeds(rows, batch))
            for batch in sorted({_value(row, "batch") for row in rows if "batch" in row})
        ]
        aspects.append(("largest batch", _at_largest(rows, "batch")))
        aspects.append(("tokens a second at its largest batch", _at_largest(rows, "tokens_per_s")))
        for what, found in aspects:
            rivals = {name: value for name, value in found.items() if name not in OURS}
            if not rivals:
                continue
            best = max(rivals, key=lambda name: rivals[name])
            for name in (name for name in found if name in OURS):
                ratio = found[name] / rivals[best]
                text = f"`{name}` has {ratio:.2f} times the {what} of {title_of(best)}{where}"
                # A tie, as it is printed, is neither.
                if f"{ratio:.2f}" != "1.00":
                    (wins if ratio > 1 else losses).append(text)
    return Findings(wins, losses)


def _layouts(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        words = [f"{key} {row[key]}" for key in ("dp", "tp") if key in row]
        words += [key.replace("_", " ") for key in ("fsdp", "sequence_parallel") if row.get(key)]
        found.setdefault(", ".join(words), []).append(row)
    return found


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["loss"]) for row in rows))


def _by_batch(rows: Sequence[Row], name: str) -> list[Row]:
    mine = [row for row in rows if row["loss"] == name and "failed" not in row]
    return sorted(mine, key=lambda row: _value(row, "batch"))


def _speeds(rows: Sequence[Row], batch: float) -> dict[str, float]:
    return {
        str(row["loss"]): _value(row, "tokens_per_s")
        for row in rows
        if _value(row, "batch") == batch and "failed" not in row
    }


def _at_largest(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Of those that were tried at more than one batch and twice that."""
    every = {name: _by_batch(rows, name) for name in _names(rows)}
    return {name: _value(mine[-1], key) for name, mine in every.items() if len(mine) > 2}


def _table(rows: Sequence[Row]) -> Table:
    found = []
    for name in _names(rows):
        for row in _by_batch(rows, name):
            speed, dense = _value(row, "tokens_per_s"), _speeds(rows, _value(row, "batch"))
            found.append(
                [
                    title_of(name),
                    number(row.get("batch")),
                    number(row.get("tokens_a_step")),
                    f"{speed:.0f}",
                    f"{speed / dense['dense']:.2f}" if "dense" in dense else "",
                    number(row.get("peak_gib")),
                ]
            )
        for row in rows:
            if row["loss"] == name and "failed" in row:
                found.append([title_of(name), f"did not run: {row['failed']}", *[""] * 4])
    columns = ("loss", "batch of a rank", "tokens a step", "tokens/s", "of dense", "peak GiB")
    return Table(columns, found)


def _value(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, float | int) else 0.0
