"""Options of a screened call, and checks of its outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist import Filter, Screen
from cce_dist.testing import Case, Place, check_promise, dense_outputs, golden_outputs

# Half the dense mass of a token's d_logits is kept by none: what is dropped is what is screened.
KEEP = Filter(keep=0.05)
# A small vocabulary keeps many of its columns.
WIDE = Screen(max_kept=1.0)
SCREENED = {
    "logits": "screened",
    "filter": KEEP,
    "screen": WIDE,
    "stats": ("lse", "screened", "tail_mass"),
}
Bounds = tuple[tuple[int, int], ...]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dtype_of(place: Place) -> torch.dtype:
    return torch.float16 if place.interprets else torch.bfloat16


def check_screened(case: Case, outputs: dict[str, Tensor], *, screened: bool = True) -> None:
    """The promise of 16 bits for the loss and lse, which `check_outputs` holds to fp32's."""
    golden, dense = golden_outputs(case), dense_outputs(case)
    check_promise("lse", outputs["lse"], golden["lse"], dense["lse"], torch.float32)
    if golden["loss"].ndim:
        check_promise("loss", outputs["loss"], golden["loss"], dense["loss"], torch.float32)
    else:
        # Dense's own error, a single number, may be 0 by luck: that of a token, then.
        of_a_token = float((dense["token_loss"].double() - golden["token_loss"]).abs().max())
        assert abs(float(outputs["loss"].double() - golden["loss"])) <= of_a_token
    counts = outputs["lse"] != 0
    assert bool((outputs["screened"][counts] == screened).all())


def error_of(outputs: dict[str, Tensor], golden: dict[str, Tensor], name: str = "lse") -> float:
    difference = outputs[name].double() - golden[name]
    return float(difference.square().mean().sqrt())


EIGHT_BITS = ("int8", "e4m3")
