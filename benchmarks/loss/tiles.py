"""Benchmark of the Triton kernels' tiles: each candidate's errors, then its time."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from cce_dist import LinearCrossEntropy
from cce_dist.backends.triton.launch.tiles import TABLE, KernelTiles, key_of, tiles_for, why_not
from cce_dist.bench.golden import LossFunction, dense_loss, errors, golden_gradients, gradients
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import WORST_ERROR_RATIO
from cce_dist.bench.machine import Part, Timer, Variant, interleaved_times, variant_of
from cce_dist.bench.methods import describe_failure
from cce_dist.bench.report import Cells

# Candidates by element size: fields of `KernelTiles` that replace the table's. If a device
# has no room for a candidate, its row says so.
FORWARD: dict[int, Sequence[Mapping[str, int]]] = {
    2: (
        {"columns": 256, "dims": 64, "stages": 4},
        {"columns": 256, "dims": 64, "stages": 3},
        {"columns": 256, "dims": 128, "stages": 2},
        {"columns": 128, "dims": 64, "stages": 4},
        {"columns": 128, "dims": 32, "stages": 3},
    ),
    4: (
        {"columns": 128, "dims": 32, "stages": 3},
        {"columns": 128, "dims": 32, "stages": 2},
        {"columns": 128, "dims": 16, "stages": 3},
    ),
}
_SMALL = {"pair": 1, "slice_dims": 128}
_LARGE = {"pair": 2, "slice_dims": 256, "backward_warps": 8, "residents": 1}
FILTERED: dict[int, Sequence[Mapping[str, int]]] = {
    2: (
        {**_SMALL, "backward_dims": 64, "backward_stages": 3, "backward_warps": 4, "residents": 2},
        {**_SMALL, "backward_dims": 64, "backward_stages": 2, "backward_warps": 4, "residents": 2},
        {**_SMALL, "backward_dims": 32, "backward_stages": 4, "backward_warps": 4, "residents": 2},
        {**_SMALL, "backward_dims": 64, "backward_stages": 4, "backward_warps": 8, "residents": 1},
        {**_LARGE, "backward_dims": 64, "backward_stages": 3},
        {**_LARGE, "backward_dims": 64, "backward_stages": 4},
    ),
    4: (
        {**_SMALL, "backward_dims": 32, "backward_stages": 2, "backward_warps": 8, "residents": 1},
        {**_SMALL, "backward_dims": 32, "backward_stages": 3, "backward_warps": 8, "residents": 1},
        {**_SMALL, "backward_dims": 16, "backward_stages": 3, "backward_warps": 8, "residents": 1},
    ),
}
# Method and part by which tiles are chosen: the loss and `exact` for the forward's tiles, and the
# filtered gradient for the backward's.
TIMED: dict[str, tuple[str, Part]] = {
    "loss": ("filtered", "loss"),
    "exact": ("exact", "gradient"),
    "filtered": ("filtered", "gradient"),
}


def bench_tiles(inputs: BenchInputs, *, repeats: int = 10) -> list[Cells]:
    """Returns a row for each candidate and timed part; "table" marks the tiles that TABLE holds.

    Raises:
        ValueError: the Triton kernels do not run on these inputs.
    """
    reason = why_not(inputs.hidden)
    if reason is not None:
        raise ValueError(f"the Triton kernels do not run here: {reason}")
    current, size = tiles_for(inputs.weight), inputs.weight.element_size()
    golden = golden_gradients(inputs)
    dense = errors(gradients(dense_loss, inputs), golden)
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    variants: dict[tuple[str, int], Variant] = {}
    for name, (mode, part) in TIMED.items():
        for index, fields in enumerate((FILTERED if name == "filtered" else FORWARD)[size]):
            tiles = dataclasses.replace(current, **fields)
            function = LinearCrossEntropy(gradient=mode, backend="triton")  # pyright: ignore[reportArgumentType]
            text = ", ".join(f"{key} {value}" for key, value in fields.items())
            row: dict[str, Any] = {
                "method": f"{name}: {text}",
                "in table": "table" if tiles == current else "",
                "median_ms": None,
                "failed": "",
            }
            rows[name, index] = row
            try:
                with tiles_of(inputs.weight, tiles):
                    ours = errors(gradients(function, inputs), golden)
                _require_near(ours, dense)
            except Exception as error:
                row["failed"] = describe_failure(error)
                continue
            variants[name, index] = _with_tiles(tiles, function, inputs, part)

    def fail(key: tuple[str, int], error: Exception) -> None:
        rows[key]["failed"] = describe_failure(error)

    times = interleaved_times(
        variants, dict.fromkeys(variants, repeats), Timer(inputs.hidden.device), fail
    )
    for key, taken in times.items():
        if taken:
            rows[key]["median_ms"] = 1e3 * statistics.median(taken)
    return list(rows.values())


@contextmanager
def tiles_of(tensor: Tensor, tiles: KernelTiles) -> Iterator[None]:
    """Puts `tiles` into TABLE for the tensor's device and dtype, until the context ends."""
    key = key_of(tensor)
    before = TABLE[key]
    TABLE[key] = tiles
    try:
        yield
    finally:
        TABLE[key] = before


def _with_tiles(
    tiles: KernelTiles, function: LossFunction, inputs: BenchInputs, part: Part
) -> Variant:
    """Returns a variant whose timed part uses `tiles`; a forward before it uses the table's."""
    variant = variant_of(function, inputs, part)

    def run(prepared: Any) -> object:
        with tiles_of(inputs.weight, tiles):
            return variant.run(prepared)

    timed: Callable[[Any], object] = run
    return dataclasses.replace(variant, run=timed)


def _require_near(ours: Mapping[str, float], dense: Mapping[str, float]) -> None:
    for key in ("grad_hidden_error", "grad_weight_error"):
        # Dense fp32 gradients may by luck be exact to one more digit: allow for 1e-6.
        if not ours[key] <= WORST_ERROR_RATIO * dense[key] + 1e-6:
            raise RuntimeError(f"{key} is {ours[key]:.2e}, that of dense {dense[key]:.2e}")
