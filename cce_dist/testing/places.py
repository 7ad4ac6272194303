"""Places where a test computes: every backend on every device, and grids of tests over them.

tests/conftest.py marks each test by its argument `place`: "gpu", or "interpreter".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cce_dist.testing.inputs import each_choice, pairwise

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Place:
    """A backend on a device, and the names of the dtypes that it takes there."""

    backend: str
    device: str
    dtypes: tuple[str, ...]

    @property
    def interprets(self) -> bool:
        """Tells whether Triton interprets kernels: thousands of times slower than compiled."""
        return self.backend == "triton" and self.device == "cpu"

    @property
    def compiles(self) -> bool:
        """Tells whether Triton compiles kernels, which takes longer than any test."""
        return self.backend == "triton" and self.device == "cuda"

    @property
    def options(self) -> dict[str, Any]:
        """Returns the keyword argument of `linear_cross_entropy` that chooses the backend."""
        return {"backend": self.backend}

    @property
    def widest(self) -> torch.dtype:
        return torch.float64 if "float64" in self.dtypes else torch.float32

    def __str__(self) -> str:
        return f"{self.backend}_{self.device}"


TORCH_CPU = Place("torch", "cpu", tuple(DTYPES))
# The interpreter's product of bf16 matrices is wrong.
TRITON_CPU = Place("triton", "cpu", ("fp32", "fp16"))
TORCH_CUDA = Place("torch", "cuda", tuple(DTYPES))
TRITON_CUDA = Place("triton", "cuda", ("fp32", "bf16", "fp16"))
PLACES = (TORCH_CPU, TRITON_CPU, TORCH_CUDA, TRITON_CUDA)
CPU_PLACES = (TORCH_CPU, TRITON_CPU)
TRITON_PLACES = (TRITON_CPU, TRITON_CUDA)

Factor = Mapping[str, Any] | Sequence[Any]


def grid(
    *,
    places: Sequence[Place] = PLACES,
    allowed: Callable[[dict[str, Any]], bool] = lambda row: True,
    **factors: Factor,
) -> dict[str, Any]:
    """Returns keywords of `pytest.mark.parametrize` for the argument `place` and the factors.

    Torch runs the full product of the factors. Triton is slow to interpret and slower to compile,
    so it runs a covering set: in the interpreter each pair of values occurs in at least one test,
    on a GPU each value.

    Args:
        allowed: returns True for the rows {factor: name} to keep.
        factors: values, whose str() are the ids, or a mapping from ids to values. For the factor
            "dtype" the ids are names in DTYPES, and a place runs only the dtypes that it takes.
    """
    named = {
        name: dict(values) if isinstance(values, Mapping) else {str(x): x for x in values}
        for name, values in factors.items()
    }
    argvalues, ids = [], []
    for place in places:
        of_place = {
            name: [key for key in values if name != "dtype" or key in place.dtypes]
            for name, values in named.items()
        }
        if place.compiles and of_place:
            rows = each_choice(of_place, allowed)
        elif place.interprets and len(of_place) > 2:
            rows = pairwise(of_place, allowed)
        else:
            product = itertools.product(*of_place.values())
            rows = [
                row for keys in product if allowed(row := dict(zip(of_place, keys, strict=True)))
            ]
        for row in rows:
            argvalues.append((place, *(named[name][key] for name, key in row.items())))
            ids.append("-".join([str(place), *row.values()]))
    return {"argnames": ("place", *factors), "argvalues": argvalues, "ids": ids}
