"""Names of the methods, their looks in every figure, and the list of ours."""

from __future__ import annotations

from typing import NamedTuple


class Look(NamedTuple):
    colour: str
    dashed: bool = False
    marker: str = "circle"


OURS = ("exact", "in_forward", "filtered", "screened")
# Our methods with a part switched off, to see what the part is for: neither a win nor a loss.
ABLATIONS = ("no-tail",)

_LOOKS = {
    "dense": Look("ink", marker="square"),
    "exact": Look("blue", marker="diamond"),
    "in_forward": Look("green", marker="triangle"),
    "filtered": Look("red"),
    "no-tail": Look("purple", dashed=True),
    "screened": Look("pink", marker="diamond"),
    "tile-filter": Look("amber"),
    "tile-filter-hidden": Look("purple", marker="triangle"),
    "tile-filter-weight": Look("olive", marker="diamond"),
    "cce": Look("amber", dashed=True, marker="triangle"),
    "cce-kahan-full-c": Look("olive", dashed=True, marker="square"),
}
_OTHER = Look("grey", dashed=True)


def look_of(method: str) -> Look:
    return _LOOKS.get(method, _OTHER)


def title_of(method: str) -> str:
    """Returns a method's name for a reader; a peer's name says whose it is."""
    return {
        "no-tail": "filtered without tail",
        "screened": "filtered, screened logits",
        "tile-filter": "tiles dropped from both gradients",
        "tile-filter-hidden": "tiles dropped from hidden's alone",
        "tile-filter-weight": "tiles dropped from the weight's alone",
        "cce": "Apple cce",
        "cce-kahan-full-c": "Apple cce_kahan_full_c",
    }.get(method, method)
