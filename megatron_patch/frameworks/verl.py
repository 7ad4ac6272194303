"""Our log-probabilities and entropy in the place of verl's fused kernels."""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import Any

from megatron_patch import patch
from megatron_patch.errors import PatchError
from megatron_patch.frameworks import verl_fsdp
from megatron_patch.frameworks.adapter import Adapter, Seam
from megatron_patch.logprobs import LogprobOptions, logprobs
from megatron_patch.options import PatchOptions
from megatron_patch.seams import find_seams

MODULE = "verl.models.mcore.model_forward_fused"
_ADAPTER = Adapter("verl", "0.9.1")
_MODELS: weakref.WeakSet[Any] = weakref.WeakSet()


def apply(**keywords: object) -> None:
    """Computes log-probabilities of verl's fused forwards, of Megatron and FSDP, by ours.

    With Megatron verl's `patch_fused_forward(model)` applies the patch to its model, too.

    Args: keywords: options of PatchOptions; without them the MEGATRON_PATCH_ variables.
    Raises:
        PatchError: verl's functions are not those of 0.9.1, now or when verl imports them.
    """
    _ADAPTER.apply(keywords, _seams)


def remove() -> None:
    """Puts verl's functions back, and Megatron's loss into the models that verl has patched."""
    _ADAPTER.remove()
    for model in list(_MODELS):
        patch.remove(model)
    _MODELS.clear()


def _seams(options: PatchOptions) -> tuple[Seam, ...]:
    def patch_fused_forward(theirs: Any, model: Any) -> None:
        theirs(model)
        models = [x for x in model.modules() if isinstance(x, find_seams().language_module)]
        takes = [inspect.signature(x.forward).parameters for x in models]
        if not takes or any("output_processor" not in names for names in takes):
            raise PatchError(
                "the model must have a language model whose forward takes output_processor, as "
                f"megatron-core's GPTModel from 0.18 on, got {type(model).__name__}: set "
                "use_fused_kernels=False"
            )
        patch.apply(model, options)
        _MODELS.add(model)

    processor = "hidden_states output_layer output_weight labels context config _ignored"
    return (
        Seam(MODULE, "fused_output_processor", processor, _fused_output_processor),
        Seam(MODULE, "patch_fused_forward", "model", patch_fused_forward),
        *verl_fsdp.seams(options),
    )


def _fused_output_processor(theirs: Any, *, context: Any, config: Any, **arguments: Any) -> Any:
    """Returns verl's CausalLMOutputForPPO with log_probs and entropy [s] fp32, s the packed tokens.

    Raises:
        PatchError: labels are not one row of packed tokens; verl asks for more than a temperature;
            or Megatron's config logger is on.
    """
    labels, hidden = arguments["labels"], arguments["hidden_states"]
    if labels is not None and labels.shape[0] != 1:
        raise PatchError(
            f"labels must be one row of packed tokens [1, s], got {list(labels.shape)}: set "
            "use_remove_padding=True"
        )
    if getattr(config, "config_logger_dir", ""):
        raise PatchError("config_logger_dir must be empty: ours does not log its tensors")
    if vars(context).keys() != {"temperature"}:
        raise PatchError(
            f"output_processor_context must have temperature alone, got {sorted(vars(context))} "
            f"in verl {_ADAPTER.version()}: megatron_patch knows verl {_ADAPTER.releases}; run "
            "without megatron_patch.frameworks, or with that release"
        )
    options = LogprobOptions(context.temperature, ("entropy",))
    result = logprobs(**arguments, context=options)
    assert result.entropy is not None
    output = sys.modules[MODULE].CausalLMOutputForPPO(hidden_states=hidden)
    output.entropy, output.log_probs = result.entropy.view(-1), result.logprobs.view(-1)
    return output
