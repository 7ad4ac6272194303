"""No test leaves a trace in TRL; the messages of the integrations."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from cce_dist.integrations import trl as patch
from tests.integrations.distillation.trainers import ChunkedDivergenceFunction, GKDTrainer

GKD_METHODS = ("compute_loss", "generalized_jsd_loss")
THEIRS = [vars(GKDTrainer)[name] for name in GKD_METHODS]


@pytest.fixture(autouse=True)
def without_a_trace() -> Iterator[None]:
    yield
    patch.remove()
    assert "apply" not in vars(ChunkedDivergenceFunction)
    for name, method in zip(GKD_METHODS, THEIRS, strict=True):
        assert vars(GKDTrainer)[name] is method


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The messages of the integrations."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("cce_dist.integrations")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
