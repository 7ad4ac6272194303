"""What README and docs/guide/start.md show works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cce_dist import linear_cross_entropy, token_logprobs
from cce_dist.pipeline.schedules.last_stage import LastStageLoss

README = Path(__file__).parents[2] / "README.md"
PAGES = {"readme": README, "start": README.parent / "docs" / "guide" / "start.md"}
of_each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


@of_each_page
def test_example_runs(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf8"), re.DOTALL)
    (example,) = (block for block in blocks if "import torch" in block)
    names: dict[str, Any] = {}
    exec(example, names)
    assert torch.isfinite(names["out"].loss)
    assert names["hidden"].grad.abs().sum() > 0
    assert names["weight"].grad.abs().sum() > 0


def rows_of_the_table(page: Path) -> dict[str, tuple[str, str]]:
    """On and off, by the function that is called."""
    rows = re.findall(r"^\| .+? \| `(.+?)`.*? \| `?(.+?)`? \|$", page.read_text("utf8"), re.M)
    return {call.partition("(")[0]: (call, off) for call, off in rows}


# README's own example has the second.
SHAPES = {"tokens": (6,), "sequences": (2, 12), "more": (2, 3, 5)}


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@of_each_page
def test_a_line_switches_it_on_and_off(page: Path, shape: tuple[int, ...], bias: bool) -> None:
    on = rows_of_the_table(page)
    made = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=bias)
    hidden = torch.randn(*shape, 16, generator=made)
    ids = torch.randint(0, 50, shape, generator=made)
    response = torch.rand(shape, generator=made) < 0.5
    names: dict[str, Any] = {"hidden": hidden, "head": head, "targets": ids, "F": F}
    names |= {"ids": ids, "response": response, "LastStageLoss": LastStageLoss}
    names |= {"linear_cross_entropy": linear_cross_entropy, "token_logprobs": token_logprobs}

    loss, dense = (eval(line, dict(names)) for line in on["linear_cross_entropy"])
    torch.testing.assert_close(loss, dense)
    parameters = list(head.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(dense, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    found, expected = (eval(line, dict(names)) for line in on["token_logprobs"])
    torch.testing.assert_close(found, expected.where(response[..., 1:], 0))
    exec(on["loss_fn=LastStageLoss"][0], names)
    torch.testing.assert_close(names["loss_fn"](hidden, ids), dense)


class LoraHead(nn.Module):
    """As PEFT's `lora.Linear`: `weight` and `bias` are the frozen base's."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(16, 50).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 50, bias=False)})
        self.scaling = {"default": 2.0}

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        b, a = self.lora_B[adapter].weight, self.lora_A[adapter].weight
        return (b @ a) * self.scaling[adapter]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        more = self.lora_B["default"](self.lora_A["default"](hidden))
        return self.base_layer(hidden) + more * self.scaling["default"]


@of_each_page
def test_a_head_that_lora_wraps(page: Path) -> None:
    (told,) = re.findall(r"`(head\.weight \+ head\..+?)`", page.read_text("utf8"))
    on, off = rows_of_the_table(page)["linear_cross_entropy"]
    torch.manual_seed(0)
    head, hidden, targets = LoraHead(), torch.randn(2, 6, 16), torch.randint(50, (2, 6))
    names: dict[str, Any] = {"hidden": hidden, "head": head, "targets": targets, "F": F}
    names["linear_cross_entropy"] = linear_cross_entropy
    loss, dense = (eval(line, dict(names)) for line in (on.replace("head.weight", told), off))
    torch.testing.assert_close(loss, dense)
    adapter = [x for x in head.parameters() if x.requires_grad]
    assert len(adapter) == 2
    for ours, theirs in zip(
        torch.autograd.grad(loss, adapter), torch.autograd.grad(dense, adapter), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_commands_exist() -> None:
    commands = re.findall(r"^ {4}(\./launch/\w+\.sh)", README.read_text(encoding="utf8"), re.M)
    assert len(commands) == 2
    assert all((README.parent / command).stat().st_mode & 0o100 for command in commands)
