"""The functions of Megatron on which the patch relies, and checks of their signatures.

The version is not checked: a checkout's name says little, and these functions have not changed
since 0.14. Functions that the patch replaces must be Megatron's own: no other library may have
replaced them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_patch.errors import PatchError

LAYERS = "megatron.core.tensor_parallel.layers"
LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"
LOSS = "compute_language_model_loss"
# Module, class, function, its arguments, whether the patch computes in its place.
EXPECTED = (
    (LAYERS, "ColumnParallelLinear", "forward", "self input_ weight runtime_gather_output", True),
    (LANGUAGE_MODULE, "LanguageModule", LOSS, "self labels logits", True),
    (LANGUAGE_MODULE, "LanguageModule", "setup_embeddings_and_output_layer", "self", False),
)

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
GPT_MODEL = "megatron.core.models.gpt.gpt_model"
SCHEDULE = "forward_backward_pipelining_without_interleaving"
# All schedules; their arguments are not checked.
SCHEDULES_OF_ALL_KINDS = (
    SCHEDULE,
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
)


@dataclass
class Arguments:
    """The arguments of forward_backward_pipelining_without_interleaving, with its defaults."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Any = None
    p2p_communicator: Any = None
    # Some releases alone have these. finalize_model_grads_func gets them.
    pg_collection: Any = None
    grad_finalize_pgs: Any = None
    force_all_reduce: bool = False


OF_FINALIZING = "pg_collection grad_finalize_pgs force_all_reduce"
FORWARD_BACKWARD = " ".join(Arguments.__dataclass_fields__).removesuffix(f" {OF_FINALIZING}")
# For the vocabulary over the pipeline: functions, their arguments, and arguments that only some
# releases have.
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
    """The classes and functions of the installed Megatron."""

    head: Any  # ColumnParallelLinear
    language_module: Any
    forward: Any  # method of head
    loss: Any  # method of language_module
    version: str
    file: str


def find_seams() -> Seams:
    """Finds the functions of Megatron that the patch replaces.

    Raises:
        PatchError: there is no megatron.core; or a function is missing, takes other arguments, or
            is not Megatron's.
    """
    try:
        core = importlib.import_module("megatron.core")
        modules = {name: importlib.import_module(name) for name in (LAYERS, LANGUAGE_MODULE)}
    except ImportError as error:
        raise PatchError(
            f"megatron.core cannot be imported ({error}); install megatron-core 0.14 or newer, or "
            "put Megatron-LM on PYTHONPATH"
        ) from error
    classes: dict[str, Any] = {}
    for module, owner, name, wanted, is_replaced in EXPECTED:
        classes[owner] = getattr(modules[module], owner, None)
        function = getattr(classes[owner], name, None)
        described = f"{module}.{owner}.{name}"
        _require_arguments(described, function, wanted, "", core, "megatron_patch")
        if is_replaced:
            require_original(described, without_ours(function), modules[module], core)
    head, language_module = classes["ColumnParallelLinear"], classes["LanguageModule"]
    loss = getattr(language_module, LOSS)
    return Seams(head, language_module, head.forward, loss, *_release_of(core))


def without_ours(function: Any) -> Any:
    """Returns the function that an earlier apply() has replaced, or the function itself."""
    while Path(__file__).parent in _file_of(function).parents and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def require_original(name: str, function: Any, module: Any, core: Any) -> None:
    """Checks that a function is Megatron's own.

    Raises:
        PatchError: the function is neither the one that Megatron's module defines, nor that one
            wrapped by Megatron or torch.
    """
    inside = tuple(Path(str(each.__file__)).parent for each in (core, torch))
    chain = list(_unwrapped(function))
    is_original = _file_of(chain[-1]) == Path(module.__file__)
    for each in chain:
        if not is_original or not any(folder in _file_of(each).parents for folder in inside):
            raise PatchError(
                f"{name} must be Megatron's own in {module.__file__}, got {describe(each)}, which "
                "the patch would leave out: undo that replacement, or run without megatron_patch"
            )


def describe(function: Any) -> str:
    """Describes a function by its name and its place of definition."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", type(function).__module__)
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{module}.{name}{where}"


def _unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _file_of(function: Any) -> Path:
    """Returns the file of a function's code, which functools.wraps does not copy."""
    code = getattr(function, "__code__", None)
    return Path("nowhere" if code is None else code.co_filename)


@dataclass(frozen=True)
class PipelineSeams:
    """Megatron's module of schedules, in which Megatron looks a schedule up at every call."""

    schedules: Any  # module
    gpt_model: Any  # class
    language_model: Seams

    def finalizing(self) -> list[str]:
        """Lists the schedule's arguments that finalize_model_grads_func gets."""
        schedule = getattr(self.schedules, SCHEDULE)
        return [x for x in arguments_of(schedule) if x in OF_FINALIZING.split()]


def find_pipeline_seams() -> PipelineSeams:
    """Finds the functions that the vocabulary over the pipeline relies on.

    Raises:
        PatchError: a function of the schedules is missing or takes other arguments.
    """
    seams = find_seams()
    schedules = importlib.import_module(SCHEDULES)
    gpt_model = importlib.import_module(GPT_MODEL).GPTModel
    core = importlib.import_module("megatron.core")
    for name, wanted, besides in PARTS:
        described, function = f"{SCHEDULES}.{name}", getattr(schedules, name, None)
        _require_arguments(described, function, wanted, besides, core, "vocab_over_pipeline")
    schedule = without_ours(getattr(schedules, SCHEDULE))
    require_original(f"{SCHEDULES}.{SCHEDULE}", schedule, schedules, core)
    return PipelineSeams(schedules, gpt_model, seams)


def find_schedules() -> Any:
    """Finds the module of Megatron's schedules.

    Raises:
        PatchError: a schedule is missing from the module.
    """
    schedules = importlib.import_module(SCHEDULES)
    for name in SCHEDULES_OF_ALL_KINDS:
        if not callable(getattr(schedules, name, None)):
            raise PatchError(
                f"{SCHEDULES}.{name} is missing: the patch does not know this release; run with "
                "quantize_once=False, or logits='full'"
            )
    return schedules


def parallel_state() -> Any:
    """Returns the module that has Megatron's groups."""
    return importlib.import_module("megatron.core.parallel_state")


def arguments_of(function: Any) -> list[str]:
    """Lists the names of a function's arguments; for None "nothing"."""
    if function is None:
        return ["nothing"]
    return list(inspect.signature(without_ours(function)).parameters)


def _require_arguments(
    name: str, function: Any, wanted: str, besides: str, core: Any, needs_it: str
) -> None:
    has = arguments_of(function)
    if [x for x in has if x not in besides.split()] != wanted.split():
        version, file = _release_of(core)
        raise PatchError(
            f"{name} must take ({wanted.replace(' ', ', ')}), got ({', '.join(has)}) in "
            f"megatron.core {version} ({file}): the patch does not know this release; run without "
            f"{needs_it}"
        )


def _release_of(core: Any) -> tuple[str, str]:
    return getattr(core, "__version__", "unknown"), str(core.__file__)
