"""Tokens grouped by their frequency, and errors of gradients by group: a filter hurts rare ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cce_dist.bench.golden import Gradients
from cce_dist.bench.inputs import BenchInputs
from cce_dist.train.evaluate.scores import NUM_GROUPS, frequency_groups

ALL = "all"
# Tenth of the ids that the text does not have; it comes after the rarest.
UNSEEN = NUM_GROUPS + 1
NUM_ID_GROUPS = 10
# Numbers in a float64 temporary: 128 MiB.
CHUNK_ELEMENTS = 2**24


def tenths_of(counts: np.ndarray) -> np.ndarray:
    """Returns the tenth of each id, [V] int64: 1 has the most frequent ids, 10 the rarest.

    An id that the text does not have gets UNSEEN. Each tenth has about a tenth of the text, as in
    `cce-dist eval`: tenths of the ids would put nearly all of a text into the first tenth.

    Args:
        counts: [V], how often the text has each id.
    """
    tenths = frequency_groups(counts) + 1
    tenths[counts == 0] = UNSEEN
    return tenths


def name_of(tenth: int) -> str:
    """Returns a tenth's name, which is the `group` of a row: "1" to "10", or "never"."""
    return "never" if tenth == UNSEEN else str(tenth)


@dataclass(frozen=True)
class Group:
    """Some rows of the gradients.

    Args:
        name: "all"; a tenth of the training text, from "1" (its most frequent ids) to "10" (its
            rarest); "never", the ids that the text does not have; or a tenth of the ids, from
            "ids 1" (the most frequent) to "ids 10".
        ids: [V] bool, the rows of the weight's gradient.
        tokens: [N] bool, the rows of hidden's gradient: tokens whose target is among the ids.
        times: number of times that the training text has the rarest and the most frequent id.
    """

    name: str
    ids: Tensor
    tokens: Tensor
    times: tuple[int, int] | None = None  # None for group "all"


def groups_of(inputs: BenchInputs, tenths: bool) -> list[Group]:
    """Returns the group of all rows; with `tenths` also tenths of the training text and of the ids.

    Tenths of the text are those of `cce-dist eval`: ids are sorted by count, and each group has a
    tenth of the text, so that all groups weigh about the same in the loss. Tenths of the ids weigh
    each row of the weight the same, as an optimizer does that divides a row's update by the row's
    own size; most ids are rare. Counts are taken from the training text, since they say how often a
    row of the weight was trained; few ids of the captured tokens come twice.

    Args:
        inputs: inputs without ignored tokens.
    Raises:
        ValueError: the inputs have no counts, or not one for each id.
    """
    vocab_size, device = len(inputs.weight), inputs.weight.device
    every = torch.ones(vocab_size, dtype=torch.bool, device=device)
    groups = [Group(ALL, every, every[inputs.targets])]
    if not tenths:
        return groups
    if inputs.token_counts is None:
        raise ValueError(
            f"inputs {inputs.kind} must have token_counts for the tenths by frequency, found none: "
            "capture them again with this version of `cce-dist bench capture`, or pass --no-tenths"
        )
    if inputs.token_counts.shape != (vocab_size,):
        raise ValueError(
            f"token_counts of inputs {inputs.kind} must have shape [V] with V={vocab_size} (from "
            f"weight), got {list(inputs.token_counts.shape)}"
        )
    counts = inputs.token_counts.cpu()
    numbers = torch.from_numpy(tenths_of(counts.numpy()))
    chosen = {name_of(number): numbers == number for number in range(1, UNSEEN + 1)}
    ranked = torch.sort(counts, descending=True, stable=True).indices
    for number, some in enumerate(ranked.tensor_split(NUM_ID_GROUPS), 1):
        chosen[f"ids {number}"] = torch.isin(torch.arange(vocab_size), some)
    for name, ids in chosen.items():
        if ids.any():
            times = int(counts[ids].min()), int(counts[ids].max())
            groups.append(Group(name, ids.to(device), ids.to(device)[inputs.targets], times))
    return groups


def products_by_row(ours: Tensor, golden: Tensor) -> Tensor:
    """Returns ours . golden, |ours|^2, |golden|^2 and |ours - golden|^2 of each row.

    Returns:
        [rows, 4] float64.
    """
    parts = []
    step = max(1, CHUNK_ELEMENTS // max(golden.shape[-1], 1))
    for chunk, golden_rows in zip(ours.split(step), golden.double().split(step), strict=True):
        rows = chunk.double()
        terms = (
            rows * golden_rows,
            rows.square(),
            golden_rows.square(),
            (rows - golden_rows).square_(),
        )
        parts.append(torch.stack([term.sum(-1) for term in terms], -1))
    return torch.cat(parts)


def compare(sums: Tensor) -> dict[str, float | None]:
    """Computes how far some rows are from the golden rows.

    Args:
        sums: [4], the sum of these rows of `products_by_row`.
    Returns:
        error: norm of the difference over the norm of the golden rows.
        cosine_distance: 1 - cosine of the angle between the two; None if one of them is 0.
        norm_ratio: norm of our rows over the norm of the golden rows.
        All three are None if the golden rows are 0.
    """
    dot, ours, right, difference = sums.tolist()
    if right == 0:
        return dict.fromkeys(("error", "cosine_distance", "norm_ratio"))
    distance = max(0.0, 1 - dot / (ours * right) ** 0.5) if ours else None
    return {
        "error": (difference / right) ** 0.5,
        "cosine_distance": distance,
        "norm_ratio": (ours / right) ** 0.5,
    }


def update_error(products: Tensor) -> float | None:
    """Computes the root mean square of each row's error relative to the row's own norm.

    Adam's update weighs errors about like this. Golden rows that are 0 are left out; None: all are.

    Args:
        products: [rows, 4], as `products_by_row` returns it.
    """
    right = products[:, 2]
    errors = products[right > 0, 3] / right[right > 0]
    return float(errors.mean().sqrt()) if len(errors) else None


def compare_groups(
    ours: Gradients, golden: Gradients, groups: list[Group]
) -> dict[str, dict[str, float | None]]:
    """Returns `compare` of both gradients and the weight's `update_error`, for each group's name.

    The keys of a group are grad_hidden_error and so on.
    """
    hidden = products_by_row(ours.hidden, golden.hidden)
    weight = products_by_row(ours.weight, golden.weight)
    compared = {}
    for group in groups:
        parts = {"grad_hidden": hidden[group.tokens], "grad_weight": weight[group.ids]}
        compared[group.name] = {
            f"{name}_{key}": value
            for name, rows in parts.items()
            for key, value in compare(rows.sum(0)).items()
        }
        compared[group.name]["grad_weight_update_error"] = update_error(parts["grad_weight"])
    return compared
