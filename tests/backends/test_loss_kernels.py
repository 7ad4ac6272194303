"""The kernels of the loss of all tokens: values and gradients of torch."""

from __future__ import annotations

import pytest
import torch

from cce_dist.testing import TRITON_PLACES, Place, grid

pytest.importorskip("triton")
from cce_dist.backends.triton.tokens.loss import BLOCK, KERNELS


# One token, a part of a block, several blocks.
@pytest.mark.parametrize(**grid(places=TRITON_PLACES, tokens=[1, 700, 2 * BLOCK + 3]))
@pytest.mark.parametrize("divisor", ["number", "float32", "int32"])
def test_the_loss_and_its_gradient(place: Place, tokens: int, divisor: str) -> None:
    generator = torch.Generator().manual_seed(tokens)
    lse, target = (20 * torch.randn(tokens, generator=generator) for _ in range(2))
    number = 3.0 if divisor == "number" else torch.tensor([7], dtype=getattr(torch, divisor))
    on_device = number if isinstance(number, float) else number.to(place.device)
    inputs = lse.to(place.device), target.to(place.device)
    total = KERNELS.total(*inputs, on_device)
    expected = ((lse.double() - target.double()) / number).sum()
    bound = 3e-7 * (lse - target).abs().sum().item()
    assert total.shape == () and total.dtype == torch.float32
    torch.testing.assert_close(total.cpu().double(), expected, rtol=3e-7, atol=bound)
    grad = torch.tensor(2.5, device=place.device)
    shares = KERNELS.share_gradient(grad, inputs[0], on_device)
    assert torch.equal(shares.cpu(), (torch.full((tokens,), 2.5) / number).float())
