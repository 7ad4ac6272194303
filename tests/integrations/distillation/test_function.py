"""TRL's function of DistillationTrainer with ours, beside its own and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import LossOptions
from cce_dist.integrations import trl as patch
from cce_dist.integrations.trl_distillation import Distillation
from tests.integrations.distillation.trainers import ChunkedDivergenceFunction

N, D, D_TEACHER, V = 29, 16, 24, 301
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcaps": {"softcaps": (3.0, 5.0), "temperature": 1.3},
    "scales": {"scales": (0.25, 2.0)},
    "one has both": {"softcaps": (3.0, None), "scales": (-1.75, 1.0), "temperature": 2.0},
    "no bias": {"bias": False},
}


def inputs(bias: bool = True, num_tokens: int = N) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    tensors: list[Any] = []
    for dim in (D, D_TEACHER):
        tensors.append(torch.randn(num_tokens, dim, generator=generator))
        tensors.append(0.25 * torch.randn(V, dim, generator=generator))
        tensors.append(0.5 * torch.randn(V, generator=generator) if bias else None)
    return tensors


def results_of(
    tensors: list[Any],
    beta: float,
    temperature: float = 1.0,
    softcaps: tuple[float | None, float | None] = (None, None),
    scales: tuple[float, float] = (1.0, 1.0),
    golden: bool = False,
) -> list[Tensor]:
    """Divergence, entropy and gradients, of TRL's seam or `golden`: of dense float64 logits."""
    # A teacher's weight may be a parameter that requires grad.
    leaves: list[Any] = [None if x is None else x.clone() for x in tensors]
    for leaf in (*leaves[:3], leaves[4]):
        if leaf is not None:
            leaf.requires_grad_()
    if golden:
        divergence, entropy = dense(leaves, beta, temperature, softcaps, scales)
    else:
        # Of [student, teacher] each.
        order = (scales[0], softcaps[0], scales[1], softcaps[1])
        divergence, entropy = ChunkedDivergenceFunction.apply(*leaves, beta, temperature, *order)
    upstream = torch.arange(len(divergence)).sub(5).float()
    (divergence * upstream).sum().backward()
    assert not entropy.requires_grad or golden
    gradients = [x.grad for x in leaves[:3] if x is not None]
    assert leaves[4].grad is None or golden
    return [divergence.detach(), entropy.detach(), *gradients]


def dense(
    leaves: list[Any],
    beta: float,
    temperature: float,
    softcaps: tuple[float | None, float | None],
    scales: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    logs = []
    for i in range(2):
        hidden, weight, bias = leaves[3 * i : 3 * i + 3]
        logits = hidden @ weight.T
        logits = (logits if bias is None else logits + bias) * scales[i]
        cap = softcaps[i]
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        logs.append((logits / temperature).log_softmax(-1))
    log_q, log_p = logs[0], logs[1].detach()
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    to_teacher = (log_p.exp() * (log_p - (log_m if beta else log_q))).sum(-1)
    to_student = (log_q.exp() * (log_q - (log_m if beta < 1 else log_p))).sum(-1)
    if beta in (0, 1):
        divergence = to_student if beta else to_teacher
    else:
        divergence = beta * to_teacher + (1 - beta) * to_student
    return divergence, -(log_q.exp() * log_q).sum(-1)


def assert_same(ours: list[Tensor], expected: list[Tensor], tolerance: float = 1e-6) -> None:
    """Equal to `tolerance` of each tensor's largest value."""
    for each, other in zip(ours, expected, strict=True):
        assert each.shape == other.shape
        size = max(float(other.abs().max()), 1e-3) if other.numel() else 1.0
        torch.testing.assert_close(
            each.double(), other.double(), rtol=0, atol=tolerance * size, check_dtype=False
        )


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_function(case: str, beta: float) -> None:
    options = dict(CASES[case])
    tensors = inputs(options.pop("bias", True))
    theirs = results_of(tensors, beta, **options)
    with patch.patched(gradient="exact"):
        ours = results_of(tensors, beta, **options)
    in_float64 = [None if x is None else x.double() for x in tensors]
    golden = results_of(in_float64, beta, golden=True, **options)
    assert_same(ours, golden, 2e-6)
    # Their own errors, and ours.
    assert_same(ours, theirs, 3e-6)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]


@pytest.mark.parametrize(("beta", "logits"), [(0.0, "screened"), (0.5, None), (1.0, None)], ids=str)
def test_screened_logits_are_those_of_forward_kl(beta: float, logits: str | None) -> None:
    keywords = Distillation(LossOptions(logits="screened"), "1.16")._keywords(beta, of_tokens=True)
    assert keywords.get("logits") == logits
    tensors = [None if x is None else x.bfloat16() for x in inputs()]
    with patch.patched(logits="screened"):
        ours = results_of(tensors, beta)
    golden = results_of([None if x is None else x.double() for x in tensors], beta, golden=True)
    assert_same(ours, golden, 2e-2)


def test_function_of_no_tokens() -> None:
    theirs = results_of(inputs(num_tokens=0), 0.5)
    with patch.patched():
        assert_same(results_of(inputs(num_tokens=0), 0.5), theirs)


def test_function_in_16_bits() -> None:
    """Each model's weight takes its own hidden states' dtype."""
    tensors = inputs()
    tensors[0], tensors[3] = tensors[0].bfloat16(), tensors[3].half()
    rounded = [x.to(t) for x, t in zip(tensors[::3], (torch.bfloat16, torch.half), strict=True)]
    golden = [x.double() for x in tensors]
    golden[0], golden[3] = (x.double() for x in rounded)
    golden[1], golden[4] = tensors[1].bfloat16().double(), tensors[4].half().double()
    expected = results_of(golden, 1.0, golden=True)
    with patch.patched(gradient="exact"):
        ours = results_of(tensors, 1.0)
    assert_same(ours[:2], expected[:2], 1e-5)
    assert_same(ours[2:], expected[2:], 2.0**-7)
    assert [x.dtype for x in ours[2:]] == [torch.bfloat16, torch.float32, torch.float32]


def test_function_refuses() -> None:
    with patch.patched(), pytest.raises(ValueError, match=r"beta must lie in \(0, 1\), got 1.5"):
        results_of(inputs(), 1.5)
    with patch.patched(backend="triton"):
        message = 'backend="triton" of linear_distillation needs a teacher in bf16, fp16 or fp32'
        with pytest.raises(ValueError, match=message):
            results_of([None if x is None else x.double() for x in inputs()], 0.5)


def test_function_of_split_heads_stays(lines: list[str]) -> None:
    tensors = inputs()
    weight: Any = torch.nn.Parameter(tensors[1])
    weight.ds_id = 0
    arguments = (tensors[0], weight, *tensors[2:], 1.0)
    theirs = ChunkedDivergenceFunction.apply(*arguments)
    with patch.patched():
        for _ in range(2):
            ours = ChunkedDivergenceFunction.apply(*arguments)
        assert patch.status().calls == 0
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    (line,) = lines
    assert line.startswith("DistillationTrainer keeps TRL's own loss: DeepSpeed's ZeRO-3")
