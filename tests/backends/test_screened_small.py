"""A screened call that is too small to gain by 8 bits computes full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cce_dist import LossOutput, Screen, StepQuantizer, linear_cross_entropy, quantize_weight
from cce_dist.backends.triton import backend as triton_backend
from cce_dist.backends.triton.screened import quantize
from cce_dist.testing import Inputs, RankPool, zipf_inputs
from cce_dist.vocab_shard import VocabShard
from tests.backends.screened_cases import KEEP, WIDE
from tests.support.loss_cases import generator


def inputs() -> Inputs:
    return zipf_inputs(140, 3000, 48, generator=generator(), dtype=torch.float16)


def loss(problem: Inputs, **options: Any) -> tuple[LossOutput, Tensor, Tensor]:
    hidden, weight = (x.clone().requires_grad_() for x in (problem.hidden, problem.weight))
    if "quantized_weight" in options:
        options["quantized_weight"] = options["quantized_weight"](weight, hidden)
    options = {"filter": KEEP, "backend": "triton", "stats": ("screened", "lse"), **options}
    result = linear_cross_entropy(hidden, weight, problem.targets, **options)
    assert isinstance(result, LossOutput)
    result.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return result, hidden.grad, weight.grad


# V, D, tokens, and whether 8 bits gained: docs/notebook/2026-11-27/heads.md#when-screening-pays.
MEASURED = [
    (49152, 576, 8192, False),
    (128256, 2048, 1024, False),
    (128256, 2048, 8192, True),
    (151936, 896, 1024, False),
    (151936, 896, 8192, True),
    (262144, 640, 1024, False),
    (262144, 640, 8192, True),
    (256000, 2304, 1024, False),
    (256000, 2304, 8192, True),
    (128256, 4096, 1024, False),
    (128256, 4096, 8192, True),
    (262208, 5376, 1024, False),
]


@pytest.mark.parametrize(("columns", "dim", "tokens", "gained"), MEASURED)
def test_the_rule_agrees_with_what_was_measured(
    columns: int, dim: int, tokens: int, gained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "interpreted", lambda: False)
    # The tests set it where there is a GPU.
    monkeypatch.setattr(quantize, "_screens_small_calls", False)
    assert quantize.gains_by_screening(tokens, columns, dim) is gained
    quantize.screen_small_calls()
    assert quantize.gains_by_screening(tokens, columns, dim)


@pytest.fixture
def no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    never = staticmethod(lambda *sizes: False)
    monkeypatch.setattr(triton_backend.TritonBackend, "gains_by_screening", never)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("gradient", "options"),
    [
        ("filtered", {}),
        ("filtered", {"screen": WIDE}),
        ("filtered", {"keep_logits": True}),
        ("in_forward", {"screen": WIDE}),
    ],
)
def test_a_small_call_has_the_bits_of_full_logits(
    gradient: str, options: dict[str, Any], no_gain: None
) -> None:
    problem = inputs()
    result, *grads = loss(problem, logits="screened", gradient=gradient, **options)
    expected, *full_grads = loss(problem, gradient=gradient)
    assert result.screened is not None and not result.screened.any()
    assert torch.equal(result.loss, expected.loss)
    for grad, full in zip(grads, full_grads, strict=True):
        assert torch.equal(grad, full)


@pytest.mark.interpreter
def test_a_kept_copy_is_used_by_a_small_call(no_gain: None) -> None:
    kept = {"logits": "screened", "screen": WIDE}
    result, *_ = loss(
        inputs(), **kept, quantized_weight=lambda w, h: quantize_weight(w, h, screen=WIDE)
    )
    assert result.screened is not None and result.screened.any()
    quantizer = StepQuantizer()
    with quantizer.step():
        result, *_ = loss(inputs(), **kept, quantized_weight=lambda w, h: quantizer)
    assert result.screened is not None and result.screened.any()


def sizes_of_a_rank(group: Any, problem: Inputs, rows: tuple[int, ...]) -> list[tuple[int, ...]]:
    rank = group.rank()
    shard = VocabShard(sum(rows[:rank]), sum(rows[: rank + 1]), sum(rows))
    seen: list[tuple[int, ...]] = []

    def note(num_tokens: int, num_columns: int, dim: int) -> bool:
        seen.append((num_tokens, num_columns, dim))
        return False

    usual = triton_backend.TritonBackend.gains_by_screening
    triton_backend.TritonBackend.gains_by_screening = staticmethod(note)
    try:
        linear_cross_entropy(
            problem.hidden, problem.weight[shard.start : shard.stop], problem.targets,
            group=group, vocab_shard=shard, logits="screened", backend="triton", filter=KEEP,
            screen=Screen(),
        )  # fmt: skip
    finally:
        triton_backend.TritonBackend.gains_by_screening = staticmethod(usual)
    return seen


@pytest.mark.interpreter
def test_ranks_with_different_rows_decide_alike(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(2, sizes_of_a_rank, inputs(), (1000, 2000)) == [[(140, 1500, 48)]] * 2
