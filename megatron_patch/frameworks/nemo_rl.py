"""Our log-probabilities in the place of NeMo-RL's fused linear log-probabilities."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patch.errors import PatchError
from megatron_patch.frameworks.adapter import Adapter, Seam
from megatron_patch.frameworks.shards import require_plain, shard_logprobs
from megatron_patch.options import PatchOptions

UTILS, TRAIN = "nemo_rl.distributed.model_utils", "nemo_rl.models.megatron.train"
SETUP, GPT_MODEL = "nemo_rl.models.megatron.setup", "megatron.core.models.gpt.gpt_model"
SWITCH = "use_linear_ce_fusion_loss (after 0.7 use_fused_linear_logprobs)"
ARGUMENTS = (
    "tensor_parallel_hidden_states output_weight_layer runtime_gather_output target "
    "vocab_start_index vocab_end_index tp_group inference_only cp_group chunk_size"
)
_ADAPTER = Adapter("nemo_rl", "0.7")


def apply(**keywords: object) -> None:
    """Computes NeMo-RL's fused linear log-probabilities by `token_logprobs`.

    Args: keywords: options of PatchOptions; without them the MEGATRON_PATCH_ variables.
    Raises:
        PatchError: NeMo-RL's functions are not those of 0.7, now or when NeMo-RL imports them.
    """
    _ADAPTER.apply(keywords, _seams)
    gpt_model = getattr(sys.modules.get(GPT_MODEL), "GPTModel", None)
    if getattr(gpt_model, "_linear_ce_fusion_forward_patched", False):
        assert _ADAPTER.options is not None
        _check_heads(_ADAPTER.options)


def remove() -> None:
    """Puts NeMo-RL's functions back."""
    _ADAPTER.remove()


def _seams(options: PatchOptions) -> tuple[Seam, ...]:
    ours = functools.partial(_from_hidden, options)
    return (
        Seam(UTILS, "from_parallel_hidden_states_to_logprobs", ARGUMENTS, ours),
        Seam(
            UTILS,
            "patch_gpt_model_forward_for_linear_ce_fusion",
            "chunk_size",
            functools.partial(_patch_forward, options),
            (SETUP,),
        ),
        Seam(TRAIN, "apply_temperature_scaling", "logits sampling_params", _scaling),
    )


def _patch_forward(options: PatchOptions, theirs: Any, *, chunk_size: int) -> None:
    theirs(chunk_size=chunk_size)
    _check_heads(options)


def _check_heads(options: PatchOptions) -> None:
    """Checks the head in each forward of GPTModel, which NeMo-RL has replaced.

    `from_parallel_hidden_states_to_logprobs` gets the head's weight, and nothing else of the head.
    """

    def forward(theirs: Any, model: Any, *args: Any, **keywords: object) -> Any:
        fused = keywords.get("return_logprobs_for_linear_ce_fusion", False)
        if fused and model.post_process and hasattr(model, "output_layer"):
            require_plain(model.output_layer, model.config, options, SWITCH)
            _require_no_prediction(model)
        return theirs(model, *args, **keywords)

    gpt_model = importlib.import_module(GPT_MODEL).GPTModel
    _ADAPTER.replaced.replace(gpt_model, "forward", forward)


def _require_no_prediction(model: Any) -> None:
    """Refuses to train layers of multi-token prediction, which NeMo-RL's forward leaves out."""
    depth = getattr(model.config, "mtp_num_layers", None)
    if depth and model.training and torch.is_grad_enabled():
        raise PatchError(
            f"mtp_num_layers must be 0 with {SWITCH}, got {depth}: NeMo-RL's forward leaves out "
            "multi-token prediction, whose layers would not be trained"
        )


def _from_hidden(
    options: PatchOptions,
    theirs: Any,
    tensor_parallel_hidden_states: Tensor,  # [s, b, h]; under sequence parallelism [s / tp, b, h]
    output_weight_layer: Tensor,  # [V / tp, h]
    runtime_gather_output: bool,
    target: Tensor,  # [b, s], unshifted
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Returns log-probabilities [b, s - 1] fp32, each of the next token."""
    hidden, weight = tensor_parallel_hidden_states, output_weight_layer
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    if size > 1:
        raise PatchError(f"context_parallel_size must be 1 with {SWITCH}, got {size}")
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        result = shard_logprobs(
            hidden,
            weight,
            target.roll(-1, dims=-1).T.contiguous(),
            group=tp_group,
            options=options,
            bounds=(vocab_start_index, vocab_end_index),
            sequence_parallel=hidden.shape[0] != target.shape[1],
        )
        return result.logprobs.T.contiguous()[:, :-1]


def _scaling(theirs: Any, logits: Tensor, sampling_params: Any) -> Tensor:
    """Refuses to divide log-probabilities [b, s - 1] by a temperature, which is for logits."""
    temperature = 1.0 if sampling_params is None else sampling_params.temperature
    if temperature != 1.0 and logits.dim() == 2:
        raise PatchError(
            f"temperature must be 1 with {SWITCH}, got {temperature}: NeMo-RL divides "
            "log-probabilities by it, which are then of no distribution; set "
            "policy.generation.temperature=1.0"
        )
    return theirs(logits, sampling_params)
