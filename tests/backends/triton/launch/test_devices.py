"""Tensors of a GPU that is not the current one, as a model over several GPUs of one process has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cce_dist import Filter, LossOutput, linear_cross_entropy, linear_distillation, quantize_weight
from cce_dist.backends.triton.launch.replay import forget_recordings

WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": Filter(keep=0.01)},
    "exact": {"gradient": "exact", "stats": ("lse", "entropy", "correct")},
    "in_forward": {"gradient": "in_forward"},
    "screened": {"logits": "screened"},
    "quantized": {"logits": "screened"},
    "distillation": {"divergence": "forward_kl"},
    "tiles": {"divergence": "jsd"},
}


def results(way: str) -> list[Tensor]:
    """Returns loss and gradients of inputs that GPU 1 is still computing."""
    generator = torch.Generator("cuda:1").manual_seed(0)

    def made(rows: int) -> Tensor:
        return torch.randn(rows, 96, device="cuda:1", generator=generator).bfloat16()

    inputs = [made(300), made(1000), made(300), made(1000)]
    targets = torch.randint(1000, (300,), device="cuda:1", generator=generator)
    late = [torch.zeros_like(x) for x in inputs]
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        torch.cuda._sleep(50_000_000)
    for x, value in zip(late, inputs, strict=True):
        x.copy_(value)
    hidden, weight = (x.requires_grad_() for x in late[:2])
    if "divergence" in WAYS[way]:
        result: Any = linear_distillation(hidden, weight, *late[2:], targets, **WAYS[way])
    else:
        rows = quantize_weight(weight.detach()) if way == "quantized" else None
        result = linear_cross_entropy(
            hidden, weight, targets, backend="triton", quantized_weight=rows, **WAYS[way]
        )
    loss = result.loss if isinstance(result, LossOutput) else result
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("way", WAYS)
def test_kernels_run_where_the_tensors_are(way: str) -> None:
    forget_recordings()
    with torch.cuda.device(1):
        expected = results(way)
    forget_recordings()
    with torch.cuda.device(0):
        # Prepared, recorded, played.
        for _ in range(4):
            for first, second in zip(results(way), expected, strict=True):
                assert torch.equal(first, second)
            assert torch.cuda.current_device() == 0


# A process of its own: what it compiles first is for a GPU that is not the current one.
FIRST_CALLS = """
import sys, torch
from cce_dist import linear_cross_entropy

losses = []
for device in ("cuda:1", "cuda:0"):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 96, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(1000, 96, generator=generator).to(device, torch.bfloat16).requires_grad_()
    targets = torch.randint(1000, (300,), generator=generator).to(device)
    loss = linear_cross_entropy(hidden, weight, targets, backend="triton", gradient=sys.argv[1])
    loss.backward()
    losses.append((loss.item(), weight.grad.float().norm().item()))
assert losses[0] == losses[1], losses
"""


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("gradient", ["filtered", "exact"])
def test_first_calls_on_another_gpu_and_then_on_the_current_one(
    gradient: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS, gradient],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
