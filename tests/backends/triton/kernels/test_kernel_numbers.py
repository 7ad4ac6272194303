"""The kernels' own exponentials, logarithms and tanh: to the last digits of fp32."""

from __future__ import annotations

import pytest
import torch

from cce_dist.testing import TRITON_PLACES, Place, grid

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from cce_dist.backends.triton.kernels.numbers import exp2_of, log2_of, near_tanh, tanh  # noqa: E402

EPS = torch.finfo(torch.float32).eps
# The functions in float64, and inputs that reach all of their branches.
FUNCTIONS = {
    "exp2": (torch.exp2, torch.linspace(-125.9, 126.9, 20001)),
    "log2": (torch.log2, torch.linspace(-120, 120, 20001, dtype=torch.float64).exp2().float()),
    "log2_near_1": (torch.log2, 1 + torch.linspace(-0.3, 0.55, 20001)),
    "tanh": (torch.tanh, torch.linspace(-20, 20, 20001)),
    "tanh_near_0": (torch.tanh, torch.linspace(-0.7, 0.7, 20001)),
    "near-tanh": (torch.tanh, torch.linspace(-20, 20, 20001)),
    "near-tanh_near_0": (torch.tanh, torch.linspace(-0.7, 0.7, 20001)),
}


@triton.jit
def apply_kernel(x_ptr, out_ptr, size, NAME: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=1.0)
    if NAME == "exp2":
        found = exp2_of(x)
    elif NAME == "log2":
        found = log2_of(x)
    elif NAME == "tanh":
        found = tanh(x)
    else:
        found = near_tanh(x)
    tl.store(out_ptr + at, found, mask=at < size)


def apply(place: Place, name: str, x: torch.Tensor) -> torch.Tensor:
    x = x.to(place.device)
    out = torch.empty_like(x)
    apply_kernel[(triton.cdiv(len(x), 1024),)](x, out, len(x), NAME=name, BLOCK=1024)
    return out.cpu()


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, name=tuple(FUNCTIONS)))
def test_numbers_are_right_to_the_last_digits(place: Place, name: str) -> None:
    function, x = FUNCTIONS[name]
    expected = function(x.double())
    error = (apply(place, name.split("_")[0], x).double() - expected).abs()
    # In units of the last digit; that of logits of 16-bit inputs need not have it.
    units = 16 if name.startswith("near") else 2
    assert bool((error <= units * EPS * expected.abs() + 1e-38).all()), float(
        (error / expected.abs().clamp_min(1e-38)).max() / EPS
    )


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_numbers_beyond_the_range(place: Place) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([-inf, -1e30, -140.0, 0.0, 1.0, 128.0, 1e30, inf, nan])
    expected = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, inf, inf, inf, nan])
    torch.testing.assert_close(
        apply(place, "exp2", x), expected, rtol=0, atol=1e-37, equal_nan=True
    )
    x = torch.tensor([0.0, 1.0, inf, nan])
    expected = torch.tensor([-inf, 0.0, inf, nan])
    torch.testing.assert_close(apply(place, "log2", x), expected, rtol=0, atol=0, equal_nan=True)
    x = torch.tensor([-inf, -1e30, 0.0, 1e30, inf, nan])
    expected = torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0, nan])
    for name in ("tanh", "near-tanh"):
        found = apply(place, name, x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
