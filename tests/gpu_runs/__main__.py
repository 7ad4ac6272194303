"""`python -m tests.gpu_runs LEDGER ...` names the GPU tests that this commit lacks."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_runs.kernels import kernels_in
from tests.gpu_runs.ledger import DEFAULT, NO_COMMIT, commit_of, last_records, read_records
from tests.gpu_runs.parts import SECONDS, write_seconds


class Collected:
    """A plugin of pytest that keeps the ids of the tests that were collected."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [item.nodeid for item in session.items]


def collect(marker: str) -> list[str]:
    """Returns the ids of the tests here that pytest's -m `marker` chooses."""
    collected, output = Collected(), io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(["--collect-only", "-q", "-m", marker], plugins=[collected])
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"{output.getvalue()}\nno tests were collected for -m {marker!r}")
    return collected.tests


def main(arguments: list[str] | None = None) -> int:
    """Prints the ids of the tests without an outcome to stdout, all else to stderr.

    Returns: 0 if each test has passed or could not run on those machines, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_runs", description=__doc__)
    parser.add_argument("ledgers", nargs="*", type=Path, default=[DEFAULT])
    parser.add_argument("-m", "--marker", default="gpu or multigpu", help="pytest's -m")
    parser.add_argument("--commit", default="", help="default: ask git")
    text = f"write the tests' mean seconds to {SECONDS.name}, by which --part cuts"
    parser.add_argument("--write-seconds", action="store_true", help=text)
    options = parser.parse_intermixed_args(arguments)
    absent = [str(path) for path in options.ledgers if not path.exists()]
    if absent:
        parser.error(f"LEDGER must be a file that a run of GPU tests wrote, got {absent}")
    records = read_records(options.ledgers)
    if options.write_seconds:
        write_seconds(records)
        return 0
    commit = options.commit or commit_of(Path.cwd())
    if commit == NO_COMMIT:
        parser.error("--commit must be given where git knows none")
    records = [record for record in records if record["commit"] == commit]
    last = last_records(records)
    by_outcome: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": [], "not run": []}
    for test in collect(options.marker):
        by_outcome[last[test]["outcome"] if test in last else "not run"].append(test)
    report(by_outcome, records, last)
    counts = ", ".join(f"{len(tests)} {outcome}" for outcome, tests in by_outcome.items())
    print(f"{commit}: {counts}", file=sys.stderr)
    for test in by_outcome["not run"]:
        print(test)
    return 1 if by_outcome["failed"] or by_outcome["not run"] else 0


def report(
    by_outcome: dict[str, list[str]],
    records: list[dict[str, Any]],
    last: dict[str, dict[str, Any]],
) -> None:
    """Prints to stderr what deserves a look: skips, failures, kernels that were not launched."""
    for reason, count in Counter(last[test]["reason"] for test in by_outcome["skipped"]).items():
        print(f"skipped {count}: {reason}", file=sys.stderr)
    for test in by_outcome["failed"]:
        print(f"failed: {test}", file=sys.stderr)
    failed_once = {record["test"] for record in records if record["outcome"] == "failed"}
    for test in sorted(failed_once.intersection(by_outcome["passed"])):
        print(f"failed at first: {test}", file=sys.stderr)
    launched = {kernel for record in records for kernel in record.get("new_kernels", ())}
    missing = sorted(kernels_in() - launched)
    print(f"kernels that no test launched: {', '.join(missing) or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
