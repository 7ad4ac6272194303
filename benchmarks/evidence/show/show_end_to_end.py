"""Records of kind "end-to-end": made from rows of `cce-dist bench train`, and their page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.evidence.figures import Chart
from benchmarks.evidence.markdown import number, table, value_of
from benchmarks.evidence.methods import OURS, title_of
from benchmarks.evidence.records import Record, Row, make_record, write_record

TITLE = "What does it buy in a training job?"
# Fields that all rows of `cce-dist bench train` share.
SETTINGS = ("V", "D", "layers", "dtype")


def write_end_to_end(
    rows: Sequence[Row], machine: Mapping[str, str], path: Path, title: str, *, seed: int
) -> None:
    """Writes the record of the rows of `cce-dist bench train` to `path`, folder/<name>.json.

    Args:
        machine: as `cce_dist.bench.arguments.machine_of` gives it.
        seed: seed of weights and text.
    """
    cells = [
        {key: value for key, value in row.items() if key not in SETTINGS and value != ""}
        for row in rows
    ]
    settings = {key: rows[0][key] for key in SETTINGS}
    record = make_record(
        "end-to-end", path.stem, title, machine, seeds=(seed,), settings=settings, rows=cells
    )
    write_record(record, path.parent)


def introduction(records: Sequence[Record]) -> list[str]:
    """Returns our losses beside the best other at the largest batch that both ran."""
    sentences = []
    for title, rows in together(records):
        for name in (name for name in _names(rows) if name in OURS):
            parts = [
                text
                for batch in sorted({value_of(row, "batch") for row in rows if "batch" in row})
                if (text := _over_best(name, speeds(rows, batch), f"at batch {batch:g}"))
            ]
            largest = _over_best(name, at_largest(rows, "tokens_per_s"), "at each one's largest")
            parts += [largest] if largest else []
            if parts:
                text = f"{title}: {title_of(name)} trains {'; '.join(parts)}."
                sentences.append(f"- {text}")
    return [
        "Tokens a second, over those of the best other loss. **Bold**: ours is slower.",
        "\n".join(sentences) or "No two losses have been run together.",
        "Whole training steps: forward, loss, backward, and AdamW. The largest batch is about the "
        "most that fits into the device's memory, found from two smaller ones.",
    ]


def section(record: Record) -> list[str]:
    parts = []
    for layout, rows in _layouts(record.rows).items():
        parts += [f"{layout}:", _table(rows)]
    return parts


def figures(records: Sequence[Record]) -> dict[str, list[Chart]]:
    return {}


def _over_best(ours: str, values: Mapping[str, float], where: str) -> str:
    """Returns our value over the best value of another loss, and names that loss."""
    rivals = {name: value for name, value in values.items() if name not in OURS}
    if ours not in values or not rivals:
        return ""
    best = max(rivals, key=lambda name: rivals[name])
    ratio = f"{values[ours] / rivals[best]:.2f}"
    text = f"{ratio} times {title_of(best)} {where}"
    return f"**{text}**" if float(ratio) < 1 else text


def together(records: Sequence[Record]) -> list[tuple[str, list[Row]]]:
    """Returns sets of rows that can be compared, each with the titles of its records.

    Rows of a set have the same device, commit, model and layout.
    """
    sets: dict[tuple[str, ...], dict[str, list[Row]]] = {}
    for record in records:
        about = (record.machine.get("device", ""), record.commit, str(dict(record.settings)))
        for layout, rows in _layouts(record.rows).items():
            sets.setdefault((*about, layout), {}).setdefault(record.title, []).extend(rows)
    return [
        (" and ".join(by_title), [row for rows in by_title.values() for row in rows])
        for by_title in sets.values()
    ]


def _layouts(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    by_layout: dict[str, list[Row]] = {}
    for row in rows:
        words = [f"{key} {row[key]}" for key in ("dp", "tp") if key in row]
        words += [key.replace("_", " ") for key in ("fsdp", "sequence_parallel") if row.get(key)]
        by_layout.setdefault(", ".join(words), []).append(row)
    return by_layout


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["loss"]) for row in rows))


def _by_batch(rows: Sequence[Row], name: str) -> list[Row]:
    mine = [row for row in rows if row["loss"] == name and "failed" not in row]
    return sorted(mine, key=lambda row: value_of(row, "batch"))


def speeds(rows: Sequence[Row], batch: float) -> dict[str, float]:
    return {
        str(row["loss"]): value_of(row, "tokens_per_s")
        for row in rows
        if value_of(row, "batch") == batch and "failed" not in row
    }


def at_largest(rows: Sequence[Row], key: str) -> dict[str, float]:
    """Returns `key` at each loss's largest batch, for losses that ran at more than two batches.

    A loss with fewer batches ran only at the config's batch and at twice that.
    """
    every = {name: _by_batch(rows, name) for name in _names(rows)}
    return {name: value_of(mine[-1], key) for name, mine in every.items() if len(mine) > 2}


def _table(rows: Sequence[Row]) -> str:
    cells = []
    for name in _names(rows):
        for row in _by_batch(rows, name):
            speed, dense = value_of(row, "tokens_per_s"), speeds(rows, value_of(row, "batch"))
            cells.append(
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
                cells.append([title_of(name), f"did not run: {row['failed']}", *[""] * 4])
    columns = ("loss", "batch of a rank", "tokens a step", "tokens/s", "of dense", "peak GiB")
    return table(columns, cells)
