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
from typing import Any, get_args

import torch

from cce_dist import linear_cross_entropy
from cce_dist.bench.inputs import Shape, parse_shape
from cce_dist.bench.machine import synchronize
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
    unknown = sorted(set(gradients) - set(get_args(GradientMode)))
    if unknown:
        raise ValueError(f"gradient must be one of {get_args(GradientMode)}, got {unknown}")
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


def time_first_call(sizes: str, dtype: str, place: str, gradient: Any) -> dict[str, float]:
    """Returns the seconds from the call to the gradients, and to the loss; imports do not count."""
    shape, device = parse_shape(sizes), torch.device(place)
    options = {"device": device, "dtype": getattr(torch, dtype), "requires_grad": True}
    hidden = torch.randn(shape.num_tokens, shape.dim, **options)
    weight = torch.randn(shape.vocab_size, shape.dim, **options)
    targets = torch.randint(shape.vocab_size, (shape.num_tokens,), device=device)

    def now() -> float:
        synchronize(device)
        return time.perf_counter()

    start = now()
    loss = linear_cross_entropy(hidden, weight, targets, gradient=gradient)
    assert isinstance(loss, torch.Tensor)
    middle = now()
    loss.backward()
    return {"seconds": now() - start, "seconds_to_loss": middle - start}


if __name__ == "__main__":
    print(json.dumps(time_first_call(*sys.argv[1:])))
