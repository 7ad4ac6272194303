"""Steps over a pipeline that are given what they must not be: who can know says what, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from cce_dist import LossOptions
from cce_dist.pipeline.schedules.last_stage import LastStageLoss
from cce_dist.testing import RankPool
from tests.pipeline.pipeline_misgiven import (
    FIRST,
    LAST,
    WRONG,
    misgiven,
    other_heads,
    other_numbers,
)
from tests.pipeline.pipeline_setup import PLANNED

# A planned schedule is its own context. What ZBV is given is checked by what checks 1F1B's: where
# both ends are on one rank, one case of each kind will do.
NOT = {
    "1f1b": (),
    "zbv": set(WRONG) - {"another batch", "no target", "failing stage", "unknown inference"},
    PLANNED: ("two steps", "no step"),
}
CASES = [(name, schedule) for schedule in NOT for name in WRONG if name not in NOT[schedule]]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_what_a_step_is_given(pools: dict[int, RankPool], name: str, schedule: str) -> None:
    wrong = WRONG[name]
    ranks = pools[2].run(2, misgiven, name, schedule)
    for found in ranks:
        # One rank has both of ZBV's, of which either may speak.
        told = [text for stage, text in wrong.told.items() if found[stage]]
        if told:
            assert found["kind"] == wrong.kind, found
            assert any(re.search(text, found["error"]) for text in told), found
        else:
            # It waited for the others, as long as its groups do.
            assert found["kind"] == "RuntimeError", found
    assert any(found[FIRST] for found in ranks) and any(found[LAST] for found in ranks)
    if name == "failing stage":
        assert "KeyError" in [found["cause"] for found in ranks]


def other_loss_scale(group: Any) -> str:
    return other_heads(group, loss_scale=0.5)


def other_options(group: Any) -> str:
    return other_heads(group, options=LossOptions(reduction="sum", z_loss=0.1))


@pytest.mark.parametrize("job", [other_loss_scale, other_options])
def test_ranks_with_other_heads(pools: dict[int, RankPool], job: Callable[..., str]) -> None:
    """Each rank makes the gradient of its own rows: they would be of two losses."""
    name = job.__name__.removeprefix("other_")
    found = pools[2].run(2, job)
    assert found[0] == found[1]
    assert found[0].startswith(f"{name} must be the same on every rank, got by rank: [")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", PLANNED])
def test_ranks_with_other_numbers_of_microbatches(
    pools: dict[int, RankPool], schedule: str
) -> None:
    wrong = r"n_microbatches must be the same on every rank, got by rank: [6, 8]"
    assert pools[2].run(2, other_numbers, schedule, 1) == [wrong, wrong]


@pytest.mark.parametrize("schedule", ["1f1b", PLANNED])
def test_pipelines_with_other_numbers_of_microbatches(
    pools: dict[int, RankPool], schedule: str
) -> None:
    """Of two tensor-parallel ranks, which share the vocabulary."""
    wrong = r"n_microbatches must be the same on every rank, got by rank: [6, 8, 6, 8]"
    assert pools[4].run(4, other_numbers, schedule, 2) == [wrong] * 4


def test_last_stage_loss_refuses_other_keywords() -> None:
    """When it is made, and not in the schedule's first step."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'softcp'"):
        LastStageLoss(torch.randn(8, 4), softcp=30.0)
    values: dict[str, Any] = {"reduction": "bad", "softcap": -1.0, "gradient": "x"}
    for name, value in values.items():
        with pytest.raises(ValueError, match=f"^{name} must be "):
            LastStageLoss(torch.randn(8, 4), **{name: value})
    teacher: Any = {"teacher": lambda target: target, "teacher_weight": torch.randn(8, 4)}
    values |= {"logits": "8bit", "divergence": "kl", "temperature": "hot", "teacher_softcap": 0}
    for name, value in values.items():
        with pytest.raises(ValueError, match=f"^{name} must be "):
            LastStageLoss(torch.randn(8, 4), **teacher, **{name: value})
    with pytest.raises(ValueError, match='logits="screened" of linear_distillation needs'):
        LastStageLoss(torch.randn(8, 4), **teacher, logits="screened", divergence="jsd")


@pytest.mark.parametrize("name", ["pipeline_order", "pipeline_order_with_comms"])
@pytest.mark.parametrize("kind", [None, "BACKWARD_INPUT", "FULL_BACKWARD"])
def test_a_schedule_that_is_loaded_or_has_no_order(name: str, kind: str | None) -> None:
    weight = torch.zeros(8, 4, requires_grad=True)
    stage = SimpleNamespace(is_last=True, submod=torch.nn.Linear(4, 4))
    order = None if kind is None else {0: [None, _Action(0, _ComputationType[kind], 0)]}
    orders = {"pipeline_order": None, "pipeline_order_with_comms": None} | {name: order}
    loss, schedule = (
        LastStageLoss(weight),
        SimpleNamespace(_stages=[stage], _n_microbatches=1, **orders),
    )
    if kind != "BACKWARD_INPUT":
        loss._check_schedule(schedule)
        return
    with pytest.raises(ValueError, match="weight must be a parameter of the last stage's module"):
        loss._check_schedule(schedule)
