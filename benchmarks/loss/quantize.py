"""Benchmark of the weight's 8-bit copy: time and rate beside a plain copy's, rounding error."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from cce_dist import QuantizedWeight, Screen, quantize_weight
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.machine import Timer, Variant, interleaved_times
from cce_dist.bench.methods import describe_failure
from cce_dist.bench.report import Cells, percentiles_ms
from cce_dist.options import Backend, EightBitDtype

COPY = "copy"
# Number of rows that are widened to float64 at a time.
ROWS = 4096


def bench_quantize(
    inputs: BenchInputs, *, repeats: int = 10, backend: Backend = "triton"
) -> list[Cells]:
    """Returns a row for a plain copy of the weight, and rows for each 8-bit dtype.

    An 8-bit dtype is timed twice: the weight is quantised without hidden, and with the moments of
    hidden. `gb_per_s` counts the bytes of the weight, read once, and of the copy, written once.
    `of_copy` is this rate over the plain copy's. `error` is the `rounding_error`.

    Raises:
        ValueError: the weight's dtype can't be quantised, or the backend can't run.
    """
    weight, size = inputs.weight, inputs.weight.element_size()
    into = torch.empty_like(weight)
    variants = {COPY: Variant(lambda _: into.copy_(weight))}
    moved = {COPY: 2 * weight.numel() * size}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for dtype in get_args(EightBitDtype):
        if dtype == "auto":
            continue
        screen = Screen(dtype=dtype)
        try:
            kept = quantize_weight(weight, inputs.hidden, screen=screen, backend=backend)
        except ValueError:
            raise
        # A device may have no e4m3 kernel, for example.
        except Exception as error:
            failed[dtype] = describe_failure(error)
            continue
        errors[dtype] = rounding_error(kept, weight)
        for name, hidden in ((dtype, None), (f"{dtype}, with hidden", inputs.hidden)):
            variants[name] = Variant(functools.partial(_refresh, kept, weight, hidden))
            moved[name] = weight.numel() * size + kept.num_bytes
    times = interleaved_times(
        variants,
        dict.fromkeys(variants, repeats),
        Timer(weight.device),
        lambda name, error: failed.update({name: describe_failure(error)}),
    )
    times |= {name: [] for name in failed}
    return _rows(times, moved, errors, failed)


def _refresh(kept: QuantizedWeight, weight: Tensor, hidden: Tensor | None, _: None) -> None:
    kept.refresh(weight, hidden)


def _rows(
    times: Mapping[str, list[float]],
    moved: Mapping[str, int],
    errors: Mapping[str, float],
    failed: Mapping[str, str],
) -> list[Cells]:
    medians = {name: percentiles_ms(taken)["median_ms"] for name, taken in times.items() if taken}
    rates = {name: moved[name] / 1e6 / median for name, median in medians.items()}
    return [
        {
            "method": name,
            "repeats": len(taken),
            "median_ms": None,
            **(percentiles_ms(taken) if taken else {}),
            "gb_per_s": rates.get(name),
            "of_copy": rates[name] / rates[COPY] if {name, COPY} <= rates.keys() else None,
            "error": errors.get(name),
            "failed": failed.get(name, ""),
        }
        for name, taken in times.items()
    ]


def rounding_error(kept: QuantizedWeight, weight: Tensor) -> float:
    """Returns the relative rounding error (Frobenius) of the weight less its mean row."""
    rows = kept.rows
    off = total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start in range(0, weight.shape[0], ROWS):
        chunk = slice(start, start + ROWS)
        x = (weight[chunk].double() - rows.centre) * rows.channel
        rounded = rows.values[chunk, : weight.shape[1]].double() * rows.of_rows[0, chunk, None]
        off = off + (rounded - x).square().sum()
        total = total + x.square().sum()
    return float((off / total).sqrt())
