"""Our log-probabilities in the place of NeMo-RL's fused linear log-probabilities."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patch.errors import PatchError
from megatron_patch.frameworks.adapter import Adapter, Seam
from megatron_patch.frameworks.shards import shard_logprobs
from megatron_patch.options import PatchOptions

UTILS, TRAIN = "nemo_rl.distributed.model_utils", "nemo_rl.models.megatron.train"
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


def remove() -> None:
    """Puts NeMo-RL's functions back."""
    _ADAPTER.remove()


def _seams(options: PatchOptions) -> tuple[Seam, ...]:
    ours = functools.partial(_from_hidden, options)
    return (
        Seam(UTILS, "from_parallel_hidden_states_to_logprobs", ARGUMENTS, ours),
        Seam(TRAIN, "apply_temperature_scaling", "logits sampling_params", _scaling),
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
        raise PatchError(
            f"context_parallel_size must be 1 with use_fused_linear_logprobs, got {size}"
        )
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
            f"temperature must be 1 with use_fused_linear_logprobs, got {temperature}: NeMo-RL "
            "divides log-probabilities by it, which are then of no distribution; set "
            "policy.generation.temperature=1.0"
        )
    return theirs(logits, sampling_params)
