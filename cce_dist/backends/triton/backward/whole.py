"""The products of all columns whose logits the forward kept: torch multiplies whole matrices.

Its products, cuBLAS's on a GPU, are faster than kernels that ask how many tokens count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cce_dist.backends.torch.tiles import put_product
from cce_dist.backends.triton.backward.exact import launch_logits, launch_targets
from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.launch.start import is_compiling_only
from cce_dist.backends.triton.launch.tiles import AFTER_HIDDEN, UNTIL_HIDDEN


def products_by_torch(state: BackwardState, grads: GradBuffers) -> Callable[[int], None]:
    """Prepares SDD, DSD and DDS of the columns in `state.logits`.

    d_logits are rounded to the weight's dtype; products sum in fp32. An accumulated gradient of 16
    bits is rounded once. DDS goes without late targets.

    Returns: a function that launches a stage of them; `AFTER_HIDDEN` is DDS.
    """
    assert state.logits is not None and state.logits.packed is not None
    (region,) = state.logits.regions
    hidden = state.logits.packed[:, : state.weight.shape[1]]
    d_logits = region.memory[: region.num_columns]

    def launch(stage: int) -> None:
        if stage != AFTER_HIDDEN:
            launch_logits(state, hidden, region)
            if grads.late is not None and not grads.accumulate and not is_compiling_only():
                torch.sum(d_logits, 1, dtype=torch.float32, out=grads.late.sums)
            launch_targets(state, region, None)
            if grads.hidden is not None:
                of_tokens = d_logits[:, : state.num_tokens].T
                _multiply(of_tokens, state.weight, grads.hidden[0], accumulate=False)
        if stage == UNTIL_HIDDEN:
            return
        if grads.bias is not None and not is_compiling_only():
            torch.sum(d_logits, 1, dtype=grads.bias.dtype, out=grads.bias)
        if grads.late is not None:
            launch_targets(state, region, grads.late)
        if grads.weight is not None:
            _multiply(d_logits, hidden, grads.weight, accumulate=grads.accumulate)

    return launch


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool) -> None:
    if not is_compiling_only():
        put_product(out, a, b, accumulate=accumulate)
