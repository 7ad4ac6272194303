"""Benchmark of the filter: kept share, gradient errors and time at each threshold."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from cce_dist import Filter, LinearCrossEntropy, VocabShard
from cce_dist.algorithm.plan import plan_of
from cce_dist.backends.triton.launch.tiles import why_not
from cce_dist.bench.golden import LossFunction, dense_loss, errors, golden_gradients, gradients
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import mean_tail_mass
from cce_dist.bench.machine import Timer, interleaved_times, variant_of
from cce_dist.bench.report import Cells
from cce_dist.core.types import Tokens
from cce_dist.options import TOKEN_BLOCK, Backend

# Variants of the filter, by the suffixes of their columns' names.
VARIANTS = {"": Filter(), ", not drawn": Filter(draw=False), ", no tail": Filter(tail=False)}


def default_keep(inputs: BenchInputs, backend: Backend) -> float:
    """Returns the threshold that `Filter()` has for these inputs."""
    shard = VocabShard(0, len(inputs.weight), len(inputs.weight))
    options = LinearCrossEntropy(backend=backend).options
    return plan_of(inputs.hidden, len(inputs.targets), options, None, shard).threshold


def bench_filter(
    inputs: BenchInputs,
    shares: Sequence[float],
    *,
    repeats: int = 3,
    backend: Backend = "auto",
) -> list[Cells]:
    """Returns a row for the dense recipe, then one for each threshold.

    `shares` are thresholds over the uniform mass 128 / V. Gradient errors are relative Frobenius
    errors against float64 on the same rounded inputs.
    """
    keeps = [min(share * TOKEN_BLOCK / len(inputs.weight), TOKEN_BLOCK) for share in shares]
    functions: dict[tuple[int, str], LossFunction] = {(-1, ""): dense_loss}
    tail_mass: dict[int, float] = {-1: 0.0}
    for index, keep in enumerate(keeps):
        for suffix, rule in VARIANTS.items():
            loss = LinearCrossEntropy(filter=replace(rule, keep=keep), backend=backend)
            functions[index, suffix] = loss
            if not suffix:
                tail_mass[index] = mean_tail_mass(inputs, loss.options)
    golden = golden_gradients(inputs)
    errors_by_key = {key: errors(gradients(run, inputs), golden) for key, run in functions.items()}
    del golden
    kept = [1.0, *shares_kept(inputs, keeps)]

    def fail(key: object, error: Exception) -> None:
        raise error

    times = interleaved_times(
        {key: variant_of(run, inputs, "loss+grad") for key, run in functions.items()},
        dict.fromkeys(functions, repeats),
        Timer(inputs.hidden.device),
        fail,
    )
    milliseconds = {key: 1e3 * statistics.median(taken) for key, taken in times.items()}
    rows = []
    for index in range(-1, len(keeps)):
        row = {
            "keep / uniform mass": "dense" if index < 0 else f"{shares[index]:.2e}",
            "kept": f"{100 * kept[index + 1]:.1f} %",
            "tail mass": tail_mass[index],
        }
        for suffix in VARIANTS:
            errors_here = errors_by_key.get((index, suffix), {})
            row[f"grad_hidden{suffix}"] = errors_here.get("grad_hidden_error")
            row[f"grad_weight{suffix}"] = errors_here.get("grad_weight_error")
            row[f"median_ms{suffix}"] = milliseconds.get((index, suffix))
        rows.append(row)
    return rows


@torch.no_grad()
def shares_kept(inputs: BenchInputs, keeps: Sequence[float]) -> list[float]:
    """Returns for each threshold the share of all blocks' columns whose true mass reaches it.

    Targets' columns count as kept. The filter keeps a few more, since its forward knows only an
    upper bound of the mass. If backend "triton" runs here, blocks follow its order of the tokens;
    else they follow the order of `inputs`.
    """
    valid = inputs.without_ignored()
    if why_not(valid.hidden) is None and len(valid.targets) > TOKEN_BLOCK:
        from cce_dist.backends.triton.tokens.order import similar_order

        order = similar_order(Tokens(valid.hidden, None, valid.targets))
        valid = replace(valid, hidden=valid.hidden[order], targets=valid.targets[order])
    kept, total = [0] * len(keeps), 0
    weight = valid.weight.float()
    blocks = zip(valid.hidden.split(TOKEN_BLOCK), valid.targets.split(TOKEN_BLOCK), strict=True)
    for hidden, ids in blocks:
        mass = (hidden.float() @ weight.T).softmax(-1).sum(0)
        mass[ids] = TOKEN_BLOCK
        total += len(mass)
        kept = [count + int((mass >= keep).sum()) for count, keep in zip(kept, keeps, strict=True)]
    return [count / total for count in kept]
