"""A rank fails under the schedule with the vocabulary over Megatron's pipeline: all others end
within the timeout of Megatron's groups, and say in which pass they missed it.

`pytest -rP` shows seconds and messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

from tests.megatron.pipeline.megatron_pipeline_faults import (
    DATA_PARALLEL,
    DDP,
    FOUR_STAGES,
    HEAD,
    PIPELINE,
    SLACK_S,
    TENSOR_PARALLEL,
    TIED,
    TIMEOUT_S,
    Ending,
    Fault,
    run_jobs,
)

pytestmark = pytest.mark.timeout(280)

# Of each pass on either stage, one: before it talks to the others, or between that and the next.
IN_A_STEP = (
    Fault(1, PIPELINE, "__init__", 1),
    # Forward.
    Fault(0, PIPELINE, "send_forward"),
    Fault(1, HEAD, "post"),
    # Log-sum-exp.
    Fault(0, HEAD, "statistics"),
    Fault(1, HEAD, "statistics"),
    # The loss function, and what it sends.
    Fault(1, HEAD, "losses"),
    Fault(1, HEAD, "weigh"),
    Fault(0, HEAD, "weigh"),
    # Gradients of the rows, and the sum of the hidden gradient.
    Fault(0, HEAD, "gradients"),
    Fault(1, HEAD, "gradients"),
    Fault(1, HEAD, "take"),
    # Backward.
    Fault(1, PIPELINE, "send_backward"),
    Fault(0, PIPELINE, "receive_backward"),
    # The tied embedding and its gradient.
    Fault(1, TIED, "look_up"),
    Fault(0, TIED, "look_up"),
    Fault(0, TIED, "give"),
    Fault(1, TIED, "add"),
)
# After two steps of four microbatches each.
IN_AN_EVALUATION = (
    Fault(0, PIPELINE, "send_forward", 11),
    Fault(0, HEAD, "value"),
    Fault(1, HEAD, "value"),
    Fault(1, TIED, "look_up", 11),
)
# Two pipelines, or two ranks a stage, or four stages.
OF_FOUR = (
    Fault(1, DDP, "finish_grad_sync", 1, setup=DATA_PARALLEL),
    Fault(2, DDP, "finish_grad_sync", 1, setup=DATA_PARALLEL),
    Fault(2, HEAD, "statistics", setup=TENSOR_PARALLEL),
    Fault(1, PIPELINE, "send_backward", setup=FOUR_STAGES),
)
STOPPED = (
    Fault(0, HEAD, "statistics", kind="stops"),
    Fault(1, PIPELINE, "send_backward", kind="stops"),
    Fault(0, HEAD, "value", kind="stops"),
    Fault(1, DDP, "finish_grad_sync", 1, kind="stops", setup=DATA_PARALLEL),
)
RAISED = (
    Fault(0, PIPELINE, "send_forward", kind="raises"),
    Fault(1, HEAD, "losses", kind="raises"),
    Fault(0, HEAD, "value", kind="raises"),
)


def survivors(faults: Sequence[Fault], folder: Path) -> list[list[tuple[Fault, int, Ending]]]:
    """Of every job the ranks but the one that failed; checked is that all have ended, in time."""
    found = []
    for fault, endings in zip(faults, run_jobs(faults, folder), strict=True):
        failed = endings[fault.rank]
        assert failed.code == {"dies": -9, "stops": None, "raises": 1}[fault.kind], (fault, failed)
        assert fault.kind != "raises" or failed.error == "PlantedError: planted"
        others = [(fault, rank, x) for rank, x in enumerate(endings) if rank != fault.rank]
        for _, rank, ending in others:
            assert ending.code == 1, (fault.name, rank, ending)
            assert 0 <= ending.seconds < TIMEOUT_S + SLACK_S, (fault.name, rank, ending)
            print(f"{fault.name}: rank {rank}, {ending.seconds:.1f} s: {ending.error}")
        found.append(others)
    return found


PLACE = (
    r"RuntimeError: vocab_over_pipeline: (stage \d of \d, (microbatch \d, [a-z]|the end of a step)|"
    "the making of groups)"
)


@pytest.mark.parametrize("faults", [IN_A_STEP, IN_AN_EVALUATION], ids=["step", "evaluation"])
def test_a_rank_that_dies(tmp_path: Path, faults: Sequence[Fault]) -> None:
    for others in survivors(faults, tmp_path):
        for fault, rank, ending in others:
            if fault.method == "add" and not re.match(PLACE, ending.error):
                # Stage 0 has given what stage 1 adds, and may be in Megatron's optimizer by then.
                assert re.search("[Cc]onnection|peer", ending.error), (fault.name, ending)
                continue
            assert re.match(PLACE, ending.error), (fault.name, ending)
            assert f"stage {rank} of 2" in ending.error or "the making of groups" in ending.error


def test_a_rank_of_four_that_dies(tmp_path: Path) -> None:
    for others in survivors(OF_FOUR, tmp_path):
        said = [ending.error for _, _, ending in others]
        if others[0][0].setup == DATA_PARALLEL:
            # Elsewhere Megatron's optimizer notices.
            assert any("the reduction of gradients, finalize_model_grads_func's" in x for x in said)
        else:
            assert all(re.match(PLACE, x) for x in said), said


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    """Nothing tells of it but the timeout."""
    for others in survivors(STOPPED, tmp_path):
        assert any("vocab_over_pipeline: stage " in ending.error for _, _, ending in others)
        first, *later = sorted(others, key=lambda other: other[2].seconds)
        assert re.search(r"[Tt]imed ?out", first[2].error), first
        for other in later:
            # Whom the timeout has ended closes connections, which the next may notice first.
            noticed = r"[Tt]imed ?out|closed by peer|[Cc]onnection reset"
            assert re.search(noticed, other[2].error), other


def test_a_rank_that_raises(tmp_path: Path) -> None:
    for others in survivors(RAISED, tmp_path):
        for fault, _, ending in others:
            assert re.match(PLACE, ending.error), (fault.name, ending)
