"""Megatron's language-model loss without its logits: one line switches it on, one switches it off.

    torchrun --nproc-per-node 8 -m megatron_patch pretrain_gpt.py <Megatron's own arguments>

or, in a script of your own, `megatron_patch.apply()` before the model is built, or
`megatron_patch.apply(model)` after it. docs/guide/megatron.md.
"""

from megatron_patch.distillation.loss import distillation_loss
from megatron_patch.errors import PatchError
from megatron_patch.logprobs import LogprobOptions, logprobs
from megatron_patch.options import PatchOptions
from megatron_patch.patch import Status, apply, patched, remove, status
from megatron_patch.pipeline.rows import gather_output_weight, scatter_output_weight

__all__ = [
    "LogprobOptions",
    "PatchError",
    "PatchOptions",
    "Status",
    "apply",
    "distillation_loss",
    "gather_output_weight",
    "logprobs",
    "patched",
    "remove",
    "scatter_output_weight",
    "status",
]
