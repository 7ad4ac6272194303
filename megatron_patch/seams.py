"""What of Megatron the patch relies on: a few functions, whose signatures are looked at.

Not the version: a checkout's name says little, and these have not changed from 0.14 on.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from megatron_patch.errors import PatchError

LAYERS = "megatron.core.tensor_parallel.layers"
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"
# Module, class, function, its arguments.
EXPECTED = (
    (LAYERS, "ColumnParallelLinear", "forward", "self input_ weight runtime_gather_output"),
    (LANGUAGE_MODULE, "LanguageModule", "compute_language_model_loss", "self labels logits"),
    (LANGUAGE_MODULE, "LanguageModule", "setup_embeddings_and_output_layer", "self"),
)

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
GPT_MODEL = "megatron.core.models.gpt.gpt_model"
SCHEDULE = "forward_backward_pipelining_without_interleaving"
# All of them, of whose arguments nothing is asked.
SCHEDULES_OF_ALL_KINDS = (
    SCHEDULE,
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
)
# With the vocabulary over the pipeline: functions, their arguments, and those that some releases
# have besides.
FORWARD_BACKWARD = (
    "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size "
    "decoder_seq_length forward_only collect_non_loss_data first_val_step adjust_tensor_shapes_fn "
    "p2p_communicator"
)
OF_FINALIZING = "pg_collection grad_finalize_pgs force_all_reduce"
PARTS = (
    (SCHEDULE, FORWARD_BACKWARD, OF_FINALIZING),
    (
        "forward_step",
        "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store "
        "config cp_group_size collect_non_loss_data checkpoint_activations_microbatch "
        "is_first_microbatch current_microbatch vp_stage is_last_stage",
        "",
    ),
    (
        "forward_step_calc_loss",
        "model output_tensor loss_func config vp_stage collect_non_loss_data num_microbatches "
        "forward_data_store cp_group_size is_last_stage",
        "",
    ),
    (
        "backward_step",
        "input_tensor output_tensor output_tensor_grad config",
        "model_type pipeline_model_parallel_size",
    ),
    ("deallocate_output_tensor", "out deallocate_pipeline_outputs", ""),
    ("check_first_val_step", "first_val_step forward_only cond", ""),
    (
        "get_tensor_shapes",
        "seq_length micro_batch_size decoder_seq_length config tp_group cp_group",
        "",
    ),
)


@dataclass(frozen=True)
class Seams:
    """Megatron as it is installed."""

    head: Any  # ColumnParallelLinear
    language_module: Any
    version: str
    file: str


def find_seams() -> Seams:
    """Raises:
    PatchError: there is no megatron.core, or a function is not there or takes other arguments.
    """
    try:
        core = importlib.import_module("megatron.core")
        modules = {name: importlib.import_module(name) for name in (LAYERS, LANGUAGE_MODULE)}
    except ImportError as error:
        raise PatchError(
            f"megatron.core cannot be imported ({error}); install megatron-core 0.14 or newer, or "
            "put Megatron-LM on PYTHONPATH"
        ) from error
    version, file = getattr(core, "__version__", "unknown"), str(core.__file__)
    classes: dict[str, Any] = {}
    for module, owner, name, wanted in EXPECTED:
        function = getattr(getattr(modules[module], owner, None), name, None)
        # What an earlier apply() has put there stands for what it replaced.
        function = getattr(function, "__wrapped__", function)
        found = "nothing" if function is None else " ".join(inspect.signature(function).parameters)
        if found != wanted:
            raise PatchError(
                f"{module}.{owner}.{name} must take ({wanted.replace(' ', ', ')}), found "
                f"({found.replace(' ', ', ')}) in megatron.core {version} ({file}): the patch does "
                "not know this release; run without megatron_patch"
            )
        classes[owner] = getattr(modules[module], owner)
    return Seams(classes["ColumnParallelLinear"], classes["LanguageModule"], version, file)


@dataclass(frozen=True)
class PipelineSeams:
    """Megatron's schedules, which are looked up in their module at every call."""

    schedules: Any  # the module
    gpt_model: Any  # the class

    def finalizing(self) -> list[str]:
        """Arguments of the schedule that finalize_model_grads_func gets."""
        schedule = getattr(self.schedules, SCHEDULE)
        return [x for x in _arguments(schedule) if x in OF_FINALIZING.split()]

    def backward_step(self, **given: Any) -> Any:
        function = self.schedules.backward_step
        return function(**{name: given[name] for name in _arguments(function)})


def find_pipeline_seams() -> PipelineSeams:
    """Raises:
    PatchError: a function of the schedules is not there or takes other arguments.
    """
    found = find_seams()
    schedules = importlib.import_module(SCHEDULES)
    gpt_model = importlib.import_module(GPT_MODEL).GPTModel
    for name, wanted, besides in PARTS:
        function = getattr(schedules, name, None)
        has = [] if function is None else _arguments(function)
        if [x for x in has if x not in besides.split()] != wanted.split():
            raise PatchError(
                f"{SCHEDULES}.{name} must take ({wanted.replace(' ', ', ')}), found "
                f"({', '.join(has)}) in megatron.core {found.version} ({found.file}): the patch "
                "does not know this release; run without vocab_over_pipeline"
            )
    return PipelineSeams(schedules, gpt_model)


def find_schedules() -> Any:
    """The module of Megatron's schedules.

    Raises:
        PatchError: one of them is not there.
    """
    schedules = importlib.import_module(SCHEDULES)
    for name in SCHEDULES_OF_ALL_KINDS:
        if not callable(getattr(schedules, name, None)):
            raise PatchError(
                f"{SCHEDULES}.{name} is not there: the patch does not know this release; run with "
                "quantize_once=False, or logits='full'"
            )
    return schedules


def parallel_state() -> Any:
    """Megatron's groups."""
    return importlib.import_module("megatron.core.parallel_state")


def _arguments(function: Any) -> list[str]:
    # What an earlier apply() has put there stands for what it replaced.
    return list(inspect.signature(getattr(function, "__wrapped__", function)).parameters)
