"""Records of evidence: JSON files, each with everything that it takes to measure it again.

All numbers that a reader sees come from these files.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

# Digits of each number: reading a figure or comparing with a spread needs no more.
DIGITS = 6
FOLDER = Path("docs/notebook/data/evidence")

Kind = Literal["convergence", "fidelity", "end-to-end", "distillation"]
# Numbers first: a fault of a cell is told by the first of these types.
Cell = float | int | str | bool | None
Row = Mapping[str, Cell]
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
Name = Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")]
Text = Annotated[str, StringConstraints(min_length=1)]

# Fields that cce_dist.bench.arguments.machine_of gives in addition to the machine.
_RECORD_FIELDS = ("command", "date", "commit")


class RecordError(ValueError):
    """A file is not a valid record; the message names the file and the fault."""


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))
class Record:
    """Rows that one command measured on one machine, at one commit.

    Args:
        schema: version of the form; raise it when a reader of the old form would misread the new.
        kind: the question that the record answers; each kind has a page of the report.
        name: the file's name, such as "convergence-cpu-small": lower case, digits and hyphens.
        title: one line that tells the reader what was run, and where.
        command, date, commit: the command, its date (ISO), and the code's commit.
        machine: as `cce_dist.bench.machine.describe_machine` gives it, without date and commit.
        seeds: all seeds of the rows; empty if nothing is drawn at random.
        settings: sizes, dtype and thresholds that all rows share.
        rows: flat mappings; a row leaves out a field that it has no value for.
    Raises:
        pydantic.ValidationError, a ValueError: a field has another type, or a number is not finite.
    """

    schema: Literal[1]
    kind: Kind
    name: Name
    title: Text
    command: Text
    date: Text
    commit: Text
    machine: dict[str, str]
    seeds: tuple[int, ...]
    settings: dict[str, Cell]
    rows: tuple[dict[str, Cell], ...]


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
    try:
        return Record(
            schema=1,
            kind=kind,
            name=name,
            title=title,
            **{field: machine.get(field, "") for field in _RECORD_FIELDS},
            machine=description,
            seeds=tuple(seeds),
            settings=dict(settings or {}),
            rows=tuple(dict(row) for row in rows),
        )
    except ValidationError as error:
        raise RecordError(_describe(error)) from None


def check_path(path: Path) -> None:
    """Checks that a record can be written to `path`, before anything is measured.

    Raises:
        RecordError: the file's name is no name of a record, or has another ending than .json.
    """
    if path.suffix != ".json" or not NAME.fullmatch(path.stem):
        rule = "be the path of a .json file with a name of lower-case words and hyphens"
        raise RecordError(f"record must {rule}, got {path}")


def _describe(error: ValidationError) -> str:
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}, got {fault['input']!r}"


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
        RecordError: the file cannot be read, or is no record of its name.
    """
    try:
        record = TypeAdapter(Record).validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path} must be a record: {error}") from None
    except ValidationError as error:
        raise RecordError(f"{path}: {_describe(error)}") from None
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
        RecordError: the file is broken, or its rows come from another machine, commit, or settings;
            the message names each field that differs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json"
    with locked(folder):
        if path.exists():
            existing = read_record(path)
            differing = []
            for field in ("kind", "title", "commit", "machine", "settings"):
                before, now = (_rounded(getattr(each, field)) for each in (existing, record))
                if before != now:
                    differing.append(f"\n  {field} was {before!r}, got {now!r}")
            if differing:
                raise RecordError(
                    f"rows added to {record.name} must be of the same machine, commit and "
                    f"settings:{''.join(differing)}\n  choose another name, or remove the file"
                )
            rows = (*existing.rows, *record.rows)
            seeds = tuple(dict.fromkeys((*existing.seeds, *record.seeds)))
            record = dataclasses.replace(existing, rows=rows, seeds=seeds)
        write_record(record, folder)
    return record


def _as_json(record: Record) -> str:
    fields = dataclasses.asdict(record)
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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a lock on `folder` that one process of this host can hold at a time."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
