"""The 8-bit copy of the weight: its rounding, a step that it saves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import _global_optimizer_post_hooks

from cce_dist import QuantizedWeight, Screen, linear_cross_entropy, quantize_weight
from cce_dist.testing import (
    CPU_PLACES,
    TRITON_PLACES,
    Case,
    Place,
    golden_outputs,
    grid,
    zipf_inputs,
)
from cce_dist.vocab_shard import VocabShard
from tests.backends.screened_cases import EIGHT_BITS, SCREENED, WIDE, dtype_of
from tests.support.loss_cases import generator


def rows_in_8_bits(rows: Tensor, bits: str) -> Tensor:
    """What the nearest numbers in a row's own scale stand for, by torch."""
    largest, dtype = (127, torch.int8) if bits == "int8" else (448, torch.float8_e4m3fn)
    step = rows.abs().amax(1, keepdim=True) / largest
    values = rows / step
    values = values.round() if bits == "int8" else values.to(dtype).float()
    return values * (rows.square().sum(1, keepdim=True) / (rows * values).sum(1, keepdim=True))


# The kernel interpreted takes 512 rows twice, above 2304 dims once, and goes on to the next.
ROWS = {
    "whole": (700, 24),
    "two_slices": (33, 300),
    "one_number": (1, 1),
    "several_groups": (2500, 24),
    "even_groups": (2048, 256),
    "groups_of_long_rows": (1100, 2400),
}


@pytest.mark.parametrize(**grid(places=CPU_PLACES, bits=EIGHT_BITS, shape=ROWS))
def test_quantize_weight_rounds_to_the_nearest(
    place: Place, bits: str, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape, generator=generator()).half()
    hidden = 3 + torch.randn(50, shape[1], generator=generator(1)).half()
    made = quantize_weight(weight, hidden, screen=Screen(dtype=bits), **place.options).rows  # type: ignore
    torch.testing.assert_close(made.centre, weight.float().mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(made.hidden_centre, hidden.float().mean(0), atol=1e-5, rtol=1e-5)
    assert bool((torch.log2(made.channel) % 1 == 0).all())
    rows = made.channel * (weight.float() - made.centre)
    values = made.values[:, : shape[1]].float()
    assert not made.values[:, shape[1] :].float().any()
    if shape[0] > 1:
        expected = rows_in_8_bits(rows, bits)
        # The last digit of a scale decides how a number in the middle of two rounds.
        off = (values * made.of_rows[0, :, None] - expected).abs() > 1e-2 * expected.abs()
        assert float(off.float().mean()) < 1e-3
    torch.testing.assert_close(
        made.of_rows[1], weight.float() @ made.hidden_centre, atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, bits=EIGHT_BITS, dim=(40, 2304, 4096)))
def test_quantized_rows_are_those_of_torch(place: Place, bits: str, dim: int) -> None:
    # On 132 multiprocessors 15,840 programs begin, most of which go on to a second row.
    num_rows = 30_001 if place.compiles else 1500
    weight = torch.randn(num_rows, dim, generator=generator()).to(dtype_of(place)).to(place.device)
    hidden = 3 + torch.randn(50, dim, generator=generator(1)).to(weight.dtype).to(place.device)
    screen = Screen(dtype=bits)  # type: ignore
    made = quantize_weight(weight, hidden, screen=screen, **place.options).rows
    expected = quantize_weight(weight, hidden, screen=screen, backend="torch").rows
    # A step's last digit decides how a number in the middle of two rounds.
    off = made.values.float() != expected.values.float()
    assert float(off.float().mean()) < 1e-3
    torch.testing.assert_close(made.of_rows, expected.of_rows, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(made.mean, expected.mean, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_quantized_weight_saves_a_step(place: Place) -> None:
    inputs = zipf_inputs(150, 900, 40, generator=generator(), dtype=torch.float16)
    weight = inputs.weight.clone().requires_grad_()
    kept = quantize_weight(weight, inputs.hidden, screen=WIDE, **place.options)
    assert isinstance(kept, QuantizedWeight)
    assert 900 * 40 < kept.num_bytes < 900 * 70
    options: dict[str, Any] = {**SCREENED, **place.options}

    def lse(given: QuantizedWeight | None) -> Tensor:
        found: Any = linear_cross_entropy(
            inputs.hidden, weight, inputs.targets, quantized_weight=given, **options
        )
        return found.lse.detach()

    torch.testing.assert_close(lse(kept), lse(None), atol=1e-3, rtol=0)
    # A step of the optimizer.
    with torch.no_grad():
        weight.mul_(1.5)
    with pytest.raises(ValueError, match=r"earlier values of weight.*refresh"):
        lse(kept)
    address = kept.rows.values.data_ptr()
    kept.refresh(weight)
    assert kept.rows.values.data_ptr() == address
    torch.testing.assert_close(lse(kept), lse(None), atol=2e-3, rtol=0)
    kept.refresh(weight, inputs.hidden)
    torch.testing.assert_close(lse(kept), lse(None), atol=1e-3, rtol=0)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "dtensor"])
