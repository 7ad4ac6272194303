"""Records of evidence: JSON files, each with everything that it takes to measure it again.

All numbers that a reader sees come from these files.
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
# Digits of each number: reading a figure or comparing with a spread needs no more.
DIGITS = 6
FOLDER = Path("docs/notebook/data/evidence")

Kind = Literal["convergence", "fidelity", "end-to-end"]
Cell = str | int | float | bool | None
Row = Mapping[str, Cell]

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Fields that cce_dist.bench.arguments.machine_of gives in addition to the machine.
_RECORD_FIELDS = ("command", "date", "commit")


class RecordError(ValueError):
    """A file is not a valid record; the message names the file and the fault."""


@dataclass(frozen=True)
class Record:
    """Rows that one command measured on one machine, at one commit.

    Args:
        kind: the question that the record answers; each kind has a section of the report.
        name: the file's name, such as "convergence-cpu-small": lower case, digits and hyphens.
        title: one line that tells the reader what was run, and where.
        command, date, commit: the command, its date (ISO), and the code's commit.
        machine: as `cce_dist.bench.machine.describe_machine` gives it, without date and commit.
        seeds: all seeds of the rows; empty if nothing is drawn at random.
        settings: sizes, dtype and thresholds that all rows share.
        rows: flat mappings; a row leaves out a field that it has no value for.
    Raises:
        RecordError: a field breaks one of these rules, or a number is not finite.
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
        for field in ("title", *_RECORD_FIELDS):
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
    """Returns a record whose command, date and commit are taken out of `machine`.

    Args:
        machine: as `cce_dist.bench.arguments.machine_of` gives it.
    Raises:
        RecordError: as for `Record`.
    """
    description = {key: value for key, value in machine.items() if key not in _RECORD_FIELDS}
    return Record(
        kind=kind,
        name=name,
        title=title,
        command=machine.get("command", ""),
        date=machine.get("date", ""),
        commit=machine.get("commit", ""),
        machine=description,
        seeds=tuple(seeds),
        settings=dict(settings or {}),
        rows=tuple(rows),
    )


def write_record(record: Record, folder: Path = FOLDER) -> Path:
    """Writes folder/<name>.json, with a line for each row and DIGITS digits for each number.

    The file is written whole or not at all. Fields with the value None are left out of a row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json"
    partial = folder / f".{record.name}.{os.getpid()}.partial"
    partial.write_text(_as_json(record), encoding="utf8")
    partial.replace(path)
    return path


def read_record(path: Path) -> Record:
    """Returns the record in a file.

    Raises:
        RecordError: the file cannot be read, has another version, lacks a field or has an unknown
            one.
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


def read_records(folder: Path = FOLDER) -> list[Record]:
    """Returns a folder's records by name; none if there is no folder.

    Raises:
        RecordError: as for `read_record`, for the first broken file.
    """
    return [read_record(path) for path in sorted(folder.rglob("*.json"))]


def append_rows(record: Record, folder: Path = FOLDER) -> Record:
    """Adds `record`'s rows to the file of its name, or makes the file; returns the whole record.

    Several processes may append at the same time. The file keeps the command and date of its
    first rows.

    Raises:
        RecordError: the file is broken, or its rows come from another machine, commit, or settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json"
    with locked(folder):
        if path.exists():
            existing = read_record(path)
            check_same(existing, record)
            rows = (*existing.rows, *record.rows)
            seeds = tuple(dict.fromkeys((*existing.seeds, *record.seeds)))
            record = dataclasses.replace(existing, rows=rows, seeds=seeds)
        write_record(record, folder)
    return record


def check_same(existing: Record, record: Record) -> None:
    """Checks that the rows of both records may stand in one file.

    Raises:
        RecordError: they may not; the message names each field that differs.
    """
    differing = []
    for field in ("kind", "title", "commit", "machine", "settings"):
        before, now = (_rounded(getattr(each, field)) for each in (existing, record))
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
    """Holds a lock on `folder` that one process of this host can hold at a time."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
