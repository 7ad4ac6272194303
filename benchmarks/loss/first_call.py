"""Benchmark of a process's first loss and gradients, which compile the kernels."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from cce_dist.bench.inputs import Shape
from cce_dist.bench.report import Cells
from cce_dist.options import GradientMode


@dataclass(frozen=True)
class FirstCall:
    """The first call of a process: its sizes, names of dtype and device, and gradient mode."""

    shape: Shape
    dtype: str
    device: str
    gradient: GradientMode


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
    rows: list[Cells] = []
    for gradient in gradients:
        mode = next((known for known in get_args(GradientMode) if known == gradient), None)
        if mode is None:
            raise ValueError(f"gradient must be one of {get_args(GradientMode)}, got {gradient!r}")
        call = FirstCall(shape, dtype, device, mode)
        with tempfile.TemporaryDirectory() as cache:
            for before in ("empty", "filled"):
                seconds = _in_a_process(call, cache)
                rows.append({"method": gradient, "kernel_cache": before, **seconds})
    return rows


def _in_a_process(call: FirstCall, cache: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, json.dumps(dataclasses.asdict(call))],
        # The folder from which Python finds this module.
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{call} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def time_first_call(call: FirstCall) -> dict[str, float]:
    """Returns the seconds from the call to the gradients, and to the loss; imports do not count."""
    from cce_dist import linear_cross_entropy

    shape, device, dtype = call.shape, torch.device(call.device), getattr(torch, call.dtype)
    hidden = torch.randn(shape.num_tokens, shape.dim, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(shape.vocab_size, shape.dim, device=device, dtype=dtype).requires_grad_()
    targets = torch.randint(shape.vocab_size, (shape.num_tokens,), device=device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = now()
    loss = linear_cross_entropy(hidden, weight, targets, gradient=call.gradient)
    assert isinstance(loss, torch.Tensor)
    middle = now()
    loss.backward()
    return {"seconds": now() - start, "seconds_to_loss": middle - start}


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    print(json.dumps(time_first_call(FirstCall(**{**fields, "shape": Shape(**fields["shape"])}))))
