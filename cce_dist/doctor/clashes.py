"""Versions and settings that are known to clash, each with its source.

docs/guide/doctor.md#clashes lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cce_dist.doctor.check import Check, Status
from cce_dist.doctor.facts import Facts

# Variables of NCCL's "Debugging" section that switch a path or an algorithm off.
NCCL_DEBUGGING = (
    "NCCL_ALGO",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
)


@dataclass(frozen=True, kw_only=True)
class Clash:
    """A combination of versions or settings that is known to fail.

    Args:
        applies: whether a process with these facts, in a job of so many pipeline ranks, has it.
        problem: a sentence for the row.
        status: the row's status if the clash applies, "warning" or "failure".
    """

    name: str
    applies: Callable[[Facts, int], bool]
    problem: str
    remedy: str
    source: str
    status: Status = "warning"


def is_at_least(facts: Facts, package: str, *version: int) -> bool:
    installed = facts.version(package)
    return installed is not None and installed[: len(version)] >= version


def is_before(facts: Facts, package: str, *version: int) -> bool:
    return package in facts.versions and not is_at_least(facts, package, *version)


def is_release(facts: Facts, package: str, *version: int) -> bool:
    return (facts.version(package) or ())[: len(version)] == version


def is_set(facts: Facts, name: str) -> bool:
    """Tells whether a variable is set; the value 0 counts as not set."""
    return facts.environment.get(name, "0") not in ("", "0")


def _restarts(facts: Facts) -> bool:
    number = facts.environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = facts.environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    return number.isdigit() and int(number) > 0 and shared


CLASHES = (
    Clash(
        name="Triton's interpreter and NumPy 2.4",
        applies=lambda facts, pp: (
            facts.environment.get("TRITON_INTERPRET") == "1"
            and is_before(facts, "triton", 3, 7)
            and is_at_least(facts, "numpy", 2, 4)
        ),
        status="failure",
        problem="Triton up to 3.6 interprets loops by int() of an array, an error since NumPy 2.4",
        remedy='pip install "numpy<2.4", or Triton 3.7',
        source="https://github.com/triton-lang/triton/issues/9171",
    ),
    Clash(
        name="torch's pipelines: a step after an eval",
        applies=lambda facts, pp: pp > 1 and is_before(facts, "torch", 2, 13),
        problem="torch before 2.13 makes receive buffers at a schedule's first call: a step fails "
        "after an eval",
        remedy="use the contexts of docs/guide/pipelines.md, which make new buffers; or torch 2.13",
        source="docs/guide/pipelines.md",
    ),
    Clash(
        name="torch's pipelines: zero-bubble schedules",
        applies=lambda facts, pp: pp > 1 and is_before(facts, "torch", 2, 13),
        problem="torch before 2.13 cannot compute an autograd.Function's weight gradients apart: a "
        "step fails with the head on the last stage",
        remedy="the vocabulary over the pipeline, another schedule, or torch 2.13",
        source="https://github.com/pytorch/pytorch/issues/166577",
    ),
    Clash(
        name="torch's pipelines: ZBV's eval",
        applies=lambda facts, pp: pp > 1 and is_release(facts, "torch", 2, 13),
        problem="torch 2.13's ScheduleZBVZeroBubble.eval fails where a rank hands a gradient to "
        "itself",
        remedy="`cce-dist train` avoids the failure; elsewhere evaluate with another schedule",
        source="cce_dist/train/pipeline/step.py",
    ),
    Clash(
        name="torchrun's restarts and the store",
        applies=lambda facts, pp: _restarts(facts),
        problem="with --max-restarts the store outlives the workers, and restarted ones may read "
        "addresses of dead ones",
        remedy="`cce-dist train` keeps its attempts apart; for other scripts: "
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        source="https://github.com/pytorch/pytorch/issues/135712, "
        "https://github.com/pytorch/pytorch/issues/167288",
    ),
    Clash(
        name="Megatron-FSDP 0.14 and torch 2.13",
        applies=lambda facts, pp: (
            is_release(facts, "megatron-core", 0, 14) and is_at_least(facts, "torch", 2, 13)
        ),
        problem="megatron-core 0.14's Megatron-FSDP uses names that torch 2.13 has no longer",
        remedy="megatron-core 0.15 or later, or an older torch",
        source="docs/guide/megatron.md#supported-refused-untested",
    ),
    Clash(
        name="Megatron and CUDA_DEVICE_MAX_CONNECTIONS",
        applies=lambda facts, pp: (
            "megatron-core" in facts.versions
            and any(gpu.capability < (10, 0) for gpu in facts.gpus)
            and facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
        ),
        problem="before Blackwell, Megatron with tensor or context parallelism asserts that the "
        "variable is 1",
        remedy="for Megatron's jobs without FSDP: export CUDA_DEVICE_MAX_CONNECTIONS=1",
        source="https://github.com/NVIDIA/Megatron-LM/issues/5105",
    ),
    Clash(
        name="NCCL's settings for debugging",
        applies=lambda facts, pp: (
            bool(facts.gpus) and any(is_set(facts, name) for name in NCCL_DEBUGGING)
        ),
        problem="a setting of NCCL's for debugging is on: slower collectives, crashes or hangs",
        remedy="unset these variables: " + ", ".join(NCCL_DEBUGGING),
        source="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
    ),
)


def check_clashes(facts: Facts, pp: int) -> list[Check]:
    """Returns a row for each clash that applies, or a single row that says none applies."""
    return [
        Check(x.name, x.status, f"{x.problem} ({x.source})", remedy=x.remedy)
        for x in CLASHES
        if x.applies(facts, pp)
    ] or [Check("clashes", "ok", f"none of {len(CLASHES)} known ones")]
