"""The form in which evidence is kept: one JSON file a record, with all that it takes to rerun it.

The numbers that a reader is shown come from these files alone.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

# Raise it when a reader of the old form would misread the new one.
SCHEMA_VERSION = 1
# Of each number: what is read off a figure or compared with a spread needs no more.
DIGITS = 6
FOLDER = Path("docs/evidence")

Kind = Literal["convergence", "fidelity", "probabilities", "end-to-end", "classes"]
Cell = str | int | float | bool | None
Row = Mapping[str, Cell]

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# What cce_dist.bench.arguments.machine_of gives beside the machine.
_OWN_FIELDS = ("command", "date", "commit")


class RecordError(ValueError):
    """A file that is no record, or no longer one; its text names the file and what is wrong."""


@dataclass(frozen=True)
class Record:
    """Rows that one command measured on one machine, at one commit.

    Args:
        kind: what was asked; each has a section of the report.
        name: of the file, such as "convergence-cpu-small": lower case, digits and hyphens.
        title: one line for the reader, what was run where.
        command, date, commit: how, when (ISO) and of what.
        machine: as `cce_dist.bench.machine.describe_machine` gives it, less those.
        seeds: of all rows; empty where nothing is drawn.
        settings: what all rows share: sizes, dtype, thresholds.
        rows: flat; a row leaves out what it has no value for.
    Raises:
        RecordError: a field is not as said, or a number is not finite.
    """

    kind: Kind
    name: str
    title: str
    command: str
    date: str
    commit: str
    machine: Mapping[str, str]
    seeds: tuple[int, ...]
    settings: Mapping[str, Cell]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        _require(self.kind in get_args(Kind), "kind", f"be among {get_args(Kind)}", self.kind)
        is_name = isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None
        _require(is_name, "name", "be lower-case words with hyphens", self.name)
        for field in ("title", *_OWN_FIELDS):
            value = getattr(self, field)
            _require(isinstance(value, str) and value != "", field, "be text", value)
        _require(_is_mapping(self.machine, str), "machine", "map names to text", self.machine)
        are_ints = all(type(seed) is int for seed in self.seeds)
        _require(are_ints, "seeds", "be integers", self.seeds)
        for where, cells in (("settings", self.settings), *_numbered(self.rows)):
            _require(_is_mapping(cells), where, "map names to values", cells)
            for name, value in cells.items():
                is_cell = isinstance(value, Cell)
                _require(
                    is_cell, f"{where}.{name}", "be text, a number, true, false or null", value
                )
                is_finite = not isinstance(value, float) or math.isfinite(value)
                rule = "be finite (leave it out, and say why in a column of text)"
                _require(is_finite, f"{where}.{name}", rule, value)


def make_record(
    kind: Kind,
    name: str,
    title: str,
    machine: Mapping[str, str],
    *,
    seeds: Sequence[int] = (),
    settings: Mapping[str, Cell] | None = None,
    rows: Sequence[Row] = (),
) -> Record:
    """
    Args: machine: as `cce_dist.bench.arguments.machine_of` gives it, with command, date and commit.
    Raises:
        RecordError: as `Record`.
    """
    rest = {key: value for key, value in machine.items() if key not in _OWN_FIELDS}
    own = {key: machine.get(key, "") for key in _OWN_FIELDS}
    return Record(
        kind=kind,
        name=name,
        title=title,
        machine=rest,
        seeds=tuple(seeds),
        settings=dict(settings or {}),
        rows=tuple(rows),
        **own,
    )


def write_record(record: Record, folder: Path = FOLDER) -> Path:
    """folder/<name>.json, a line for each row, numbers of DIGITS digits; whole or not at all.

    What a row has None for is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json"
    partial = folder / f".{record.name}.{os.getpid()}.partial"
    partial.write_text(_as_json(record), encoding="utf8")
    partial.replace(path)
    return path


def read_record(path: Path) -> Record:
    """
    Raises:
        RecordError: it cannot be read, is of another version, or lacks or has a field too many.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf8"), parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} must be a record in JSON: {error}") from None
    version = fields.pop("schema", None) if isinstance(fields, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(f"{path} must have schema {SCHEMA_VERSION}, got {version!r}")
    known = {field.name for field in dataclasses.fields(Record)}
    if fields.keys() != known:
        raise RecordError(
            f"{path} must have the fields {sorted(known)}, got {sorted(fields)}: missing "
            f"{sorted(known - fields.keys())}, unknown {sorted(fields.keys() - known)}"
        )
    if not isinstance(fields["seeds"], list) or not isinstance(fields["rows"], list):
        raise RecordError(f"{path}: seeds and rows must be lists")
    fields["seeds"], fields["rows"] = tuple(fields["seeds"]), tuple(fields["rows"])
    try:
        record = Record(**fields)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None
    if record.name != path.stem:
        raise RecordError(f"{path}: name must be that of the file, got {record.name!r}")
    return record


def read_records(folder: Path = FOLDER, kind: Kind | None = None) -> list[Record]:
    """All of a folder, or those of a kind, by name; none where there is no such folder.

    Raises:
        RecordError: as `read_record`, of the first that is broken.
    """
    records = [read_record(path) for path in sorted(folder.glob("*.json"))]
    return [record for record in records if kind in (None, record.kind)]


def append_rows(record: Record, folder: Path = FOLDER) -> Record:
    """Add `record`'s rows to the file of its name, or begin it; what the file then holds.

    Processes may do so side by side. The command and date of the first stay.

    Raises:
        RecordError: the file is broken, or its rows come from another machine, commit, or settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json"
    with locked(folder):
        if path.exists():
            found = read_record(path)
            check_same(found, record)
            rows = (*found.rows, *record.rows)
            seeds = tuple(dict.fromkeys((*found.seeds, *record.seeds)))
            record = dataclasses.replace(found, rows=rows, seeds=seeds)
        write_record(record, folder)
    return record


def check_same(found: Record, record: Record) -> None:
    """
    Raises:
        RecordError: rows of the two must not stand in one file; names each field that differs.
    """
    differing = []
    for field in ("kind", "title", "commit", "machine", "settings"):
        before, now = (_rounded(getattr(one, field)) for one in (found, record))
        if before != now:
            differing.append(f"  {field} was {before!r}, got {now!r}")
    if differing:
        rule = f"rows added to {record.name} must be of the same machine, commit and settings:"
        end = "  choose another name, or remove the file"
        raise RecordError("\n".join([rule, *differing, end]))


def _as_json(record: Record) -> str:
    fields = {"schema": SCHEMA_VERSION, **dataclasses.asdict(record)}
    rows = [_compact(_rounded(row)) for row in fields.pop("rows")]
    head = [f"{json.dumps(key)}: {_compact(_rounded(value))}" for key, value in fields.items()]
    lines = ",\n".join(rows)
    return "{\n" + ",\n".join([*head, f'"rows": [\n{lines}\n]' if rows else '"rows": []']) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(cell) for key, cell in value.items() if cell is not None}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"numbers must be finite, got {text}")


def _require(holds: bool, where: str, rule: str, got: object) -> None:
    if not holds:
        raise RecordError(f"{where} must {rule}, got {got!r}")


def _is_mapping(value: object, of: type = object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(key, str) and isinstance(cell, of) for key, cell in value.items())


def _numbered(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(rows):
        yield f"rows[{number}]", row


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time, of those on this host."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
