"""Screened logits: how far each token's log-sum-exp is from float64, and on which side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cce_dist import Filter, Screen, linear_cross_entropy
from cce_dist.options import TOKEN_BLOCK, Backend

from .candidates import default_keep
from .filter import shares_kept
from .golden import CHUNK_ELEMENTS
from .inputs import BenchInputs
from .kept import bits_set, marks_seen
from .table import Cells

DECILES = 10
# nats [N] float64 by inputs, and whether logits were screened (None: not asked).
Losses = Callable[[BenchInputs], tuple[Tensor, bool | None]]


def bench_screen(
    inputs: BenchInputs,
    *,
    keep: float | None,
    max_kept: float,
    max_error: float,
    backend: Backend = "triton",
) -> list[Cells]:
    """A row for logits rounded to 16 bits, for ours in full, and for each 8-bit dtype.

    `kept` is the share of the pairs of a column and a block of 128 tokens; of kernels what they
    keep, else those whose true mass reaches the threshold.

    Args:
        keep: the filter's threshold; None: the default.
        max_kept, max_error: of `Screen`.
    """
    valid = inputs.without_ignored()
    golden, entropy = golden_lse(valid)
    order = entropy.argsort()
    rows = []
    filter_ = Filter() if keep is None else Filter(keep=keep)
    methods: dict[str, Losses] = {
        f"dense {name}": functools.partial(dense_lse, dtype=dtype)
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16))
        if torch.finfo(dtype).eps >= torch.finfo(inputs.hidden.dtype).eps
    }
    methods |= {
        "full": _ours(filter_, backend=backend),
    }
    for dtype in ("int8", "e4m3"):
        screen = Screen(dtype=dtype, max_kept=max_kept, max_error=max_error)
        methods[dtype] = _ours(filter_, backend=backend, logits="screened", screen=screen)
    threshold = default_keep(valid, backend) if keep is None else keep
    (true_share,) = shares_kept(valid, [threshold])
    for name, run in methods.items():
        with marks_seen() as seen:
            lse, screened = run(valid)
        error = lse - golden
        kept = None if screened is None else true_share
        if seen:
            blocks = -(-len(valid.targets) // TOKEN_BLOCK)
            kept = bits_set(seen[-1].kept) / (blocks * len(valid.weight))
        row = {
            "logits": name,
            "screened": {None: "", True: "yes", False: "no"}[screened],
            "kept": "" if kept is None else f"{100 * kept:.2f} %",
            "lse rms": float(error.square().mean().sqrt()),
            "lse mean": float(error.mean()),
            "lse max": float(error.abs().max()),
        }
        for index, part in enumerate(error[order].tensor_split(DECILES), 1):
            row[f"mean, decile {index}"] = float(part.mean())
        rows.append(row)
    return rows


def _ours(filter_: Filter, **options: Any) -> Losses:
    def run(inputs: BenchInputs) -> tuple[Tensor, bool]:
        # As for a backward: the columns that matter are found by what it would keep.
        found: Any = linear_cross_entropy(
            inputs.hidden.detach().requires_grad_(),
            inputs.weight,
            inputs.targets,
            filter=filter_,
            stats=("lse", "screened"),
            **options,
        )
        return found.lse.detach().double(), bool(found.screened.all())

    return run


@torch.no_grad()
def dense_lse(inputs: BenchInputs, *, dtype: torch.dtype) -> tuple[Tensor, None]:
    """Of logits rounded to that dtype, as dense training has them."""
    weight, parts = inputs.weight.float(), []
    for hidden in inputs.hidden.split(_chunk(inputs)):
        parts.append((hidden.float() @ weight.T).to(dtype).double().logsumexp(1))
    return torch.cat(parts), None


@torch.no_grad()
def golden_lse(inputs: BenchInputs) -> tuple[Tensor, Tensor]:
    """lse and entropy in float64, [N] each, nats."""
    weight = inputs.weight.double()
    lse, entropy = [], []
    for hidden in inputs.hidden.split(_chunk(inputs)):
        log_p = hidden.double() @ weight.T
        lse.append(log_p.logsumexp(1))
        log_p -= lse[-1][:, None]
        entropy.append(-(log_p.exp() * log_p).sum(1))
    return torch.cat(lse), torch.cat(entropy)


def _chunk(inputs: BenchInputs) -> int:
    return max(64, min(2048, CHUNK_ELEMENTS // len(inputs.weight)))
