from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def llama() -> Any:
    # Imports transformers, which a test module skips without.
    from tests.integrations.architectures import make

    return make("llama")
