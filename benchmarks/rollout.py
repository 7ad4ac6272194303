"""Benchmark of how far a trainer's log-probabilities lie from the sampler's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cce_dist import TokenSupport, token_logprobs
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.report import Cells

# Ratios beyond it are "far": PPO clips near them.
FAR = 0.1
TRAINERS = ("float32", "bfloat16")


def bench_rollout(inputs: BenchInputs, *, top_p: float, temperature: float) -> list[Cells]:
    """Samples an id at each hidden state, and computes its log-probability again.

    The sampler is dense: bf16 logits, their softmax in fp32, the fewest ids whose probabilities
    reach top_p. A trainer has the same hidden states and head, in fp32 or bf16, and dense logits or
    `token_logprobs`, with the support that the sampler left and without. Its ratio to the sampler,
    exp(log p - log q), is 1 before the first update if both compute the same.

    Raises:
        ValueError: top_p does not lie in (0, 1], or temperature is not positive.
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top-p must lie in (0, 1], got {top_p}")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    hidden, weight = inputs.hidden, inputs.weight
    log_q = dense_logprobs(hidden.bfloat16(), weight.bfloat16(), temperature)
    allowed = nucleus(log_q, top_p)
    log_q = log_q.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    generator = torch.Generator(hidden.device).manual_seed(0)
    ids = torch.multinomial(log_q.exp(), 1, generator=generator)[:, 0]
    sampled = log_q.gather(1, ids[:, None])[:, 0]
    offsets = torch.cat([ids.new_zeros(1), allowed.sum(1).cumsum(0)])
    support = TokenSupport(offsets, allowed.nonzero()[:, 1])
    sizes: Cells = {"ids_per_token": len(support.ids) / len(ids)}
    rows: list[Cells] = []
    for cells, log_p in _trainers(hidden, weight, ids, allowed, support, temperature):
        ratio = (log_p - sampled).double().exp()
        rows.append(
            {
                **cells,
                **sizes,
                "mean_ratio": float(ratio.mean()),
                "ratio_spread": float(ratio.std()),
                "far_share": float(((ratio - 1).abs() > FAR).double().mean()),
                "mean_abs_log_ratio": float(ratio.log().abs().mean()),
            }
        )
    return rows


def _trainers(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    allowed: Tensor,
    support: TokenSupport,
    temperature: float,
) -> Iterator[tuple[Cells, Tensor]]:
    for name in TRAINERS:
        dtype = getattr(torch, name)
        e, c = hidden.to(dtype), weight.to(dtype)
        for replayed in (False, True):
            log_p = dense_logprobs(e, c, temperature)
            if replayed:
                log_p = log_p.masked_fill(~allowed, -torch.inf).log_softmax(-1)
            cells: Cells = {"trainer": name, "support": "replayed" if replayed else "none"}
            yield {"method": "dense", **cells}, log_p.gather(1, ids[:, None])[:, 0]
            ours = token_logprobs(
                e, c, ids, temperature=temperature, support=support if replayed else None
            )
            yield {"method": "token_logprobs", **cells}, ours.logprobs
            if not replayed:
                same = token_logprobs(e, c, ids, temperature=temperature, invariant=True)
                yield {"method": "invariant", **cells}, same.logprobs


def dense_logprobs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Computes log-probabilities [N, V] of logits in hidden's dtype, by a softmax in fp32."""
    return ((hidden @ weight.T).float() / temperature).log_softmax(-1)


def nucleus(log_q: Tensor, top_p: float) -> Tensor:
    """Returns the fewest ids of each row whose probabilities reach top_p, [N, V] bool."""
    q, order = log_q.exp().sort(dim=1, descending=True, stable=True)
    before = q.cumsum(1) - q
    return torch.zeros_like(q, dtype=torch.bool).scatter_(1, order, before < top_p)
