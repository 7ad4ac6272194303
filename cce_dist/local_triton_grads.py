"""Backward over this rank's shard in Triton: lists of what is kept, the tail, the products.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist.local_triton_kept_logits import KeptLogits
from cce_dist.local_triton_lists import KeptColumns, ListedLogits
from cce_dist.local_triton_products import products
from cce_dist.local_triton_state import Backward
from cce_dist.local_triton_tiles import REST, UNTIL_HIDDEN, WHOLE
from cce_dist.partials import Head, LocalGrads, Needs, StartSum, Tokens, Upstream


def local_grads(
    tokens: Tokens,
    head: Head,
    lse: Tensor,  # [N] over all ranks
    upstream: Upstream,
    *,
    target_logit: Tensor,  # [N] over all ranks
    entropy: Tensor | None,  # [N] over all ranks; needed if upstream.entropy is given
    kept: KeptColumns | None,  # None: every column
    needs: Needs,
    grad_weight: Tensor | None,  # [V_local, D], written; None: not needed
    accumulate: bool,  # add to grad_weight (fp32) instead of overwriting it
    workspace_bytes: int,
    logits: KeptLogits | ListedLogits | None = None,
    store_as: torch.dtype,
    start_sum: StartSum | None = None,
    beside: bool = False,
) -> LocalGrads:
    """Gradients of this rank's shard (no communication of its own). Deterministic.

    Args, returns: those of `local_torch_grads.local_grads`, but
        store_as: hidden's gradient is [num_rows, D] in that dtype, as the caller's hidden, 0 for
            tokens that don't count.
        start_sum: takes it, in fp32, when nothing else but the weight's gradient is left to do;
            None: nothing.
        beside: kernels are on the device that wait for other ranks, as in a pipeline.
    Source: block-sparse products as in MegaBlocks, arXiv:2211.15841; docs/numerics.md#the-tail.
    """
    run = Backward.of(
        tokens, head, lse, target_logit, upstream, entropy, kept, needs, workspace_bytes, logits
    )
    weight, grad_hidden, grad_bias, rows = run.weight, None, None, grad_weight
    if needs.bias:
        grad_bias = weight.new_empty(weight.shape[0], dtype=torch.float32)
    if needs.hidden:
        shape = (run.pieces, len(tokens), weight.shape[1])
        grad_hidden = weight.new_empty(shape, dtype=torch.float32)
    if grad_weight is not None and grad_weight.stride(1) != 1 and grad_weight.shape[1] != 1:
        # A buffer whose rows are not contiguous: through a copy, rather than a slower kernel.
        rows = grad_weight.contiguous()
    launch = products(run, grad_hidden, rows, grad_bias, accumulate, beside)
    has_rest = start_sum is not None and needs.hidden and (needs.bias or grad_weight is not None)
    launch(UNTIL_HIDDEN if has_rest else WHOLE)
    if grad_hidden is not None:
        grad_hidden = grad_hidden[0] if run.pieces == 1 else grad_hidden.sum(0)
    if not has_rest:
        # Its workspace makes room for the stored hidden gradient.
        launch = None
    wait = None
    if grad_hidden is not None:
        made = grad_hidden
        if start_sum is None:
            grad_hidden = run.finish_hidden(made, store_as)
        else:
            wait = start_sum(made, finish=lambda: run.finish_hidden(made, made.dtype))
    try:
        if launch is not None:
            launch(REST)
        if grad_weight is not None and rows is not grad_weight:
            grad_weight.copy_(rows)
    finally:
        if wait is not None:
            grad_hidden = wait()
    return LocalGrads(grad_hidden, grad_bias)
