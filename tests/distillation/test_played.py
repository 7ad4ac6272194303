"""Later calls of a kind play a recording, with the bits of a call that prepares everything."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from cce_dist.backends.triton.launch.recording import Recorder
from cce_dist.backends.triton.launch.replay import forget_recordings
from cce_dist.testing import DTYPES, Place, nccl_pool, shared_pool
from tests.backends.triton.launch.replay_cases import recordings
from tests.distillation.test_by_kernels import BY_PLACE
from tests.distillation.test_distillation import Both
from tests.distillation.test_in_forward import on_a_gpu
from tests.distillation.test_tiles import on_a_rank

WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"gradient": "filtered", "temperature": 1.0},
    "filtered, two temperatures": {"gradient": "filtered"},
    "screened": {"gradient": "filtered", "logits": "screened", "alpha": 0.0},
    "exact": {"gradient": "exact", "workspace_bytes": 2**20},
    "in_forward": {"gradient": "in_forward"},
}
CASES = [
    pytest.param(divergence, way, id=f"{divergence}-{way}")
    for divergence in ("forward_kl", "reverse_kl", "jsd")
    for way in WAYS
    if way != "screened" or divergence == "forward_kl"
]


def both_of(seed: int, dtype: torch.dtype, device: str = "cpu", whole: bool = False) -> Both:
    """Inputs whose number of targets that count is always the same; few tokens, or of several
    chunks."""
    both, generator = Both.make(dtype), torch.Generator().manual_seed(seed)
    both = both if whole else both.few()
    changed: dict[str, Tensor] = {}
    for field in fields(both):
        value = getattr(both, field.name)
        if value.is_floating_point():
            value = torch.randn(value.shape, generator=generator).to(dtype)
        changed[field.name] = value.to(device)
    return replace(both, **changed)


def results_of(both: Both, options: dict[str, Any]) -> list[Tensor]:
    leaves = both.leaves()
    stats = ("divergence",) if options.get("alpha") == 0 else ("divergence", "nll")
    found = both.run(leaves, **{"reduction": "mean", "stats": stats, **options})
    grads = torch.autograd.grad(0.5 * found.loss, list(leaves.values()))
    return [x.detach() for x in (found.loss, found.divergence, *grads)]


# In the interpreter each divergence's kernels of both heads, and each other way once.
INTERPRETED = {
    *((divergence, "filtered") for divergence in ("forward_kl", "reverse_kl", "jsd")),
    *(("forward_kl", "screened"), ("forward_kl", "exact"), ("jsd", "in_forward")),
    ("reverse_kl", "filtered, two temperatures"),
}


@pytest.mark.parametrize(
    ("place", "dtype", "divergence", "way"),
    [
        pytest.param(*x.values, *case.values, id=f"{x.id}-{case.id}", marks=x.marks)
        for x in BY_PLACE
        for case in CASES
        if "fp16" in str(x.id)
        if not x.values[0].interprets or case.values in INTERPRETED
    ],
)
def test_a_played_call_has_the_bits_of_a_prepared_one(
    place: Place, dtype: str, divergence: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"divergence": divergence, "workspace_bytes": 2**17, **place.options, **WAYS[way]}
    whole = not place.interprets or way == "in_forward"
    inputs = [both_of(seed, DTYPES[dtype], place.device, whole) for seed in range(3)]
    flaws: list[str | None] = []
    finish = Recorder.finish

    def noted(recorder: Recorder, result: Any) -> Any:
        flaws.append(recorder.flaw)
        return finish(recorder, result)

    monkeypatch.setattr(Recorder, "finish", noted)
    for both in inputs[:2]:
        results_of(both, options)
    assert flaws and not any(flaws)
    number = len(flaws)
    played = results_of(inputs[2], options)
    assert len(flaws) == number == len(recordings())
    forget_recordings()
    for mine, right in zip(played, results_of(inputs[2], options), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("way", WAYS)
def test_checkpointing_without_reentry(way: str, backend: str) -> None:
    """It lets a backward read what was saved once, and compares what its two forwards save, of
    which the second may be played."""
    options = {"backend": backend, "reduction": "mean", "stats": (), **WAYS[way]}
    for seed in range(3):
        both = both_of(seed, torch.float16)
        leaves, again = both.leaves(), both.leaves()
        both.run(leaves, **options).backward()
        checkpoint(lambda x=again, y=both: y.run(x, **options), use_reentrant=False).backward()
        for mine, right in zip(again.values(), leaves.values(), strict=True):
            assert mine.grad is not None and right.grad is not None
            assert torch.equal(mine.grad, right.grad)


@pytest.mark.parametrize("freed", ["weight", "teacher_weight"])
@pytest.mark.parametrize("way", ["filtered", "exact", "in_forward"])
def test_a_weight_whose_memory_was_freed(way: str, freed: str) -> None:
    """As FSDP's reshard() does. A played backward must not read it."""
    options = {"backend": "triton", "reduction": "mean", "stats": (), **WAYS[way]}
    for seed in range(4):
        both = both_of(seed, torch.float32)
        leaves = both.leaves()
        loss = both.run(leaves, **options)
        if seed < 3:
            loss.backward()
            continue
        if way == "in_forward":
            # The gradients are there. A second backward computes them again.
            loss.backward(retain_graph=True)
        memory = leaves["weight"] if freed == "weight" else both.teacher_weight
        memory.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=f"^{freed} must stay in memory until the backward"):
            loss.backward()
        if freed == "teacher_weight":
            with pytest.raises(ValueError, match=r"^teacher_weight must be in memory"):
                both.run(both.leaves(), **options)


@pytest.mark.usefixtures("unextended")
@pytest.mark.parametrize("way", ["filtered", "exact", "in_forward"])
def test_a_gradient_has_memory_of_its_own(way: str) -> None:
    """What keeps or overwrites one gradient does not touch another."""
    options = {"backend": "triton", "reduction": "mean", "stats": (), **WAYS[way]}
    for seed in range(4):
        both = both_of(seed, torch.float32)
        leaves = both.leaves()
        grads = torch.autograd.grad(both.run(leaves, **options), list(leaves.values()))
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads)
        assert all(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads)


def on_ranks(group: Any, inputs: list[Both], split: bool, options: dict[str, Any]) -> Any:
    forget_recordings()
    on_rank = on_a_gpu if torch.cuda.is_available() else on_a_rank
    found = [on_rank(group, both, split, options) for both in inputs]
    number = len(recordings())
    forget_recordings()
    return number, found[-1], on_rank(group, inputs[-1], split, options)


def check_ranks(ranks: Any) -> None:
    for number, (loss, grads), (right, of_right) in ranks:
        assert number and torch.equal(loss, right)
        assert all(torch.equal(grads[name], of_right[name]) for name in grads)


@pytest.mark.parametrize(
    ("way", "split"), [("filtered", False), ("exact", False), ("in_forward", True)]
)
def test_ranks(way: str, split: bool) -> None:
    options = {"divergence": "jsd", "backend": "triton", "reduction": "mean", **WAYS[way]}
    inputs = [both_of(seed, torch.float32) for seed in range(3)]
    check_ranks(shared_pool().run(2, on_ranks, inputs, split, options))


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
@pytest.mark.parametrize("way", ["filtered", "exact", "in_forward"])
def test_two_gpus(way: str, divergence: str) -> None:
    options = {"divergence": divergence, "reduction": "mean", **WAYS[way]}
    inputs = [both_of(seed, torch.bfloat16, whole=True) for seed in range(3)]
    check_ranks(nccl_pool().run(2, on_ranks, inputs, False, options))
