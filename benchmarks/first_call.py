"""Benchmark of a process's first loss and gradients, which compile the kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from cce_dist.bench.inputs import Shape, parse_shape
from cce_dist.bench.report import Cells
from cce_dist.options import GradientMode


def bench_first_calls(
    shape: Shape, *, dtype: str, device: str, gradients: Sequence[str]
) -> list[Cells]:
    """Returns rows with the seconds of a first call, each measured in a process of its own.

    Each gradient mode is measured twice: with an empty kernel cache, and with the cache that the
    first of these calls filled.

    Raises:
        ValueError: there is no dtype or gradient mode of this name.
        RuntimeError: a process failed.
    """
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype must name a torch dtype, got {dtype!r}")
    modes = get_args(GradientMode)
    for gradient in gradients:
        if gradient not in modes:
            raise ValueError(f"gradient must be one of {modes}, got {gradient!r}")
    sizes = f"{shape.num_tokens}x{shape.vocab_size}x{shape.dim}"
    rows: list[Cells] = []
    for gradient in gradients:
        with tempfile.TemporaryDirectory() as cache:
            for before in ("empty", "filled"):
                seconds = _in_a_process([sizes, dtype, device, gradient], cache)
                rows.append({"method": gradient, "kernel_cache": before, **seconds})
    return rows


def _in_a_process(call: list[str], cache: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, *call],
        # The folder from which Python finds this module.
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(call)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def time_first_call(
    shape: Shape, dtype: torch.dtype, device: torch.device, gradient: GradientMode
) -> dict[str, float]:
    """Returns the seconds from the call to the gradients, and to the loss; imports do not count."""
    from cce_dist import linear_cross_entropy

    hidden = torch.randn(shape.num_tokens, shape.dim, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(shape.vocab_size, shape.dim, device=device, dtype=dtype).requires_grad_()
    targets = torch.randint(shape.vocab_size, (shape.num_tokens,), device=device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = now()
    loss = linear_cross_entropy(hidden, weight, targets, gradient=gradient)
    assert isinstance(loss, torch.Tensor)
    middle = now()
    loss.backward()
    return {"seconds": now() - start, "seconds_to_loss": middle - start}


if __name__ == "__main__":
    sizes, dtype, device, gradient = sys.argv[1:]
    seconds = time_first_call(
        parse_shape(sizes),
        getattr(torch, dtype),
        torch.device(device),
        gradient,  # pyright: ignore[reportArgumentType]
    )
    print(json.dumps(seconds))
