"""Benchmark of `token_logprobs` under a support and with candidates."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cce_dist import TokenLogprobs, TokenSupport, token_logprobs
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.machine import Part, Timer, interleaved_times, peak_extra_bytes, variant_of
from cce_dist.bench.report import Cells, percentiles_ms

PARTS: tuple[Part, ...] = ("loss", "loss+grad")
# Without a support of everything if its ids alone are larger.
MOST_BYTES = 2**34


def bench_listed(inputs: BenchInputs, *, num_ids: int, repeats: int) -> list[Cells]:
    """Returns rows with milliseconds and memory of each kind of call, and its time over that of the
    call without lists.

    Kinds: "all ids"; "support", num_ids of each token, its target among them; "candidates", as many
    beside the target; "everything", a support of the whole vocabulary.

    Raises:
        ValueError: num_ids does not lie in [1, V].
    """
    tokens, vocab_size = len(inputs.targets), len(inputs.weight)
    if not 1 <= num_ids <= vocab_size:
        raise ValueError(f"ids must lie in [1, V={vocab_size}], got {num_ids}")
    device = inputs.hidden.device
    # A block of ids from each target on: distinct, and as frequent as the targets are.
    step = torch.arange(num_ids, device=device)
    ids = (inputs.targets.clamp_min(0)[:, None] + step) % vocab_size
    offsets = torch.arange(tokens + 1, device=device)
    kinds: dict[str, dict[str, Any]] = {
        "all ids": {},
        "support": {"support": TokenSupport(offsets * num_ids, ids.view(-1))},
        "candidates": {"candidates": ids},
    }
    if 8 * tokens * vocab_size <= MOST_BYTES:
        everything = torch.arange(vocab_size, device=device).repeat(tokens)
        kinds["everything"] = {"support": TokenSupport(offsets * vocab_size, everything)}
    timer = Timer(device)
    variants = {
        (kind, part): variant_of(partial(_loss, lists), inputs, part)
        for kind, lists in kinds.items()
        for part in PARTS
    }
    peaks = {key: peak_extra_bytes(variant, device) for key, variant in variants.items()}
    times = interleaved_times(variants, dict.fromkeys(variants, repeats), timer)
    rows: list[Cells] = []
    for (kind, part), seconds in times.items():
        timed = percentiles_ms(seconds)
        whole = percentiles_ms(times["all ids", part])["median_ms"]
        rows.append(
            {
                "method": kind,
                "part": part,
                "ids": num_ids,
                "repeats": repeats,
                **timed,
                "of_all_ids": timed["median_ms"] / whole,
                "peak_extra_mib": peaks[kind, part] / 2**20,
            }
        )
    return rows


def _loss(lists: dict[str, Any], hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    result: TokenLogprobs = token_logprobs(hidden, weight, targets, **lists)
    total = result.logprobs.sum()
    return total if result.candidates is None else total + result.candidates.sum()
