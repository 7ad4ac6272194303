"""Errors of screened logits: each token's log-sum-exp and loss against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.loss.filter import default_keep, shares_kept
from cce_dist import Filter, Screen, linear_cross_entropy
from cce_dist.bench.golden import CHUNK_ELEMENTS
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.rank_methods import bits_set, marks_seen
from cce_dist.bench.report import Cells
from cce_dist.options import TOKEN_BLOCK, Backend

DECILES = 10


class Losses(NamedTuple):
    """Log-sum-exp and loss of each token, [N] float64, in nats."""

    lse: Tensor
    nll: Tensor
    screened: bool | None = None  # None: not asked


Method = Callable[[BenchInputs], Losses]


def bench_screen(
    inputs: BenchInputs,
    *,
    keep: float | None,
    max_kept: float,
    max_error: float,
    backend: Backend = "triton",
) -> list[Cells]:
    """Returns a row for logits rounded to 16 bits, for our full logits, and for each 8-bit dtype.

    `kept` is a share of the pairs of a column and a block of 128 tokens: the pairs that a kernel
    keeps, or without kernels the pairs whose true mass reaches the threshold.

    Args:
        keep: the filter's threshold; None: the default.
        max_kept, max_error: fields of `Screen`.
    """
    valid = inputs.without_ignored()
    golden, entropy = golden_losses(valid)
    order = entropy.argsort()
    rows = []
    filter_ = Filter() if keep is None else Filter(keep=keep)
    methods: dict[str, Method] = {
        f"dense {name}": functools.partial(dense_losses, dtype=dtype)
        for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16))
        if torch.finfo(dtype).eps >= torch.finfo(inputs.hidden.dtype).eps
    }
    methods |= {
        "full": _ours(filter_, None, backend),
    }
    for dtype in ("int8", "e4m3"):
        screen = Screen(dtype=dtype, max_kept=max_kept, max_error=max_error)
        methods[dtype] = _ours(filter_, screen, backend)
    threshold = default_keep(valid, backend) if keep is None else keep
    (true_share,) = shares_kept(valid, [threshold])
    for name, run in methods.items():
        with marks_seen() as seen:
            losses = run(valid)
        error = losses.lse - golden.lse
        kept = None if losses.screened is None else true_share
        if seen:
            blocks = -(-len(valid.targets) // TOKEN_BLOCK)
            kept = bits_set(seen[-1].kept) / (blocks * len(valid.weight))
        row = {
            "logits": name,
            "screened": {None: "", True: "yes", False: "no"}[losses.screened],
            "kept": "" if kept is None else f"{100 * kept:.2f} %",
            "lse rms": float(error.square().mean().sqrt()),
            "lse mean": float(error.mean()),
            "lse max": float(error.abs().max()),
            "loss rms": float((losses.nll - golden.nll).square().mean().sqrt()),
        }
        for index, decile in enumerate(error[order].tensor_split(DECILES), 1):
            row[f"mean, decile {index}"] = float(decile.mean())
        rows.append(row)
    return rows


def _ours(filter_: Filter, screen: Screen | None, backend: Backend) -> Method:
    def run(inputs: BenchInputs) -> Losses:
        # hidden requires grad: the forward marks the columns that a backward would keep.
        output: Any = linear_cross_entropy(
            inputs.hidden.detach().requires_grad_(),
            inputs.weight,
            inputs.targets,
            filter=filter_,
            reduction="none",
            stats=("lse", "screened"),
            logits="full" if screen is None else "screened",
            screen=screen or Screen(),
            backend=backend,
        )
        lse, nll = (x.detach().double() for x in (output.lse, output.loss))
        return Losses(lse, nll, bool(output.screened.all()))

    return run


@torch.no_grad()
def dense_losses(inputs: BenchInputs, *, dtype: torch.dtype) -> Losses:
    """Returns the losses of logits rounded to `dtype`, as dense training has them."""
    weight = inputs.weight.float()
    parts = [_losses_of((e.float() @ weight.T).to(dtype), t) for e, t in _chunks(inputs)]
    return _together(parts)


@torch.no_grad()
def golden_losses(inputs: BenchInputs) -> tuple[Losses, Tensor]:
    """Returns the losses of float64 logits, and the tokens' entropies [N]."""
    weight = inputs.weight.double()
    parts, entropy = [], []
    for hidden, targets in _chunks(inputs):
        log_p = hidden.double() @ weight.T
        parts.append(_losses_of(log_p, targets))
        log_p -= parts[-1][0][:, None]
        entropy.append(-(log_p.exp() * log_p).sum(1))
    return _together(parts), torch.cat(entropy)


def _together(parts: Sequence[tuple[Tensor, Tensor]]) -> Losses:
    lse, nll = zip(*parts, strict=True)
    return Losses(torch.cat(lse), torch.cat(nll))


def _losses_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    lse = logits.double().logsumexp(1)
    return lse, lse - logits.gather(1, targets[:, None])[:, 0]


def _chunks(inputs: BenchInputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields hidden states and targets, some tokens at a time."""
    size = max(64, min(2048, CHUNK_ELEMENTS // len(inputs.weight)))
    return zip(inputs.hidden.split(size), inputs.targets.split(size), strict=True)
