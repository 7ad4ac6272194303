"""TRL's function with its outputs and gradients, beside dense logits in float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist.integrations import trl as patch

N, D, V = 37, 16, 301
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
FIELDS = ("log_probs", *ALL)

with warnings.catch_warnings():
    # Of the packages, about one another, as they are imported.
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils


def inputs(
    num_tokens: int = N, dtype: torch.dtype = torch.float32, bias: bool = True
) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(num_tokens, D, generator=generator).to(dtype),
        "weight": (0.6 * torch.randn(V, D, generator=generator)).to(dtype),
        "bias": torch.randn(V, generator=generator).to(dtype) if bias else None,
        "targets": torch.randint(V, (num_tokens,), generator=generator),
    }


def results_of(
    tensors: dict[str, Tensor | None],
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ALL,
    entropy_weight: float = 0.3,
    golden: bool = False,
) -> dict[str, Any]:
    """Outputs, and gradients of a sum with weights of both signs and 0.

    They are those of TRL's seam, or `golden`: of dense logits in float64.
    """
    leaves = {
        name: None if x is None else x.clone().requires_grad_(x.is_floating_point())
        for name, x in tensors.items()
    }
    options = (temperature, softcap, logit_scale)
    if golden:
        results = dense(*leaves.values(), *options)
    else:
        temperature, *others = options
        function = utils._ChunkedLogProbFunction
        named = function.apply(*leaves.values(), temperature, 64, *others, outputs)
        results = dict(zip(FIELDS, named, strict=True))
    upstream = torch.arange(len(results["log_probs"])).sub(5).float()
    total = (results["log_probs"] * upstream).sum()
    if results["entropy"] is not None and entropy_weight:
        total = total + entropy_weight * (results["entropy"] * upstream.flip(0)).sum()
    total.backward()
    for name, leaf in leaves.items():
        if leaf is not None and leaf.requires_grad:
            results[f"grad_{name}"] = leaf.grad
    return {name: None if x is None else x.detach() for name, x in results.items()}


def dense(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
) -> dict[str, Any]:
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    return {
        "log_probs": log_p.gather(1, targets[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == targets,
    }


def in_float64(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    doubled = ((name, x) for name, x in tensors.items())
    return {n: x.double() if x is not None and x.is_floating_point() else x for n, x in doubled}


def assert_same(ours: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Equal to `tolerance` of a result's largest value."""
    for name, errors in errors_of(ours, expected).items():
        assert errors <= tolerance, name


def errors_of(ours: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest errors, of each result as a share of its largest value."""
    assert ours.keys() == expected.keys()
    errors = {}
    for name, value in expected.items():
        assert (ours[name] is None) == (value is None), name
        if value is None:
            continue
        assert ours[name].shape == value.shape, name
        size = float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 1.0
        error = (ours[name].double() - value.double()).abs()
        errors[name] = float(error.max()) / max(size, 1e-3) if value.numel() else 0.0
    return errors


@pytest.fixture(autouse=True)
def without_a_trace() -> Iterator[None]:
    picks_rows = utils._use_triton
    yield
    patch.remove()
    assert utils._use_triton is picks_rows
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction
