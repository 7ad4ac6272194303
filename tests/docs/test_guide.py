"""What the guide's short blocks of Python show works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import cce_dist
import cce_dist.distributed
import cce_dist.integrations.transformers
import cce_dist.integrations.trl
import cce_dist.rl
import megatron_patch
from cce_dist.reference import linear_cross_entropy_reference
from tests.docs.recipe_cases import DOCS, close, head_of, made

GUIDE = DOCS / "guide"
# keep_logits needs the Triton kernels, Schedule1F1B a pipeline.
NOT_HERE = ("keep_logits", "Schedule", "PipelineHead", "TiedEmbedding", "megatron_patch", "import ")
PAGES = ("start", "modes", "options", "recipes", "losses/distillation")


def blocks(page: str) -> list[str]:
    text = (GUIDE / f"{page}.md").read_text(encoding="utf8")
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block for block in found if not any(word in block for word in NOT_HERE)]


def names_of() -> dict[str, Any]:
    given = made()
    head = head_of(given["weight"], given["bias"])
    generator = torch.Generator().manual_seed(1)
    return {
        **{name: getattr(cce_dist, name) for name in cce_dist.__all__},
        "torch": torch,
        "hidden": given["hidden"].requires_grad_(),
        "targets": given["targets"],
        "ids": given["targets"].clamp_min(0),
        "head": head,
        "model": torch.nn.ModuleDict({"head": head}),
        "embedding": head,
        "weight": head.weight,
        "bias": head.bias,
        "group": None,
        "tp_group": None,
        "temperature": 0.8,
        "is_response": given["targets"] != -100,
        "rl": cce_dist.rl,
        "before": torch.full((8, 11), -4.0),
        "reference": torch.full((8, 11), -4.5),
        "reference_hidden": torch.randn(8, 12, 4, generator=generator),
        "reference_weight": torch.randn(70, 4, generator=generator),
        "teacher_hidden": torch.randn(8, 12, 4, generator=generator),
        "teacher_weight": torch.randn(70, 4, generator=generator),
        "advantages": torch.randn(8, generator=generator),
        "advantage": given["advantage"][:, 1:],
        # Each token allowed its own id and three more.
        "offsets": torch.arange(given["targets"].numel() + 1) * 4,
        "allowed": (given["targets"].clamp_min(0).reshape(-1, 1) + torch.arange(4))
        .fmod(60)
        .view(-1),
        "others": given["targets"].clamp_min(0)[..., None],
        "a": torch.randn(3, 8, generator=generator).double(),
        "b": torch.randn(60, 3, generator=generator).double(),
        "s": 1.5,
    }


def named(page: str) -> list[Any]:
    return [pytest.param(block, id=f"{page}-{i}") for i, block in enumerate(blocks(page))]


@pytest.mark.parametrize("block", [case for page in PAGES for case in named(page)])
def test_a_block_runs(block: str) -> None:
    exec(block, names_of())


def test_the_first_line_of_start_and_modes() -> None:
    for page in ("start", "modes"):
        names = names_of()
        exec(blocks(page)[0], names)
        found = names["loss"]
        how = {} if page == "modes" else {"bias": names["bias"]}
        args = (names["hidden"], names["weight"], names["targets"])
        wanted = linear_cross_entropy_reference(*args, **how).loss
        close({"loss": found.detach()}, {"loss": wanted.detach()})


PAGE_FILES = sorted(GUIDE.rglob("*.md"))


@pytest.mark.parametrize("path", PAGE_FILES, ids=[path.stem for path in PAGE_FILES])
def test_a_page_is_short(path: Path) -> None:
    lines = path.read_text(encoding="utf8").splitlines()
    assert len(lines) <= 250
    assert max(map(len, lines)) <= 400


@pytest.mark.parametrize("path", PAGE_FILES, ids=[path.stem for path in PAGE_FILES])
def test_a_page_has_no_history(path: Path) -> None:
    text = path.read_text(encoding="utf8")
    assert re.findall(r"\b20\d\d-\d\d-\d\d\b", text) == []
    # A commit: hexadecimal digits, letters among them.
    assert re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", text) == []
    assert re.findall(r"\d ?(?:us|µs|microseconds)\b", text) == []


def test_every_public_name_has_a_page() -> None:
    pages = "".join(path.read_text() for path in (GUIDE.parent / "api").glob("*.md"))
    named = set(re.findall(r"^::: ([\w.]+)$", pages, re.M))
    modules = (cce_dist, cce_dist.distributed, cce_dist.integrations.trl, cce_dist.rl)
    modules += (cce_dist.integrations.transformers, megatron_patch)
    for module in modules:
        assert {f"{module.__name__}.{name}" for name in module.__all__} - named == set()
