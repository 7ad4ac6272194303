"""Figure 3 of Cut Cross-Entropy (arXiv:2411.09009) and its claims of sparsity, on captured inputs.

The figure shows the mean probability of the i-th most likely token over i. The claims are the
shares above the filter's threshold: of softmax entries, of ranks of that mean, of columns in blocks
of 128 tokens, and of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.fidelity.sparsity import find_peaks, share_of_columns, share_of_tiles
from cce_dist.bench.inputs import BenchInputs

# Ranks that are drawn, on a logarithmic axis.
RANKS_PER_DECADE = 16
# Probabilities that are sorted at once.
CHUNK_ELEMENTS = 2**26


def bench_probabilities(inputs: BenchInputs, thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """Returns rows of part "curve", one a rank, then of part "sparsity", one a threshold.

    Logits and softmax are in fp32, of the inputs in their own dtype. Ignored tokens are left out.
    """
    inputs = inputs.without_ignored()
    mean, counts, mass = _sorted_mean(inputs, thresholds)
    curve = [
        {"part": "curve", "rank": rank, "mean_probability": float(mean[rank - 1])}
        for rank in ranks_to_draw(len(mean))
    ]
    peaks = find_peaks(inputs)
    rows = []
    for number, threshold in enumerate(thresholds):
        entries = counts[number].double()
        rows.append(
            {
                "part": "sparsity",
                "threshold": threshold,
                "rank": int((mean >= threshold).sum()),
                "entries": float(entries.mean()) / len(mean),
                "per_token_mean": float(entries.mean()),
                "per_token_median": float(entries.quantile(0.5)),
                "per_token_p90": float(entries.quantile(0.9)),
                "per_token_most": int(entries.max()),
                "mass": float(mass[number]),
                "columns": share_of_columns(peaks.probability, threshold),
                "tiles": share_of_tiles(peaks.probability, threshold),
                "tiles_sorted": share_of_tiles(peaks.probability, threshold, peaks.by_mean_logit),
                "tiles_computed": share_of_tiles(peaks.gradient, threshold, peaks.by_mean_logit),
            }
        )
    return [*curve, *rows]


def ranks_to_draw(num_classes: int) -> list[int]:
    """Returns ranks from 1 to num_classes, both included, evenly spaced on a logarithmic axis."""
    ranks, power = {num_classes}, 0
    while (rank := round(10 ** (power / RANKS_PER_DECADE))) < num_classes:
        ranks.add(rank)
        power += 1
    return sorted(ranks)


@torch.no_grad()
def _sorted_mean(
    inputs: BenchInputs, thresholds: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the mean sorted softmax, and counts and mass of the entries above each threshold.

    Returns:
        mean: [V] float64, largest first.
        counts: [thresholds, N], each token's number of entries that reach the threshold.
        mass: [thresholds] float64, the mean over tokens of these entries' mass.
    """
    weight = inputs.weight.float()
    total = weight.new_zeros(len(weight), dtype=torch.float64)
    mass = weight.new_zeros(len(thresholds), dtype=torch.float64)
    counts = []
    for hidden in inputs.hidden.split(max(1, CHUNK_ELEMENTS // len(weight))):
        p = (hidden.float() @ weight.T).softmax(-1).sort(descending=True).values
        total += p.sum(0, dtype=torch.float64)
        above = [p >= threshold for threshold in thresholds]
        counts.append(torch.stack([reached.sum(-1) for reached in above]))
        mass += torch.stack([(p * reached).sum(dtype=torch.float64) for reached in above])
    num_tokens = len(inputs.hidden)
    return total / num_tokens, torch.cat(counts, 1), mass / num_tokens
