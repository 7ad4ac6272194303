from __future__ import annotations

import pytest


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of tiles goes over a row's columns in several steps."""
    # Triton may be missing.
    tiles = pytest.importorskip("cce_dist.backends.triton.teacher.tiles")
    monkeypatch.setattr(tiles, "COLUMNS", 256)
