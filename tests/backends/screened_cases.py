"""Options of a screened call, and checks of its outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cce_dist import Filter, Screen
from cce_dist.testing import Case, Inputs, Place, check_promise, dense_outputs, golden_outputs

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
EVERY_STAT = ("lse", "screened", "tail_mass", "entropy", "sum_p2", "correct", "logit_moments")
_MOMENTS = ("mean_logit", "variance_logit")
WITH_STATS = {**SCREENED, "stats": EVERY_STAT}
EIGHT_BITS = ("int8", "e4m3")
Bounds = tuple[tuple[int, int], ...]


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


def with_hits(inputs: Inputs, case_options: dict[str, Any] | None = None) -> Inputs:
    """Makes every second target the token's most probable id."""
    options = case_options or {}
    z = inputs.hidden.double() @ inputs.weight.double().T
    if inputs.bias is not None:
        z += inputs.bias
    top = (z * (-1 if options.get("logit_scale", 1) < 0 else 1)).argmax(1)
    every_second = (torch.arange(len(top)) % 2 == 0) & (inputs.targets >= 0)
    return replace(inputs, targets=torch.where(every_second, top, inputs.targets))


def check_stats(case: Case, outputs: dict[str, Tensor], *, screened: bool = True) -> None:
    """Entropy and sum_p2 as the promise of 16 bits has them; e4m3's may err twice as much. All
    columns weigh alike in the moments, whose 8 bits show. `correct` is exact."""
    check_screened(case, outputs, screened=screened)
    golden, dense = golden_outputs(case), dense_outputs(case)
    twice = 2 if case.options["screen"].dtype == "e4m3" else 1
    for name in ("entropy", "sum_p2"):
        theirs = golden[name] + twice * (dense[name] - golden[name])
        check_promise(name, outputs[name], golden[name], theirs, torch.float32)
    off = {name: (outputs[name] - golden[name]).abs().max() for name in _MOMENTS if name in golden}
    assert float(off["mean_logit"]) <= 3e-3
    assert float(off["variance_logit"]) <= twice * 4e-3 * float(golden["variance_logit"].max())
    assert outputs["correct"].equal(golden["correct"].to(outputs["correct"].dtype))
    assert outputs["correct"].any()
