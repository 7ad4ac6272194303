"""Parts of what computes every column in place of long lists."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cce_dist import Filter, LossOptions, VocabShard
from cce_dist.algorithm.plan import plan_of

pytest.importorskip("triton")

from cce_dist.backends.triton.backward import hopper_fit
from cce_dist.backends.triton.backward.exact import gather_hidden
from cce_dist.backends.triton.kernels.backward.store_hidden import store_hidden_kernel
from cce_dist.backends.triton.launch.start import start


@pytest.mark.parametrize(
    ("vocab_size", "rule", "expected"),
    [
        (1_482_910, Filter(), True),
        (1_482_911, Filter(), False),
        (1024, Filter(eps=2.0**-10), True),
        (1025, Filter(eps=2.0**-10), False),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 8192])
def test_a_flat_softmax_is_kept(
    num_tokens: int, vocab_size: int, rule: Filter, expected: bool
) -> None:
    hidden = torch.empty(num_tokens, 8, dtype=torch.float16)
    options = LossOptions(filter=rule, backend="triton")
    plan = plan_of(hidden, num_tokens, options, None, VocabShard(0, vocab_size, vocab_size))
    assert plan.keeps_flat == expected


def test_rows_of_fp32_sums_must_be_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_fit, "num_groups", lambda *_: 2)
    for dim, expected in ((16, True), (17, False), (18, False), (20, True)):
        weight: Any = torch.empty(300, dim)
        fits = functools.partial(hopper_fit.runs_on_hopper, weight, None, has_bias_alone=False)
        assert fits(has_hidden=True) == expected
        assert fits(has_hidden=False)


@pytest.mark.parametrize("num_chunks", [-1, 0, 3])
def test_gather_if_long(num_chunks: int) -> None:
    hidden, rows = torch.randn(256, 40), torch.randperm(256)
    out, count = torch.full((256, 40), 7.0), torch.tensor([200], dtype=torch.int32)
    per_token = SimpleNamespace(read_rows=rows)
    state: Any = SimpleNamespace(hidden=hidden, per_token=per_token, count=count)
    if_long = torch.tensor([num_chunks], dtype=torch.int32), torch.empty_like(count)
    gather_hidden(state, out, if_long)
    assert if_long[1].item() == (200 if num_chunks < 0 else -1)
    assert torch.equal(out, hidden[rows] if num_chunks < 0 else torch.full_like(out, 7.0))


@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.parametrize("num_chunks", [-1, 0, 3])
def test_tail_of_the_hidden_gradient(num_chunks: int, has_mean: bool) -> None:
    """Of long lists there is none; where nothing is kept there is nothing else."""
    product, centroid = torch.randn(128, 20), torch.randn(16, 20)
    mass, second, drawn = torch.randn(128), torch.randn(128), torch.randn(128)
    rows, count = torch.randperm(128), torch.tensor([100], dtype=torch.int32)
    out = torch.full((128, 20), torch.nan)
    unwritten = torch.full_like(drawn, torch.nan)
    start(store_hidden_kernel, (1, 1))(
        product if num_chunks else torch.full_like(product, torch.nan), centroid, rows, count,
        torch.tensor([num_chunks], dtype=torch.int32), mass,
        drawn if num_chunks > 0 else unwritten, torch.tensor([0.5]), second, out, 128, 20, 1, 128,
        BLOCK_N=128, BLOCK_D=32, HAS_TAIL=True, HAS_DRAWN=True, HAS_MEAN=has_mean,
        HAS_TEACHER=False, EVERY=False,
    )  # fmt: skip
    expected = product[rows] if num_chunks else torch.zeros_like(product)
    if num_chunks >= 0:
        expected += (mass - (0.5 * drawn if num_chunks else 0))[:, None] * centroid[0]
    if has_mean:
        expected += second[:, None] * centroid[1]
    expected[100:] = 0
    torch.testing.assert_close(out[rows], expected)
