"""`largest_logits` against the logits themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from cce_dist import largest_logits, quantize_weight
from cce_dist.testing import DTYPES, PLACES, Place, grid


def inputs(dtype: torch.dtype, place: Place, tokens: int = 300) -> Any:
    columns, generator = 1100, torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 40, generator=generator).to(dtype)
    weight = torch.randn(columns, 40, generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator)
    return tuple(x.to(place.device) for x in (hidden, weight, bias))


@pytest.mark.parametrize(**grid(places=PLACES, dtype=DTYPES, with_options=[False, True]))
def test_the_first_largest_logit(place: Place, dtype: torch.dtype, with_options: bool) -> None:
    hidden, weight, bias = inputs(dtype, place)
    options: dict[str, Any] = {}
    logits = hidden.double() @ weight.double().T
    if with_options:
        options = {"bias": bias, "softcap": 20.0, "logit_scale": 0.5}
        logits = 10 * torch.tanh((logits + bias.double()) / 20)
    made = largest_logits(
        hidden.view(3, 100, 40), weight, backend=place.backend, workspace_bytes=2**20, **options
    )
    value, index = logits.max(-1)
    assert made.index.dtype == torch.int64 and made.index.shape == made.value.shape == (3, 100)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert made.value.dtype == wide
    torch.testing.assert_close(made.value.flatten().double(), value, rtol=1e-4, atol=1e-4)
    # Where two nearly tie, either may win.
    chosen = logits.gather(1, made.index.flatten()[:, None])[:, 0]
    assert bool((value - chosen <= 1e-4).all())
    assert (made.index.flatten() == index).double().mean() > 0.99


@pytest.mark.parametrize(**grid(places=PLACES))
def test_of_equal_logits_the_first(place: Place) -> None:
    hidden, weight, _ = inputs(torch.float32, place)
    weight = torch.cat([weight, weight, weight])
    made = largest_logits(hidden, weight, backend=place.backend)
    assert bool((made.index < 1100).all())


@pytest.mark.parametrize(**grid(places=PLACES))
def test_nothing_to_look_at(place: Place) -> None:
    hidden, weight, _ = inputs(torch.float32, place)
    none = largest_logits(hidden[:0], weight, backend=place.backend)
    assert none.value.shape == none.index.shape == (0,)
    made = largest_logits(hidden, weight[:0], backend=place.backend)
    assert bool((made.value == -torch.inf).all()) and not made.index.any()


@pytest.mark.parametrize(**grid(places=PLACES))
def test_what_is_no_number_is_not_passed_over(place: Place) -> None:
    hidden, weight, _ = inputs(torch.float32, place, tokens=140)
    expected = (hidden @ weight.T).max(-1)

    def made(hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        # Of the torch backend's 128 columns at a time.
        return largest_logits(hidden, weight, backend=place.backend, workspace_bytes=2**16)

    bad = hidden.clone()
    bad[[3, 130], 5] = torch.nan
    value, index = made(bad, weight)
    is_bad = bad.isnan().any(-1)
    assert bool((value.isnan() == is_bad).all()) and not index[is_bad].any()
    assert torch.equal(index[~is_bad], expected.indices[~is_bad])
    for row in (0, 100, 700, 1099):
        bad = weight.clone()
        bad[row, 2] = torch.nan
        value, index = made(hidden, bad)
        assert bool(value.isnan().all()) and not index.any()
    bad = weight.clone()
    bad[700] = torch.inf * hidden[0].sign()
    value, index = made(hidden[:1], bad)
    assert value.item() == torch.inf and index.item() == 700


def test_refuses_dtensors(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        given = {"hidden": torch.ones(4, 8), "weight": torch.ones(9, 8), "bias": torch.ones(9)}
        for name, value in given.items():
            there = DTensor.from_local(value, mesh, [Replicate()])
            with pytest.raises(ValueError, match=rf"{name} must be a plain tensor.*to_local"):
                largest_logits(**{**given, name: there})
        weight = DTensor.from_local(torch.ones(9, 8).half(), mesh, [Replicate()])
        with pytest.raises(ValueError, match=r"weight must be a plain tensor"):
            quantize_weight(weight)
    finally:
        dist.destroy_process_group()


def test_is_not_differentiable_and_refuses_what_the_loss_does() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    assert not largest_logits(hidden, weight).value.requires_grad
    with pytest.raises(ValueError, match=r"weight must have shape \[V_local, D\] with D=8"):
        largest_logits(hidden, weight.T)
    with pytest.raises(ValueError, match="bias must have shape"):
        largest_logits(hidden, weight, bias=torch.zeros(8))
    with pytest.raises(ValueError, match="softcap"):
        largest_logits(hidden, weight, softcap=-1.0)
    with pytest.raises(ValueError, match="backend"):
        largest_logits(hidden, weight, backend="cuda")  # pyright: ignore[reportArgumentType]
