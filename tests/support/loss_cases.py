"""Cases of the loss on one rank, which several files of tests share."""

from __future__ import annotations

from typing import Any

import torch

from cce_dist.testing import TORCH_CPU, Case, Place, gaussian_inputs

MODES = ("filtered", "exact", "in_forward")
NARROW = ("fp32", "bf16", "fp16")
# The smallest that is accepted: a few thousand columns already take several chunks.
SMALL_WORKSPACE = 2**16
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2")

# Each option alone: tensors, ignored id or None, options.
EACH_OPTION: dict[str, tuple[tuple[str, ...], int | None, dict[str, Any]]] = {
    "plain": ((), None, {}),
    "bias": (("bias",), None, {}),
    "softcap": ((), None, {"softcap": 1.5}),
    "logit_scale": ((), None, {"logit_scale": -1.7}),
    "label_smoothing": ((), None, {"label_smoothing": 0.2}),
    "z_loss": ((), None, {"z_loss": 0.1}),
    "token_weight": (("token_weight",), None, {}),
    "class_weight": (("class_weight",), None, {}),
    "class_weight_smoothing": (("class_weight",), -100, {"label_smoothing": 0.2}),
    "ignored": ((), -100, {}),
    "ignore_index_in_vocabulary": ((), 0, {"ignore_index": 0}),
    "shift": (("token_weight",), -100, {"shift": 2}),
    "sum": ((), -100, {"reduction": "sum"}),
    "none": ((), -100, {"reduction": "none"}),
    "stats": ((), -100, {"stats": EVERY_STAT}),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(place: Place, num_classes: int) -> int:
    """Fewer columns to interpret: Triton's tiles have 128 or 256, torch's 2048."""
    return max(num_classes // 8, min(num_classes, 301)) if place.interprets else num_classes


def make_case(
    dtype: torch.dtype = torch.float32,
    *,
    place: Place = TORCH_CPU,
    tokens: Any = 129,  # one block of 128 tokens and one of a single one
    num_classes: int | None = None,  # None: whole tiles and a ragged one
    dim: int = 37,  # no multiple of 8
    tensors: tuple[str, ...] = (),
    ignore: int | None = None,
    maker: Any = gaussian_inputs,
    **more: Any,
) -> Case:
    if num_classes is None:
        # torch: 2048 and 452 columns; Triton's tiles have 128 or 256, of which fewer will do.
        num_classes = 300 if place.interprets else 2500
    inputs = maker(tokens, num_classes, dim, generator=generator(), dtype=dtype)
    inputs = inputs.with_options(generator(), *tensors)
    if ignore is not None:
        inputs = inputs.ignoring(generator(), 0.3, ignore)
    return Case(inputs, **more).at(place)


def on_cpu(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: output.cpu() for name, output in outputs.items()}


def leaves_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden and weight on the case's device, as leaves of their own."""
    hidden, weight = (
        tensor.to(case.device, copy=True).requires_grad_()
        for tensor in (case.inputs.hidden, case.inputs.weight)
    )
    return hidden, weight


def targets_of(case: Case) -> torch.Tensor:
    return case.inputs.targets.to(case.device)
