"""`token_logprobs(top_k=)` against torch.topk of dense logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import token_logprobs
from cce_dist.backends.torch.top import first_largest
from cce_dist.testing import DTYPES, TRITON_PLACES, Place, grid
from tests.support.listed_cases import CLASSES, Listing


@pytest.mark.parametrize(**grid(k=(1, 6, 128), dtype=("fp32", "bf16", "float64")))
@pytest.mark.parametrize("supported", [False, True])
def test_they_are_torchs(place: Place, k: int, dtype: str, supported: bool) -> None:
    listing = Listing.make(DTYPES[dtype]).on(place.device)
    options: dict[str, Any] = {"softcap": 6.0, "logit_scale": -0.5}
    found = token_logprobs(
        listing.hidden,
        listing.weight,
        listing.targets,
        bias=listing.bias,
        temperature=listing.temperature,
        support=listing.support if supported else None,
        top_k=k,
        shift=1,
        workspace_bytes=2**16,
        **options,
        **place.options,
    )
    wide = listing.to(torch.float64)
    logits = (wide.hidden @ wide.weight.T + wide.bias)[:, :-1]
    logits = -3 * torch.tanh(logits / 6) / wide.temperature[:, 1:, None]
    allowed = listing.allowed[:, 1:] if supported else torch.ones_like(logits, dtype=torch.bool)
    log_p = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    counts = listing.targets[:, 1:] != -100
    width = min(k, CLASSES)
    value, ids = log_p.nan_to_num(nan=-torch.inf, neginf=-torch.inf).topk(width)
    ids = ids.where(value > -torch.inf, -1)
    top_ids, top_logprobs = found.top_ids, found.top_logprobs
    assert top_ids is not None and top_logprobs is not None and not top_logprobs.requires_grad
    assert top_ids.shape == (*counts.shape, k) and top_ids.dtype == torch.int64
    assert not top_ids[~counts].any() and not top_logprobs[~counts].any()
    # -1 and -inf where there are fewer ids.
    assert bool((top_ids[counts][:, width:] == -1).all())
    assert bool((top_logprobs[counts][:, width:] == -torch.inf).all())
    ours = top_logprobs[counts][:, :width].double()
    torch.testing.assert_close(ours, value[counts], rtol=1e-4, atol=1e-4)
    # Where two nearly tie, either may come first.
    assert (top_ids[counts][:, :width] == ids[counts]).double().mean() > 0.98


@pytest.mark.parametrize(**grid())
def test_of_equal_logits_the_lowest_id(place: Place) -> None:
    weight = torch.ones(300, 8, device=place.device)
    weight[250:] = -1
    hidden = torch.stack([torch.ones(8), torch.zeros(8), -torch.ones(8)]).to(place.device)
    targets = torch.zeros(3, dtype=torch.int64, device=place.device)
    found = token_logprobs(
        hidden, weight, targets, top_k=5, workspace_bytes=2**16, **place.options
    ).top_ids
    assert found is not None
    assert found.tolist() == [[*range(5)], [*range(5)], [*range(250, 255)]]


def numbers(dtype: torch.dtype) -> Tensor:
    """Ties of both signs, zeros of both, infinities, and numbers one digit apart."""
    values = [0.0, -0.0, 1.0, 1.0, -1.0, -1.0, torch.inf, -torch.inf, 2.0, 0.0, -torch.inf]
    row = torch.tensor(values, dtype=dtype)
    near = torch.nextafter(row, torch.full_like(row, torch.inf))
    return torch.stack([row, near, -row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_largest_is_a_stable_sort(dtype: torch.dtype) -> None:
    z = numbers(dtype)
    value, at = first_largest(z, 9)
    right, places = torch.sort(z, dim=1, descending=True, stable=True)
    assert torch.equal(value, right[:, :9]) and torch.equal(at, places[:, :9])
    z[1, 3] = torch.nan
    z[1, 5] = -torch.nan
    value, at = first_largest(z, 3)
    assert bool(value[1, :2].isnan().all()) and at[1, :2].tolist() == [3, 5]


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, k=(1, 5, 11, 20)))
def test_the_kernel_orders_as_a_stable_sort(place: Place, k: int) -> None:
    top = pytest.importorskip("cce_dist.backends.triton.teacher.top")
    z = torch.cat([numbers(torch.float32), torch.randn(3, 11).round()], 1).to(place.device)
    z[1, 3], z[1, 5], z[2, 20] = torch.nan, -torch.nan, torch.nan
    wide = torch.nn.functional.pad(z, (0, 10))
    keys = torch.empty(3, k, dtype=torch.int64, device=place.device)
    for first, last in ((0, 5), (5, 12), (12, 22)):
        top.add_tile(wide[:, first:last], keys, first)
    value, columns = top.values_and_columns(keys)
    right, places = first_largest(z, k)
    width = right.shape[1]
    torch.testing.assert_close(value[:, :width], right, rtol=0, atol=0, equal_nan=True)
    places = places.masked_fill(right == -torch.inf, -1)
    assert torch.equal(columns[:, :width], places)
    assert bool((columns[:, width:] == -1).all() and (value[:, width:] == -torch.inf).all())
