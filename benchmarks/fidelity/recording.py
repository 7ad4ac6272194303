"""Record of evidence with the rows of all captures of one training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.evidence.records import Cell, Row, make_record, write_record
from cce_dist.bench.inputs import BenchInputs


@dataclass
class Recording:
    """A record that is written anew after every capture, so that no measurement is lost.

    Args:
        path: folder/<name>.json; None: nothing is written.
        title: the record's title; empty: sizes and device.
        settings: the command's settings, beside those that the captures share.
    Raises:
        ValueError: the file's name is no name of a record.
    """

    path: Path | None
    title: str
    machine: Mapping[str, str]
    settings: Mapping[str, Cell]
    shared: dict[str, Cell] | None = None
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        if self.path.suffix != ".json":
            raise ValueError(f"record must be the path of a .json file, got {self.path}")
        # Refuse a bad name now, before anything is measured.
        make_record("fidelity", self.path.stem, self.title or "fidelity", self.machine)

    def add(self, inputs: BenchInputs, rows: Sequence[Row]) -> None:
        """Adds the rows of one capture and writes the record.

        Raises:
            ValueError: the capture has other sizes, or another training run, than those before.
        """
        shared: dict[str, Cell] = {**inputs.description, **inputs.training}
        about = {"inputs": shared.pop("inputs"), "step": shared.pop("step", None)}
        if self.shared not in (None, shared):
            raise ValueError(
                "all inputs of a record must be of one training run, else write several records: "
                f"{inputs.kind} has {shared}, earlier inputs have {self.shared}"
            )
        self.shared = shared
        self.rows += [{**about, **row} for row in rows]
        if self.path is None:
            return
        sizes = ", ".join(f"{key}={shared[key]}" for key in ("V", "D", "N"))
        settings = {**shared, **self.settings}
        seed = settings.pop("seed", None)
        record = make_record(
            "fidelity",
            self.path.stem,
            self.title or f"{sizes}, {shared['dtype']}: {self.machine['device']}",
            self.machine,
            seeds=() if seed is None else (int(seed),),
            settings=settings,
            rows=self.rows,
        )
        write_record(record, self.path.parent)
