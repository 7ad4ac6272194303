"""Which backend computes this rank's shard: one decision, in one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cce_dist import (
    local_torch,
    local_torch_filter,
    local_torch_grads,
    local_torch_quantize,
    local_torch_screen,
)
from cce_dist.options import Backend, LossOptions, Screen
from cce_dist.partials import (
    Head,
    LocalGrads,
    MergeKernels,
    Needs,
    Picked,
    QuantizedRows,
    StartSum,
    Stats,
    StepKind,
    Tokens,
    Upstream,
)


@dataclass(frozen=True)
class LocalBackend:
    """What a backend is: functions on one rank's shard, which leave communication to others.

    Their arguments are those of `local_torch.local_stats`, `local_torch_filter.local_kept` and
    `local_torch_grads.local_grads`. What `stats` records for `kept`, and `kept` for `grads`, is
    the backend's own, but for the field `dropped_mass` [N] of what `kept` returns.
    """

    stats: Callable[..., tuple[Stats, Any]]
    kept: Callable[..., Any]
    grads: Callable[..., LocalGrads]
    # (tokens, head, workspace_bytes=) -> largest logit [N] and the first column that has it.
    largest: Callable[..., tuple[Tensor, Tensor]]
    # Whether it takes Tokens.count: the host then never asks how many tokens count.
    counts_on_device: bool
    # (ids [N] int64, ignore_index, shard=) -> the tokens that count; None: torch picks them.
    pick_tokens: Callable[..., Picked] | None = None
    # Whether Tokens.local_targets may be int32.
    takes_int32: bool = False
    # Whether `grads` takes `store_as`, a dtype: the hidden gradient is then [num_rows, D] of that
    # dtype, as hidden's rows are, and 0 where no token counts; and `start_sum` or None. That takes
    # this gradient as early as it can be, and returns what is called last for the one to return.
    stores_rows: bool = False
    # Whether `grads` calls Tokens.fill.
    fills_hidden: bool = False
    # Whether its blocks hold similar tokens, of which the default filter then keeps less.
    orders_tokens: bool = False
    # Whether `stats` hands its logits on to `grads` (gradient="in_forward").
    keeps_logits: bool = False
    # Whether `stats`, where it scores columns, takes `gather` and calls it as often on every rank.
    exchanges: bool = False
    # For ranks' lse and target logits; None: torch merges them. As on every other rank.
    merge_kernels: MergeKernels | None = None
    # Whether `stats` takes `screen`: 8-bit logits, but for the columns that matter. One that stores
    # rows takes `beside` with it, as `grads` does.
    screens: bool = False
    # (tokens, weight, Screen) -> QuantizedRows, which `stats` takes as Head.quantized; None: it
    # takes none.
    quantize: Callable[..., QuantizedRows] | None = None
    # Room for the logits that `stats` keeps for `grads` (keep_logits); None: it cannot.
    room_for_logits: Callable[..., Any] | None = None
    # (draws) -> the same for a screened `stats`, which knows how many; None: it keeps none.
    room_for_listed: Callable[[bool], Any] | None = None
    # (num_tokens, num_columns, weight) -> what `stats` records for `kept`, by shapes alone;
    # None: it cannot know.
    scores_like: Callable[[int, int, Tensor], Any] | None = None
    # (tokens, head, StepKind): compiles what the others will run; None: nothing to compile.
    rehearse: Callable[[Tokens, Head, StepKind], None] | None = None


TORCH = LocalBackend(
    stats=local_torch.local_stats,
    kept=local_torch_filter.local_kept,
    grads=local_torch_grads.local_grads,
    largest=local_torch.local_largest,
    counts_on_device=False,
    keeps_logits=True,
)


def _triton() -> LocalBackend:
    from cce_dist import (
        local_triton,
        local_triton_grads,
        local_triton_kept_logits,
        local_triton_largest,
        local_triton_lists,
        local_triton_merge,
        local_triton_pick,
        local_triton_quantize,
        local_triton_rehearsal,
    )

    return LocalBackend(
        stats=local_triton.local_stats,
        kept=local_triton_lists.local_kept,
        grads=local_triton_grads.local_grads,
        largest=local_triton_largest.local_largest,
        counts_on_device=True,
        pick_tokens=local_triton_pick.pick_on_device,
        takes_int32=True,
        stores_rows=True,
        fills_hidden=True,
        orders_tokens=True,
        exchanges=True,
        merge_kernels=local_triton_merge.KERNELS,
        screens=True,
        quantize=local_triton_quantize.quantize_for,
        room_for_logits=local_triton_kept_logits.KeptLogits.make,
        room_for_listed=local_triton_lists.ListedLogits,
        scores_like=local_triton_lists.Marks.like,
        rehearse=local_triton_rehearsal.rehearse,
    )


def _stats_of_nothing(
    tokens: Tokens,
    head: Head,
    *,
    gather: Callable[[Tensor], Tensor] | None = None,
    screen: object = None,
    beside: bool = False,
    **how: Any,
) -> tuple[Stats, Any]:
    """Of an empty shard, where the other ranks run the Triton backend."""
    if gather is not None:
        from cce_dist.local_triton_bounds import EXCHANGES

        nothing = head.weight.new_full((len(tokens),), -torch.inf, dtype=torch.float32)
        for _ in EXCHANGES:
            gather(nothing)
    return local_torch.local_stats(tokens, head, **how)


def _grads_of_nothing(
    tokens: Tokens,
    head: Head,
    lse: Tensor,
    upstream: Upstream,
    *,
    store_as: torch.dtype,
    start_sum: StartSum | None = None,
    needs: Needs,
    **how: Any,
) -> LocalGrads:
    """Of the same shard: no column pulls at any token."""
    new = head.weight.new_zeros
    hidden = new(tokens.hidden.shape, dtype=store_as) if needs.hidden else None
    if hidden is not None and start_sum is not None:
        hidden = start_sum(hidden, finish=lambda: None)()
    return LocalGrads(hidden, new(0, dtype=torch.float32) if needs.bias else None)


def choose_backend(
    options: LossOptions, hidden: Tensor, num_tokens: int, columns: int
) -> LocalBackend:
    """The backend for "auto", "torch" or "triton".

    Raises:
        ValueError: the one asked for by name cannot run, an explicit choice never falls back; or
            the one that can run has not what the options ask for.
    """
    chosen = _choose(options.backend, hidden, num_tokens, columns)
    by_kernels = chosen.screens
    if options.logits == "screened" and not by_kernels:
        chosen = _screened_torch(chosen)
    # Where there is nothing to compute, there are no logits to keep.
    if not num_tokens or not columns:
        return chosen
    if options.keep_logits and chosen.room_for_logits is None:
        raise ValueError(
            'keep_logits=True needs the kernels of backend="triton", and '
            f'backend={options.backend!r} took "torch" here; leave keep_logits out'
        )
    if options.logits == "screened":
        _check_screening(options, hidden, by_kernels)
    return chosen


def _screened_torch(torch_backend: LocalBackend) -> LocalBackend:
    """It filters in every gradient mode, and keeps no logits: as the kernels do, and on each rank,
    whatever there is to compute."""
    return replace(
        torch_backend,
        stats=local_torch_screen.local_stats,
        keeps_logits=False,
        exchanges=True,
        screens=True,
        quantize=local_torch_quantize.quantize_for,
    )


def _check_screening(options: LossOptions, hidden: Tensor, by_kernels: bool) -> None:
    from cce_dist.local_triton_tiles import why_not_screened

    reason = why_not_screened(hidden, options.screen.dtype, by_kernels=by_kernels)
    if reason is not None:
        raise ValueError(f'logits="screened" cannot run here: {reason}; use logits="full"')


def quantizer_for(backend: Backend, weight: Tensor, screen: Screen) -> Any:
    """The module whose `moments_of` and `quantize_weight` make rows of 8 bits. Both backends'
    rows are the same, but for the last digit of an fp32 number.

    Raises:
        ValueError: the backend asked for by name cannot run, or the weight is not of 16 bits.
    """
    from cce_dist.local_triton_tiles import (
        interpreted,
        warn_of_torch,
        why_not,
        why_not_screened,
    )

    by_kernels = backend == "triton"
    if backend == "auto":
        # The interpreter is for tests, which ask for it by name.
        by_kernels = not interpreted() and why_not(weight) is None
        if not by_kernels:
            warn_of_torch(weight)
    reason = why_not(weight) if by_kernels else None
    reason = reason or why_not_screened(weight, screen.dtype, by_kernels=by_kernels)
    if reason is not None:
        raise ValueError(f"weight cannot be quantised here: {reason.replace('hidden', 'weight')}")
    if not by_kernels:
        return local_torch_quantize
    from cce_dist import local_triton_quantize

    return local_triton_quantize


def _choose(backend: Backend, hidden: Tensor, num_tokens: int, columns: int) -> LocalBackend:
    if backend == "torch":
        return TORCH
    from cce_dist.local_triton_tiles import interpreted, warn_of_torch, why_not

    reason = why_not(hidden)
    if backend == "triton" and reason is not None:
        raise ValueError(
            f'backend="triton" cannot run here: {reason}; use backend="torch", or "auto" to take '
            "the fastest one that can run"
        )
    # The interpreter is for tests, which ask for it by name.
    if reason is not None or (backend == "auto" and interpreted()):
        warn_of_torch(hidden)
        return TORCH
    if num_tokens == 0:
        return TORCH
    if columns == 0:
        # Nothing for a kernel to do; but all ranks must count tokens and chunks of them alike.
        return replace(
            TORCH,
            counts_on_device=True,
            keeps_logits=False,
            exchanges=True,
            screens=True,
            stores_rows=True,
            merge_kernels=_triton().merge_kernels,
            stats=_stats_of_nothing,
            grads=_grads_of_nothing,
        )
    return _triton()
