"""What tests of files of Hugging Face's models share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cce_dist.planner.models.huggingface import model_from_config

NOT_USED = "not used by the planner: "


def check_file(config: Mapping[str, Any], parameters: int) -> None:
    """All of it is understood."""
    found = model_from_config(config)
    assert found.model.parameters == parameters
    assert not any(note.startswith(NOT_USED) for note in found.notes)
