"""Our log-probabilities and entropy in the place of SkyRL's fused LM head."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_patch.frameworks.adapter import Adapter, Seam
from megatron_patch.frameworks.shards import require_plain, shard_logprobs
from megatron_patch.options import PatchOptions

UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
WRAPPER = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
OF_TOKENS = (
    "hidden lm_head_weight target vocab_start_index vocab_end_index tp_group inference_only "
    "cp_group chunk_size temperature fused_backend"
)
OF_PACKED = (
    "hidden lm_head_weight target cu_seqlens_padded unpacked_seqlen vocab_start_index "
    "vocab_end_index group inference_only cp_group chunk_size attention_mask sub_seq_lengths "
    "temperature fused_backend"
)
OF_ROWS = (
    "backend hidden weight target vocab_start_index vocab_end_index chunk_size tp_group "
    "inference_only"
)
_ADAPTER = Adapter("skyrl", "0.3.0")


class _Ours(NamedTuple):
    """A backend's name for SkyRL, which hands it to the function that ours replaces."""

    temperature: float


def apply(**keywords: object) -> None:
    """Computes log-probabilities and entropy of SkyRL's fused LM head by `token_logprobs`.

    Args: keywords: options of PatchOptions; without them the MEGATRON_PATCH_ variables.
    Raises:
        PatchError: SkyRL's functions are not those of 0.3, now or when SkyRL imports them.
    """
    _ADAPTER.apply(keywords, _seams)


def remove() -> None:
    """Puts SkyRL's functions back."""
    _ADAPTER.remove()


def _seams(options: PatchOptions) -> tuple[Seam, ...]:
    by_name = (WRAPPER,)
    return (
        Seam(UTILS, "_fused_lm_head_logprob_apply", OF_ROWS, functools.partial(_rows, options)),
        Seam(UTILS, "from_parallel_hidden_to_logprobs", OF_TOKENS, _as_ours, by_name),
        Seam(
            UTILS, "from_parallel_hidden_to_logprobs_packed_sequences", OF_PACKED, _as_ours, by_name
        ),
        Seam(
            UTILS,
            "_fused_vocab_parallel_entropy_from_hidden",
            "hidden lm_head_weight tp_group chunk_size temperature",
            functools.partial(_entropy, options),
            by_name,
        ),
        Seam(
            WRAPPER,
            "_fused_lm_head_output_processor",
            "kwargs",
            functools.partial(_output_processor, options),
        ),
    )


def _output_processor(options: PatchOptions, theirs: Any, **arguments: Any) -> Tensor:
    """Returns all hidden states [b, s, h], whose gradient comes summed over the ranks.

    SkyRL's own sums it in the gather's backward, which would sum ours a second time.
    """
    layer, hidden = arguments["output_layer"], arguments["hidden_states"]
    require_plain(layer, arguments["config"], options, "fused_lm_head_logprob")
    context, weight = arguments["context"], arguments["output_weight"]
    if context is not None:
        context["lm_head_weight"] = layer.weight if weight is None else weight
    if layer.sequence_parallel:
        gather: Any = importlib.import_module("megatron.core.tensor_parallel")
        hidden = gather.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
    return hidden.transpose(0, 1).contiguous()


def _as_ours(theirs: Any, *args: Any, **keywords: Any) -> Tensor:
    """Keeps SkyRL's layouts, and the temperature from its weight, which it would copy and round."""
    call = inspect.signature(theirs).bind(*args, **keywords)
    call.apply_defaults()
    ours = _Ours(call.arguments["temperature"])
    call.arguments.update(temperature=1.0, fused_backend=ours)
    return theirs(*call.args, **call.kwargs)


def _rows(
    options: PatchOptions,
    theirs: Any,
    backend: _Ours | str,
    hidden: Tensor,  # [b, s, h]
    weight: Tensor,  # [V / tp, h]
    target: Tensor,  # [b, s]
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool = False,
) -> Tensor:
    """Returns log-probabilities [b, s] fp32."""
    temperature = backend.temperature if isinstance(backend, _Ours) else 1.0
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        # SkyRL casts hidden, too.
        return shard_logprobs(
            hidden.to(weight.dtype),
            weight,
            target,
            group=tp_group,
            options=options,
            bounds=(vocab_start_index, vocab_end_index),
            temperature=temperature,
        ).logprobs


def _entropy(
    options: PatchOptions,
    theirs: Any,
    hidden: Tensor,  # [b, s, h]
    lm_head_weight: Tensor,  # [V / tp, h]
    tp_group: Any,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Returns entropies [b, s] fp32, in nats."""
    # Any class will do as a target.
    anyone = hidden.new_zeros(hidden.shape[:-1], dtype=torch.int64)
    entropy = shard_logprobs(
        hidden.to(lm_head_weight.dtype),
        lm_head_weight,
        anyone,
        group=tp_group,
        options=options,
        temperature=temperature,
        stats=("entropy",),
    ).entropy
    assert entropy is not None
    return entropy
