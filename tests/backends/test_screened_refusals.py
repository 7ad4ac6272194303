"""Screened calls, screens and 8-bit copies that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cce_dist import Filter, Screen, linear_cross_entropy, quantize_weight
from cce_dist.testing import zipf_inputs
from cce_dist.vocab_shard import VocabShard
from tests.backends.screened_cases import KEEP
from tests.support.loss_cases import generator


def call(**options: Any) -> None:
    inputs = zipf_inputs(9, 50, 8, generator=generator(), dtype=options.pop("dtype", torch.float16))
    given = {"logits": "screened", "filter": KEEP, "backend": "triton", **options}
    linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, **given)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "exact": ({"gradient": "exact", "filter": Filter()}, r"keeps every column.*filtered"),
    "keep": ({"filter": Filter(keep=0)}, r"filter=Filter\(keep=0.*keeps every column.*above 0"),
    "eps": ({"filter": Filter(eps=0)}, r"filter=Filter\(.*eps=0.*keeps every column.*above 0"),
    "every_column": (
        {"softcap": 30.0, "label_smoothing": 0.1},
        r"softcap=30.0 with label_smoothing=0.1 gives every column.*gradient=\"exact\"",
    ),
    "fp32": ({"dtype": torch.float32}, r"hidden is torch.float32, whose digits"),
    "fp32_torch": (
        {"dtype": torch.float32, "backend": "torch"},
        r"cannot run here: hidden is torch.float32, whose digits",
    ),
    "no_effect": ({"logits": "full", "screen": Screen(max_kept=0.5)}, r"has no effect"),
    "no_screen": ({"screen": "int8"}, r"screen must be a cce_dist.Screen, got 'int8'"),
    "no_copy": (
        {"quantized_weight": torch.ones(3)},
        r"a QuantizedWeight, which quantize_weight returns",
    ),
}


@pytest.mark.interpreter
@pytest.mark.parametrize(("options", "pattern"), REFUSALS.values(), ids=REFUSALS)
def test_screened_refuses(options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        call(**options)


BAD_SCREENS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "fp8"}, r"Screen.dtype must be one of .*'e4m3', got 'fp8'"),
    "kept": ({"max_kept": 1.5}, r"Screen.max_kept must be a share in \[0, 1\], got 1.5"),
    "error": ({"max_error": -1.0}, r"Screen.max_error must be >= 0, got -1.0"),
}


@pytest.mark.parametrize(("given", "pattern"), BAD_SCREENS.values(), ids=BAD_SCREENS)
def test_screen_refuses(given: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        Screen(**given)


WEIGHTS: dict[str, tuple[Callable[[], Any], str]] = {
    "vector": (lambda: quantize_weight(torch.ones(3).half()), r"weight must have shape .*\[3\]"),
    "fp32": (lambda: quantize_weight(torch.ones(3, 4)), r"weight is torch.float32, whose digits"),
    "triton": (
        lambda: quantize_weight(torch.ones(3, 4).bfloat16(), backend="triton"),
        r"weight cannot be quantised here: Triton's interpreter has no bf16",
    ),
    "backend": (
        lambda: quantize_weight(torch.ones(3, 4).half(), backend="cuda"),  # type: ignore
        r"backend must be one of 'auto', 'triton', 'torch', got 'cuda'",
    ),
    "hidden": (
        lambda: quantize_weight(torch.ones(3, 4).half(), torch.ones(2, 5).half()),
        r"hidden must have shape \[..., D\] with D=4",
    ),
    "hidden_list": (
        lambda: quantize_weight(torch.ones(3, 4).half(), [[1.0] * 4]),  # type: ignore
        r"hidden must be a torch.Tensor, got .*list",
    ),
    "hidden_scalar": (
        lambda: quantize_weight(torch.ones(3, 4).half(), torch.tensor(1.0)),
        r"hidden must have shape \[..., D\] with D=4.*got \[\]",
    ),
    "hidden_int": (
        lambda: quantize_weight(torch.ones(3, 4).half(), torch.ones(2, 4, dtype=torch.int64)),
        r"hidden must be a floating-point tensor, got torch.int64",
    ),
    "sparse": (
        lambda: quantize_weight(torch.ones(3, 4).half().to_sparse()),
        r"weight must be a dense tensor",
    ),
    "meta": (lambda: quantize_weight(torch.ones(3, 4).half().to("meta")), r"weight .*values.*meta"),
    "shard": (
        lambda: quantize_weight(torch.ones(3, 4).half(), vocab_shard=(0, 3)),  # type: ignore
        r"vocab_shard must be a cce_dist.VocabShard",
    ),
    "shard_rows": (
        lambda: quantize_weight(torch.ones(3, 4).half(), vocab_shard=VocabShard(0, 2, 2)),
        r"weight must have vocab_shard's 2 rows \[0, 2\), got 3",
    ),
    "screen_name": (
        lambda: quantize_weight(torch.ones(3, 4).half(), screen="int8"),  # type: ignore
        r"screen must be a cce_dist.Screen, got 'int8'",
    ),
    "refresh_of_none": (
        lambda: quantize_weight(torch.ones(3, 4).half()).refresh(None),  # type: ignore
        r"weight must have shape \[V_local, D\], got .*NoneType",
    ),
    "refresh_of_a_row": (
        lambda: quantize_weight(torch.ones(3, 4).half()).refresh(torch.ones(4).half()),
        r"weight must have shape \[V_local, D\], got \[4\]",
    ),
    "other": (
        lambda: quantize_weight(torch.ones(3, 4).half()).refresh(torch.ones(3, 5).half()),
        r"\[3, 4\] \(without padding\) of torch.float16, got \[3, 5\]",
    ),
    "screen": (
        lambda: call(
            screen=Screen(dtype="e4m3"), quantized_weight=quantize_weight(torch.ones(50, 8).half())
        ),
        r"quantized_weight was made for screen=Screen\(dtype='auto'",
    ),
    "another_tensor": (
        lambda: call(quantized_weight=quantize_weight(torch.ones(50, 8).half())),
        r"quantized_weight is of another tensor",
    ),
    "full": (
        lambda: call(
            logits="full", quantized_weight=quantize_weight(torch.ones(50, 8).half())
        ),
        r'quantized_weight has no effect with logits="full"',
    ),
}  # fmt: skip


@pytest.mark.interpreter
def test_a_weight_in_the_memory_of_a_freed_one_is_another() -> None:
    memory = np.ones((50, 8), np.float16)
    first = torch.from_numpy(memory)
    kept = quantize_weight(first)
    hidden, targets = torch.ones(4, 8).half(), torch.zeros(4, dtype=torch.int64)
    how: dict[str, Any] = {"logits": "screened", "quantized_weight": kept}
    expected = linear_cross_entropy(hidden, first, targets, **how)
    # Whatever of the same memory the caller passes.
    assert torch.equal(linear_cross_entropy(hidden, first.detach()[:], targets, **how), expected)
    del first
    second = torch.from_numpy(memory)
    with pytest.raises(ValueError, match="quantized_weight is of another tensor"):
        linear_cross_entropy(hidden, second, targets, **how)
    kept.refresh(second)
    assert torch.equal(linear_cross_entropy(hidden, second, targets, **how), expected)


@pytest.mark.interpreter
def test_another_view_of_the_same_memory_is_another_weight() -> None:
    """Each begins where the copied one does, and has as many rows."""
    memory = torch.ones(100, 16).half()
    hidden, targets = torch.ones(4, 16).half(), torch.zeros(4, dtype=torch.int64)
    views = {
        "rows of every second": (memory[::2], memory[:50], "is of another tensor than weight"),
        "a narrower one": (
            memory[:, :8],
            memory,
            "of 16 numbers of torch.float16, got 100 rows of 8",
        ),
    }
    for copied, weight, pattern in views.values():
        how: dict[str, Any] = {"logits": "screened", "quantized_weight": quantize_weight(copied)}
        with pytest.raises(ValueError, match=f"quantized_weight .*{pattern}"):
            linear_cross_entropy(hidden, weight, targets, **how)


@pytest.mark.interpreter
@pytest.mark.parametrize(("wrong", "pattern"), WEIGHTS.values(), ids=WEIGHTS)
def test_quantize_weight_refuses(wrong: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        wrong()
