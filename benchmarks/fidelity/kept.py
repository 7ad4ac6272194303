"""The filter's default threshold, and the share of columns that reach a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cce_dist import LinearCrossEntropy, VocabShard
from cce_dist.algorithm.plan import plan_of
from cce_dist.backends.triton.launch.tiles import why_not
from cce_dist.bench.inputs import BenchInputs
from cce_dist.core.types import Tokens
from cce_dist.options import TOKEN_BLOCK, Backend


def default_keep(inputs: BenchInputs, backend: Backend) -> float:
    """Returns the threshold that `Filter()` has for these inputs."""
    shard = VocabShard(0, len(inputs.weight), len(inputs.weight))
    options = LinearCrossEntropy(backend=backend).options
    return plan_of(inputs.hidden, len(inputs.targets), options, None, shard).threshold


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
