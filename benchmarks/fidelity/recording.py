"""Record of evidence with the rows of all captures of one training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.evidence.records import Cell, Row, make_record, write_record
from cce_dist.bench.inputs import BenchInputs


class Recording:
    """A record that is written anew after every capture, so that no measurement is lost.

    Args:
        path: folder/<name>.json; None: nothing is written.
        settings: the command's settings, beside those that the captures share.
    Raises:
        ValueError: the file's name is no name of a record.
    """

    def __init__(
        self,
        path: Path | None,
        title: str,
        machine: Mapping[str, str],
        settings: Mapping[str, Cell],
    ) -> None:
        if path is not None and path.suffix != ".json":
            raise ValueError(f"record must be the path of a .json file, got {path}")
        self.path, self.title, self.machine = path, title, machine
        self.settings = dict(settings)
        self.seeds: tuple[int, ...] = ()
        self.rows: list[Row] = []
        self.shared: dict[str, Cell] | None = None
        if path is not None:
            # Refuse a bad name now, before anything is measured.
            make_record("fidelity", path.stem, title or "fidelity", machine)

    def add(self, inputs: BenchInputs, rows: Sequence[Row]) -> None:
        """Adds the rows of one capture and writes the record.

        Raises:
            ValueError: the capture has other sizes, or another training run, than those before.
        """
        shared = shared_of(inputs)
        if self.shared is not None and shared != self.shared:
            raise ValueError(
                "all inputs of a record must be of one training run, else write several records: "
                f"{inputs.kind} has {shared}, earlier inputs have {self.shared}"
            )
        self.shared = shared
        seed = inputs.training.get("seed")
        self.seeds = () if seed is None else (int(seed),)
        about: dict[str, Cell] = {"inputs": inputs.kind, "step": inputs.training.get("step")}
        self.rows += [{**about, **row} for row in rows]
        if self.path is None:
            return
        title = self.title or (
            f"V={shared['V']}, D={shared['D']}, {shared['dtype']}, N={shared['N']}: "
            f"{self.machine['device']}"
        )
        record = make_record(
            "fidelity",
            self.path.stem,
            title,
            self.machine,
            seeds=self.seeds,
            settings={**shared, **self.settings},
            rows=self.rows,
        )
        write_record(record, self.path.parent)


def shared_of(inputs: BenchInputs) -> dict[str, Cell]:
    """Returns the settings that all captures of one training run have in common."""
    cells: dict[str, Cell] = {**inputs.description, **inputs.training}
    return {key: value for key, value in cells.items() if key not in ("inputs", "step", "seed")}
