"""The filter: what each threshold keeps, and how far its gradients are from float64."""

from __future__ import annotations

from collections.abc import Sequence

from cce_dist import Filter, LinearCrossEntropy
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import (
    dense_loss,
    errors,
    golden_gradients,
    gradients,
    mean_tail_mass,
)
from cce_dist.options import TOKEN_BLOCK


def bench_filter(inputs: BenchInputs, shares: Sequence[float]) -> list[dict[str, str]]:
    """A row for the dense recipe, then one a threshold; `shares` are of the uniform mass 128 / V.

    Gradient errors are relative Frobenius errors against float64 on the same rounded inputs.
    """
    vocab_size = len(inputs.weight)
    golden = golden_gradients(inputs)
    dense = errors(gradients(dense_loss, inputs), golden)
    rows = [_row("dense", 1.0, 0.0, dense, None)]
    for share in shares:
        keep = min(share * TOKEN_BLOCK / vocab_size, TOKEN_BLOCK)
        found = {}
        for tail in (True, False):
            chosen = Filter(keep=keep, tail=tail)
            found[tail] = errors(gradients(LinearCrossEntropy(filter=chosen), inputs), golden)
        kept, tail_mass = share_kept(inputs, keep), mean_tail_mass(inputs, Filter(keep=keep))
        rows.append(_row(f"{share:.2e}", kept, tail_mass, found[True], found[False]))
    return rows


def share_kept(inputs: BenchInputs, keep: float) -> float:
    """Share of the columns of all blocks whose true mass reaches `keep` (or that are targets).

    The filter keeps a few more: the forward knows an upper bound of the mass.
    """
    kept = total = 0
    for hidden, ids in zip(
        inputs.hidden.split(TOKEN_BLOCK), inputs.targets.split(TOKEN_BLOCK), strict=True
    ):
        mass = (hidden.float() @ inputs.weight.float().T).softmax(-1).sum(0)
        mask = mass >= keep
        mask[ids] = True
        kept, total = kept + int(mask.sum()), total + mask.numel()
    return kept / total


def _row(
    name: str,
    kept: float,
    tail_mass: float,
    tail: dict[str, float],
    no_tail: dict[str, float] | None,
) -> dict[str, str]:
    def cell(found: dict[str, float] | None, key: str) -> str:
        return "" if found is None else f"{found[key]:.1e}"

    return {
        "keep / uniform mass": name,
        "kept": f"{100 * kept:.1f} %",
        "tail mass": f"{tail_mass:.1e}",
        "grad_hidden": cell(tail, "grad_hidden_error"),
        "grad_weight": cell(tail, "grad_weight_error"),
        "grad_hidden, no tail": cell(no_tail, "grad_hidden_error"),
        "grad_weight, no tail": cell(no_tail, "grad_weight_error"),
    }
