"""Parametrizations of tests on a CPU that need not be the full product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cce_dist.testing import CPU_PLACES, PLACES, TORCH_CPU, Place, each_choice, grid, pairwise

GPU_PLACES = tuple(place for place in PLACES if place not in CPU_PLACES)


def joined(*grids: dict[str, Any]) -> dict[str, Any]:
    """Returns one grid of all these, which have the same arguments."""
    rows = {name: [row for each in grids for row in each[name]] for name in ("argvalues", "ids")}
    return {"argnames": grids[0]["argnames"], **rows}


def paired_grid(
    *,
    places: Sequence[Place] = PLACES,
    allowed: Callable[[dict[str, Any]], bool] = lambda row: True,
    **factors: Any,
) -> dict[str, Any]:
    """Returns what `grid` does, but torch on a CPU has each pair of values in place of the product:
    as Triton's interpreter has. The arguments are grid's."""
    whole = grid(places=(TORCH_CPU,), allowed=allowed, **factors)
    names = {name: [str(value) for value in values] for name, values in factors.items()}
    chosen = {"-".join([str(TORCH_CPU), *row.values()]) for row in pairwise(names, allowed)}
    kept = [n for n, name in enumerate(whole["ids"]) if name in chosen]
    torch_grid = {
        "argnames": whole["argnames"],
        "argvalues": [whole["argvalues"][n] for n in kept],
        "ids": [whole["ids"][n] for n in kept],
    }
    others = [place for place in places if place != TORCH_CPU]
    grids = [torch_grid] if TORCH_CPU in places else []
    return joined(*grids, grid(places=others, allowed=allowed, **factors))


def value_grid(
    *,
    places: Sequence[Place] = PLACES,
    allowed: Callable[[dict[str, Any]], bool] = lambda row: True,
    **factors: Any,
) -> dict[str, Any]:
    """Returns what `paired_grid` does, but Triton's interpreter has each value and not each pair:
    for factors that no kernel reads together. The arguments are grid's."""
    grids = [
        paired_grid(places=[x for x in places if not x.interprets], allowed=allowed, **factors)
    ]
    for place in places:
        if place.interprets:
            names = {name: [str(value) for value in values] for name, values in factors.items()}
            if "dtype" in names:
                names["dtype"] = [name for name in names["dtype"] if name in place.dtypes]
            chosen = each_choice(names, allowed)
            grids.append(grid(places=(place,), allowed=chosen.__contains__, **factors))
    return joined(*grids)
