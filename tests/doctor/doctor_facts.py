"""A machine's facts, and rows of a report, for tests of the doctor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cce_dist.doctor.facts import Facts


def facts(**changes: Any) -> Facts:
    return replace(Facts(host="node1", versions={"torch": "2.13.0"}), **changes)


def row(name: str, report: dict[str, Any]) -> dict[str, Any]:
    (check,) = [check for check in report["checks"] if check["name"] == name]
    return check
