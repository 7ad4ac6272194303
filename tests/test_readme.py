"""What README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parent.parent / "README.md"


def test_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert torch.isfinite(names["out"].loss)
    assert names["hidden"].grad.abs().sum() > 0
    assert names["weight"].grad.abs().sum() > 0


def test_commands_exist() -> None:
    commands = re.findall(r"^ {4}(\./launch/\w+\.sh)", README.read_text(encoding="utf8"), re.M)
    assert len(commands) == 2
    assert all((README.parent / command).stat().st_mode & 0o100 for command in commands)
