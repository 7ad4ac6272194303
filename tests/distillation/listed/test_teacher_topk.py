"""teacher_topk against torch's topk of log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import (
    VocabShard,
    listed_distillation,
    teacher_topk,
)
from cce_dist.testing import DTYPES, Place, grid
from tests.distillation.listed.listed_teachers import (
    CLASSES,
    DIM,
    TOKENS,
    Student,
)


@pytest.mark.parametrize(**grid(k=(1, 5, 128), dtype=("fp32", "bf16", "float64")))
def test_teacher_topk_is_torchs(place: Place, k: int, dtype: str) -> None:
    student = Student.make(DTYPES[dtype]).on(place.device)
    teacher = teacher_topk(
        student.hidden.clone().requires_grad_(),
        student.weight,
        k,
        temperature=0.7,
        bias=student.bias,
        softcap=5.0,
        logit_scale=1.3,
        **place.options,
    )
    z = student.hidden.double() @ student.weight.double().T + student.bias.double()
    expected = (1.3 * 5 * torch.tanh(z / 5) / 0.7).log_softmax(-1)
    values = expected.topk(min(k, CLASSES)).values
    ids, logprobs = teacher
    assert ids.shape == logprobs.shape == (*TOKENS, k) and ids.dtype == torch.int64
    assert not logprobs.requires_grad and bool((logprobs <= 0).all())
    width = values.shape[-1]
    torch.testing.assert_close(logprobs[..., :width].double(), values, rtol=1e-5, atol=1e-5)
    at_ids = expected.gather(-1, ids)[..., :width]
    torch.testing.assert_close(at_ids, values, rtol=1e-5, atol=1e-5)
    # Padding, where the vocabulary has fewer ids.
    assert bool((logprobs[..., width:] == -torch.inf).all()) and not ids[..., width:].any()
    loss = listed_distillation(student.hidden, student.weight, teacher, **place.options)
    assert isinstance(loss, Tensor) and bool(loss.isfinite())


def test_teacher_topk_of_a_single_token() -> None:
    hidden, weight = torch.randn(8), torch.randn(20, 8)
    teacher = teacher_topk(hidden, weight, 3)
    values, ids = (weight @ hidden).log_softmax(-1).topk(3)
    assert torch.equal(teacher.ids, ids)
    torch.testing.assert_close(teacher.logprobs, values)


def test_teacher_topk_leaves_padded_rows_out() -> None:
    student = Student.make(torch.float64)
    padded = torch.cat([student.weight, 9 * torch.ones(6, DIM).double()])
    shard = VocabShard(0, CLASSES + 6, CLASSES)
    teacher = teacher_topk(student.hidden, padded, 4, vocab_shard=shard)
    torch.testing.assert_close(teacher, teacher_topk(student.hidden, student.weight, 4))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"k": 0}, r"^k must be an int in \[1, 128\], got 0"),
        ({"k": 2.0}, r"^k must be an int in \[1, 128\], got 2.0"),
        ({"k": 3, "temperature": torch.ones(2)}, "^temperature must be a number, got <class"),
        ({"k": 3, "temperature": -1.0}, "^temperature must be > 0, got -1.0"),
    ],
    ids=["zero", "float", "tensor", "negative"],
)
def test_teacher_topk_refuses(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        teacher_topk(torch.ones(2, DIM), torch.ones(9, DIM), **options)
