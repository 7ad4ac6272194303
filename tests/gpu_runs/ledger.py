"""The ledger of GPU runs: which GPU test ended how, at which commit; and what is still missing.

A run appends a line of JSON for each test marked `gpu` or `multigpu` as soon as the test ends, so
that a run that is ended early counts as far as it came. A test that had no such device leaves
none.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

DEFAULT = Path("runs/gpu_ledger.jsonl")  # of the repository
LACKS_DEVICE = re.compile(r"needs (\d+ (CUDA device|GPU)|a \w+ GPU)")
NO_COMMIT = "unknown"


def commit_of(root: Path) -> str:
    """Returns the commit's full hash, with "-dirty" after changes, or "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return NO_COMMIT
    return done.stdout.strip() or NO_COMMIT


class Ledger:
    """A plugin of pytest's controller that appends to the ledger at `path`.

    Args: commit: the commit that is tested; "" asks git.
    """

    def __init__(self, path: Path, root: Path, commit: str) -> None:
        self.path, self.root, self.given_commit = path, root, commit
        self.phases: dict[str, list[pytest.TestReport]] = {}
        self.kernels: set[str] = set()
        self.num_tests = 0

    @cached_property
    def commit(self) -> str:
        return self.given_commit or commit_of(self.root)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Of a worker that died xdist reports the phase "???", without markers.
        died = report.when not in ("setup", "call", "teardown")
        if not died and {"gpu", "multigpu"}.isdisjoint(report.keywords):
            return
        phases = self.phases.setdefault(report.nodeid, [])
        phases.append(report)
        if died or report.when == "teardown":
            self._append(self.phases.pop(report.nodeid))

    def _append(self, phases: list[pytest.TestReport]) -> None:
        outcomes = {phase.outcome for phase in phases}
        outcome = next(x for x in ("failed", "skipped", "passed") if x in outcomes)
        record: dict[str, Any] = {"commit": self.commit, "test": phases[0].nodeid}
        record |= {"outcome": outcome, "seconds": round(sum(x.duration for x in phases), 2)}
        record["time"] = round(time.time())
        if outcome == "skipped":
            (reason,) = (x.longrepr for x in phases if x.skipped)
            text = str(reason[2] if isinstance(reason, tuple) else reason)
            record["reason"] = text.removeprefix("Skipped: ")
            if LACKS_DEVICE.search(record["reason"]):
                return
        if outcome == "passed":
            properties: dict[str, Any] = dict(phases[-1].user_properties)
            launched = set(properties.get("kernels", ()))
            record["new_kernels"] = sorted(launched - self.kernels)
            self.kernels |= launched
        self.num_tests += 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.num_tests:
            line = f"{self.path}: {self.num_tests} GPU tests at {self.commit}"
            terminalreporter.write_line(f"{line}, {len(self.kernels)} kernels launched")


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns the ledgers' records from the oldest to the newest."""
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    return sorted(map(json.loads, lines), key=lambda record: record["time"])


def last_records(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the newest record of each test, of `records` from the oldest to the newest. A skip
    replaces no other outcome."""
    last: dict[str, dict[str, Any]] = {}
    for record in records:
        if record["outcome"] != "skipped" or record["test"] not in last:
            last[record["test"]] = record
    return last
