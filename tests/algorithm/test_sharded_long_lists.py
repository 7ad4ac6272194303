"""Each rank decides for its own shard whether its lists are long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from cce_dist.testing import (
    TRITON_CPU,
    TRITON_CUDA,
    Case,
    Place,
    join_ranks,
    nccl_pool,
    run_case,
    shared_pool,
)

pytest.importorskip("triton")

from cce_dist.backends.triton.backward import long_lists
from cce_dist.backends.triton.backward import state as backward_state
from cce_dist.backends.triton.launch import replay
from tests.backends.triton.test_long_lists import case_of, close, decisions, exactly, stand_in

EACH_PLACE = pytest.mark.parametrize(
    "place",
    [
        pytest.param(TRITON_CPU, marks=pytest.mark.interpreter),
        pytest.param(
            TRITON_CUDA,
            marks=[pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.timeout(280)],
        ),
    ],
    ids=str,
)


def on_a_rank(group: Any, case: Case, choose: bool) -> tuple[int, dict[str, Tensor]]:
    """Returns the number of chunks that this rank's device chose, and the case's results."""
    replay.forget_recordings()
    with pytest.MonkeyPatch.context() as patch:
        made = decisions(patch)
        if not choose:
            patch.setattr(backward_state, "runs_on_hopper", lambda *_, **named: False)
        elif case.device == "cpu":
            patch.setattr(backward_state, "runs_on_hopper", lambda *_, **named: True)
            patch.setattr(long_lists, "products_on_hopper", stand_in)
        results = run_case(group, case)
    replay.forget_recordings()
    return int(made[-1].num_chunks.item()) if made else 0, results


def run(case: Case, *, choose: bool = True) -> tuple[list[int], dict[str, Tensor]]:
    pool = shared_pool() if case.device == "cpu" else nccl_pool()
    answers = pool.run(2, on_a_rank, case, choose)
    return [chunks for chunks, _ in answers], join_ranks(case, [found for _, found in answers])


@EACH_PLACE
@pytest.mark.parametrize("parallel", [False, True], ids=["replicated", "sequence_parallel"])
def test_both_ranks_compute_every_column(place: Place, parallel: bool) -> None:
    case = case_of(place, "flat", {"sequence_parallel": parallel}, classes=1000)
    chunks, results = run(case)
    assert chunks == [-1, -1]
    close(place, results, run(exactly(case))[1])


@EACH_PLACE
def test_one_rank_computes_every_column(place: Place) -> None:
    case = case_of(place, "partly_flat", {}, classes=1792)
    # No block keeps a column of the second rank but for its targets.
    assert case.inputs.bias is not None
    case.inputs.bias[512:] -= 4
    case = replace(case, bounds=((0, 512), (512, 1792)), vocab_size=1792)
    chunks, results = run(case)
    assert chunks[0] == -1 < chunks[1]
    without, expected = run(case, choose=False)
    assert min(without) > -1
    close(place, results, expected)
