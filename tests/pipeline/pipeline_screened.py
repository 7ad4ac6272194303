"""What ranks of a pipeline do in test_pipelining with logits="screened", in fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import Filter, LossOptions, Screen, VocabShard
from cce_dist.backends.triton import stats as triton_stats
from cce_dist.backends.triton.screened import quantize as screened_quantize
from cce_dist.backends.triton.screened import steps as screened_steps
from cce_dist.pipeline.head import PipelineHead
from cce_dist.testing import Case, check_promise, dense_outputs, golden_outputs, zipf_inputs
from cce_dist.testing.inputs import Inputs
from tests.pipeline.pipeline_setup import PLANNED, Setup, make_job, shards

OPTIONS: dict[str, Any] = {
    "logits": "screened",
    "filter": Filter(keep=0.05),
    # A small vocabulary keeps many of its columns.
    "screen": Screen(max_kept=1.0),
    "backend": "triton",
}
TOKENS, CLASSES, DIM = 96, 900, 40
# The last rank's rows end with padding.
BOUNDS = ((0, 700), (700, CLASSES + 4))


@contextlib.contextmanager
def screened_seen(kept: list[int] | None = None) -> Iterator[dict[str, int]]:
    """How many forwards were screened, how many would not do, how often a weight was quantised.

    Args: kept: gets the number of pairs of a column and a block of tokens that are kept.
    """
    seen = {"screened": 0, "full": 0, "copies": 0}
    guard, both = triton_stats.guard, screened_steps.quantize_both
    quantize = screened_quantize.quantize_weight

    def guarded(*given: Any) -> Any:
        if kept is not None:
            kept.append(int((given[0].buffers.mass < 0).sum()))
        run, found = guard(*given)
        seen["full" if int(found.full) else "screened"] += 1
        return run, found

    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            seen["copies"] += 1
            return make(*given, **named)

        return run

    with (
        mock.patch.object(triton_stats, "guard", guarded),
        mock.patch.object(screened_steps, "quantize_both", counted(both)),
        mock.patch.object(screened_quantize, "quantize_weight", counted(quantize)),
    ):
        yield seen


def halves() -> list[Inputs]:
    """Of two microbatches."""
    generator = torch.Generator().manual_seed(0)
    both = zipf_inputs(2 * TOKENS, CLASSES, DIM, generator=generator, dtype=torch.float16)
    both = both.ignoring(generator, 0.1)
    return [
        replace(both, hidden=hidden, targets=targets)
        for hidden, targets in zip(
            both.hidden.split(TOKENS), both.targets.split(TOKENS), strict=True
        )
    ]


def cases() -> list[Case]:
    return [Case(each, {"reduction": "none"}) for each in halves()]


def phases(group: Any) -> dict[str, Any]:
    """Two microbatches under way at a time, then without gradients, then on ranks that know nothing
    of each other's rows; what they give on a rank, and what was seen."""
    rank, root = dist.get_rank(group), 1
    both, (start, stop) = halves(), BOUNDS[rank]
    weight = torch.cat([both[0].weight, torch.full((4, DIM), torch.nan).half()])[start:stop]
    head = PipelineHead(
        weight.clone().requires_grad_(),
        group=group,
        hidden_shape=(TOKENS, DIM),
        vocab_shard=VocabShard(start, stop, CLASSES),
        options=LossOptions(reduction="none", **OPTIONS),
    )

    def begin(record: bool) -> None:
        for index, each in enumerate(both):
            given = (each.hidden, each.targets) if rank == root else ()
            head.post(index, root, *given)
        for index in range(2):
            head.statistics(index, record=record)

    found: dict[str, Any] = {"losses": [], "grad_hidden": [], "values": []}
    with screened_seen() as seen:
        head.start_step()
        begin(True)
        for index in range(2):
            losses = head.losses(index)
            found["losses"].append(losses)
            head.weigh(index, root, cases()[index].gradient_of("loss", losses))
            head.gradients(index, root)
        found["grad_hidden"] = [head.take(index) for index in range(2)]
        head.finish_step()
    found["grad_weight"], found["seen"] = head.weight.grad, dict(seen)
    for name in ("values", "alone"):
        kept: list[int] = []
        with screened_seen(kept) as seen:
            if name == "values":
                head.start_step(record=False)
            begin(False)
            found[name] = [head.value(index) for index in range(2)]
            head.finish_step()
        found[f"seen of {name}"], found[f"kept of {name}"] = dict(seen), sum(kept)
    head.close()
    return found


def check_phases(ranks: list[dict[str, Any]]) -> None:
    """Losses are closer to golden than dense 16-bit; gradients are the filter's."""
    golden, dense = ([make(case) for case in cases()] for make in (golden_outputs, dense_outputs))
    for index in range(2):
        right, baseline = golden[index]["loss"], dense[index]["loss"]
        for name in ("losses", "values", "alone"):
            ours = ranks[0][name][index]
            assert torch.equal(ours, ranks[1][name][index])
            check_promise(name, ours, right, baseline, torch.float32)
        require_near(ranks[1]["grad_hidden"][index], golden[index]["grad_hidden"])
    grad = torch.cat([found["grad_weight"] for found in ranks])
    assert not grad[CLASSES:].any()
    require_near(grad[:CLASSES], golden[0]["grad_weight"] + golden[1]["grad_weight"])


def require_near(ours: Tensor, right: Tensor) -> None:
    """As near as a filter that drops half of a token's mass."""
    off = float((ours.double() - right.double()).norm() / right.double().norm())
    assert off < 0.1, off


def train_screened(group: Any, schedule: str) -> dict[str, int]:
    """A step and an evaluation of a schedule: closer to the same model in float64 than dense 16-bit
    logits are. Returns: what was seen on this rank."""
    options = LossOptions(reduction="mean", **{**OPTIONS, "filter": Filter(keep=1.0)})
    setup = Setup(schedule, microbatches=2, vocab_size=300, options=options, dtype=torch.float16)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    job = make_job(group, setup, quantize_once=schedule == PLANNED)
    model, head = job.model, job.head
    dense, wide = (model.whole(setup), model.in_dtype(torch.float64).whole(setup))
    # Of a mean of ten tokens the baseline's own error may be 0 by luck.
    of_tokens = (dense["of tokens"] - wide["of tokens"]).square().sum(1)
    counts = (model.targets != -100).view(setup.microbatches, -1).sum(1)
    noise = float((of_tokens / counts.square()).mean().sqrt())

    def check() -> None:
        given = job.losses, wide["losses"], dense["losses"], torch.float32
        check_promise("losses", *given, noise=noise)

    with screened_seen() as seen:
        job.step()
        check()
        shard = shards(setup.vocab_size, size)[rank]
        assert head.weight.grad is not None
        grad = head.weight.grad[: shard.stop - shard.start]
        require_near(grad, wide["weight"][shard.start : shard.stop])
        job.evaluate()
        check()
    job.close()
    return seen