def test_a_step_of_a_fused_optimizer_is_noticed(sharded: bool, mesh: DeviceMesh) -> None:
    """It writes the weight, and leaves its version."""
    inputs = zipf_inputs(40, 700, 24, generator=generator(), dtype=torch.float16)
    weight = torch.nn.Parameter(inputs.weight.clone())
    if sharded:
        weight = torch.nn.Parameter(DTensor.from_local(weight.detach(), mesh, [Shard(0)]))
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    hidden = torch.nn.Parameter(inputs.hidden)
    optimizer = torch.optim.AdamW([weight, hidden], fused=True)
    kept = quantize_weight(local, screen=WIDE)

    def step(*stepped: torch.nn.Parameter) -> None:
        optimizer.zero_grad()
        for each in stepped:
            each.grad = torch.ones_like(each)
        optimizer.step()
        screened: Any = {**SCREENED, "quantized_weight": kept}
        linear_cross_entropy(inputs.hidden, local, inputs.targets, **screened)

    step(hidden)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"earlier values of weight.*refresh"):
            step(weight)
        kept.refresh(local)
        step()


def test_no_hook_of_optimizers_outlives_its_copy() -> None:
    before = len(_global_optimizer_post_hooks)
    kept = quantize_weight(torch.ones(3, 4).half())
    assert len(_global_optimizer_post_hooks) == before + 1
    del kept
    assert len(_global_optimizer_post_hooks) == before


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_a_copy_made_in_inference_mode_is_refreshed_outside(place: Place) -> None:
    inputs = zipf_inputs(40, 700, 24, generator=generator(), dtype=torch.float16)
    with torch.inference_mode():
        kept = quantize_weight(inputs.weight, inputs.hidden, screen=WIDE, **place.options)
    inputs.weight.mul_(2)
    kept.refresh(inputs.weight)
    fresh = quantize_weight(inputs.weight, inputs.hidden, screen=WIDE, **place.options)
    torch.testing.assert_close(kept.rows.of_rows[0], fresh.rows.of_rows[0], rtol=0.2, atol=0)


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_quantized_weight_of_a_padded_shard(place: Place) -> None:
    inputs = zipf_inputs(40, 700, 24, generator=generator(), dtype=torch.float16)
    padded = torch.cat([inputs.weight, torch.full((68, 24), math.nan).half()])
    shard = VocabShard(0, 768, 700)
    options: dict[str, Any] = {**SCREENED, **place.options, "vocab_shard": shard}
    how: dict[str, Any] = {"screen": WIDE, **place.options}
    kept = quantize_weight(padded, inputs.hidden, vocab_shard=shard, **how)
    found: Any = linear_cross_entropy(
        inputs.hidden, padded, inputs.targets, quantized_weight=kept, **options
    )
    golden = golden_outputs(Case(inputs, {"stats": ("lse",)}))["lse"]
    torch.testing.assert_close(found.lse.double(), golden, atol=2e-3, rtol=0)
    whole = quantize_weight(inputs.weight, **how)
    with pytest.raises(ValueError, match=r"600 rows.*got 700 rows"):
        short = replace(inputs, weight=inputs.weight[:600], targets=inputs.targets % 600)
        linear_cross_entropy(
            short.hidden,
            short.weight,
            short.targets,
            quantized_weight=whole,
            **{**options, "vocab_shard": None},
        )


# One part; as many as a program adds at a time, and more; numbers that fill no program.
@pytest.mark.parametrize(
    **grid(places=TRITON_PLACES, splits=(1, 16, 37), dim=(40, 130), divides=(False, True))
)
def test_parts_are_summed_over_the_programs(
    place: Place, splits: int, dim: int, divides: bool
) -> None:
    pytest.importorskip("triton")
    from cce_dist.backends.triton.screened.quantize import sum_parts

    part = torch.rand(splits, 3, 16, dim, generator=generator()).to(place.device)
    seen = torch.rand(splits, 16, generator=generator()).to(place.device) if divides else None
    out = torch.full_like(part[0], math.nan)
    sum_parts(part, out, seen)
    expected = part.double().sum(0)
    if seen is not None:
        expected = expected / seen.double().sum(0)[:, None]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=0)
