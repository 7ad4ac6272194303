"""The weight in 8 bits: time and rate beside a bare copy's, and what rounding left."""

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
# Rows that are widened to float64 at a time.
ROWS = 4096


def bench_quantize(
    inputs: BenchInputs, *, repeats: int = 10, backend: Backend = "triton"
) -> list[Cells]:
    """A row for a copy of the weight in its own dtype and for each 8-bit dtype, for which the
    weight is read and written anew; with hidden, its moments and their part in it as well.

    `gb_per_s` counts the weight once and what is written once, `of_copy` is that over the copy's.
    `error` is the rounding's, relative, in the Frobenius norm, of the weight less its mean row.

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
        # As e4m3's kernel on a device that has none.
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
    """Relative, in the Frobenius norm, of the weight less the mean row that is subtracted."""
    rows = kept.rows
    off = total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start in range(0, weight.shape[0], ROWS):
        part = slice(start, start + ROWS)
        x = (weight[part].double() - rows.centre) * rows.channel
        found = rows.values[part, : weight.shape[1]].double() * rows.of_rows[0, part, None]
        off = off + (found - x).square().sum()
        total = total + x.square().sum()
    return float((off / total).sqrt())
