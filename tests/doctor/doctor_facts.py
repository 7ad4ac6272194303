"""A machine's facts for tests of the doctor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cce_dist.doctor.facts import Facts


def facts(**changes: Any) -> Facts:
    return replace(Facts(host="node1", versions={"torch": "2.13.0"}), **changes)
