"""The choice, ratios and imports of contenders, for all benchmarks that have some."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contenders import add_ratios, import_alone
from benchmarks.rl.contenders import CONTENDERS


def test_import_alone_needs_no_packages_of_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tmp_path / "peer" / "utils" / "kernel"
    kernel.mkdir(parents=True)
    (tmp_path / "peer" / "__init__.py").write_text("import no_such_package_as_ray\n")
    for folder in (kernel, kernel.parent):
        (folder / "__init__.py").write_text("raise RuntimeError('not these either')\n")
    (kernel / "loss.py").write_text(
        "from . import kernels\n"
        "from ..trainer.helpers import gather\n"
        "value = kernels.function() + gather()\n"
    )
    (kernel / "kernels.py").write_text("def function(): return 5\n")
    name, stubs = "peer.utils.kernel.loss", {"peer.utils.trainer.helpers": {"gather": lambda: 2}}
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(ModuleNotFoundError, match="peer"):
        import_alone(name, stubs)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert import_alone(name, stubs).value == 7
    # The second time it is there.
    assert import_alone(name, stubs).value == 7


def test_import_alone_leaves_what_can_be_imported() -> None:
    before = sys.modules["benchmarks.contenders"]
    assert import_alone("benchmarks.contenders", {"sys": {}}) is before


def test_add_ratios_are_of_the_fastest_peer_of_the_part() -> None:
    times = {"filtered": 3.0, "trl": 2.0, "verl": 4.0, "dense": 1.0}
    rows: list[dict[str, Any]] = [
        {"method": name, "part": part, "median_ms": factor * ms, "failed": ""}
        for part, factor in (("loss", 1), ("loss+grad", 5))
        for name, ms in times.items()
    ]
    rows.append({"method": "liger-grpo", "part": "loss", "median_ms": 0.1, "failed": "no"})
    add_ratios(rows, CONTENDERS)
    assert [row["of_fastest_peer"] for row in rows] == [1.5, 1, 2, 0.5] * 2 + [0.05]
