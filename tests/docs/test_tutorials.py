"""Each page of docs/tutorials: its script prints the lines that the page shows."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.torchrun import run_forked

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))
NUMBER = re.compile(r"\d+\.\d+|\d+(?=%)")


def run_script(arguments: Sequence[str]) -> None:
    """Runs a script as `python` or, without a GPU, as `python -m megatron_patch` does."""
    script = arguments[-1]
    sys.argv[:] = [script]
    if "megatron_patch" not in arguments:
        runpy.run_path(script, run_name="__main__")
        return
    from megatron_patch.__main__ import main
    from tests.megatron.megatron_setup import OnCpu, import_megatron

    torch.cuda.set_device = lambda device: None
    import_megatron("cpu")
    with OnCpu(), torch.compiler.set_stance("force_eager"):
        assert main([script]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_script_prints_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```console\n\$ (.*?)```", text, re.DOTALL)
    command, *expected = shown.splitlines()
    (tmp_path / "train.py").write_text(script)
    ranks = re.search(r"--nproc-per-node (\d+)", command)
    words = command.replace("train.py", str(tmp_path / "train.py")).split()

    code, output = run_forked(
        int(ranks[1]) if ranks else 0, tmp_path / "output", *words, run=run_script
    )

    assert code == 0, output
    lines = [line for line in output.splitlines() if re.match(r"step|each rank", line)]
    expected = [line for line in expected if not line.startswith("megatron_patch:")]
    assert [NUMBER.sub("", line) for line in lines] == [NUMBER.sub("", line) for line in expected]
    for line, shown_line in zip(lines, expected, strict=True):
        # A policy's samples follow the last bit of its logits.
        tolerance = 20 if "%" in line else 2e-3
        numbers, shown_numbers = ([float(x) for x in NUMBER.findall(y)] for y in (line, shown_line))
        assert numbers == pytest.approx(shown_numbers, abs=tolerance), line
