"""Names of the methods, their looks in every figure, and the list of ours."""

from __future__ import annotations

from typing import NamedTuple

from cce_dist.bench.methods import METHODS


class Look(NamedTuple):
    colour: str
    dashed: bool = False
    marker: str = "o"


OURS = [method.name for method in METHODS.values() if method.is_ours]

_LOOKS = {
    "dense": Look("#808080", marker="s"),
    "exact": Look("#3a86c8", marker="D"),
    "in_forward": Look("#2a9d6f", marker="^"),
    "filtered": Look("#d9542b"),
    "no-tail": Look("#9b5fd0", dashed=True),
    "screened": Look("#d0559b", marker="D"),
    "tile-filter": Look("#b58a1a"),
    "tile-filter-hidden": Look("#9b5fd0", marker="^"),
    "tile-filter-weight": Look("#8a9a2a", marker="D"),
    "cce": Look("#b58a1a", dashed=True, marker="^"),
    "cce-kahan-full-c": Look("#8a9a2a", dashed=True, marker="s"),
}
_OTHER = Look("#9a9a9a", dashed=True)


def look_of(method: str) -> Look:
    return _LOOKS.get(method, _OTHER)


def title_of(method: str) -> str:
    """Returns a method's name for a reader; a peer's name says whose it is."""
    return {
        "no-tail": "filtered without tail",
        "screened": "screened logits",
        "tile-filter": "tiles dropped from both gradients",
        "tile-filter-hidden": "tiles dropped from hidden's alone",
        "tile-filter-weight": "tiles dropped from the weight's alone",
        "cce": "Apple cce",
        "cce-kahan-full-c": "Apple cce_kahan_full_c",
    }.get(method, method)
