"""What README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cce_dist import linear_cross_entropy, token_logprobs
from cce_dist.adapters.last_stage import LastStageLoss

README = Path(__file__).parent.parent / "README.md"


def test_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert torch.isfinite(names["out"].loss)
    assert names["hidden"].grad.abs().sum() > 0
    assert names["weight"].grad.abs().sum() > 0


def test_a_line_switches_it_on_and_off() -> None:
    rows = re.findall(r"^\| .+? \| `(.+?)`.*? \| `?(.+?)`? \|$", README.read_text("utf8"), re.M)
    on = {call.partition("(")[0]: (call, off) for call, off in rows}
    made = torch.Generator().manual_seed(0)
    head = nn.Linear(16, 50, bias=False)
    hidden, ids = torch.randn(6, 16, generator=made), torch.randint(0, 50, (6,), generator=made)
    response = torch.tensor([False, False, False, True, True, True])
    names: dict[str, Any] = {"hidden": hidden, "head": head, "targets": ids, "F": F}
    names |= {"ids": ids, "response": response, "LastStageLoss": LastStageLoss}
    names |= {"linear_cross_entropy": linear_cross_entropy, "token_logprobs": token_logprobs}

    loss, dense = (eval(line, dict(names)) for line in on["linear_cross_entropy"])
    torch.testing.assert_close(loss, dense)
    found = eval(on["token_logprobs"][0], dict(names))
    expected = head(hidden).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(found, expected.where(response[1:], 0))
    exec(on["loss_fn=LastStageLoss"][0], names)
    torch.testing.assert_close(names["loss_fn"](hidden, ids), dense)


def test_commands_exist() -> None:
    commands = re.findall(r"^ {4}(\./launch/\w+\.sh)", README.read_text(encoding="utf8"), re.M)
    assert len(commands) == 2
    assert all((README.parent / command).stat().st_mode & 0o100 for command in commands)
