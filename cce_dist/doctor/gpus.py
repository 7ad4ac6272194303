"""The NVIDIA driver and the GPUs."""

from __future__ import annotations

from collections import Counter

from cce_dist.doctor.check import Check, make_check
from cce_dist.doctor.facts import Facts, dotted, numbers_of

# The oldest driver for CUDA of a major version:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
GIB = 2**30


def check_driver(facts: Facts) -> Check:
    """Checks that the driver is new enough for the CUDA of torch."""
    if facts.driver is None and facts.gpus:
        unknown = "of unknown version: neither /proc/driver/nvidia nor nvidia-smi states it"
        return Check("driver", "warning", unknown, remedy="put nvidia-smi on PATH")
    if facts.driver is None:
        absent = "no NVIDIA driver: eager torch computes the loss on the CPU"
        return Check("driver", "skipped", absent)
    cuda = facts.cuda or ""
    oldest = OLDEST_DRIVER.get((numbers_of(cuda) or (0,))[0])
    return make_check(
        "driver",
        oldest is None or (numbers_of(facts.driver) or (0,))[0] >= oldest,
        facts.driver,
        expected=f">= {oldest} for CUDA {cuda}" if oldest else "",
        remedy="update the driver, or install a torch for an older CUDA",
        # An older driver works with NVIDIA's compatibility package: torch then finds its GPUs.
        otherwise="warning" if facts.gpus else "failure",
    )


def check_gpus(facts: Facts) -> Check:
    """Checks that torch can use the GPUs; shows names, memory and compute capability."""
    if facts.gpus:
        return _check_usable(facts)
    if facts.driver is None:
        return Check("GPUs", "skipped", "none")
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        by = f"hidden by CUDA_VISIBLE_DEVICES={hidden}: the loss is computed on the CPU"
        return Check("GPUs", "skipped", by)
    problem = f"torch can use none: {facts.why_no_gpu or 'it counts 0'}"
    expected = "at least one"
    remedy = "see whether nvidia-smi lists GPUs, and whether the container was given any"
    if facts.cuda is None:
        problem = f"an NVIDIA driver, but torch {facts.versions.get('torch', '')} has no CUDA"
        expected = "a torch built for CUDA"
        remedy = "install torch's CUDA wheel: https://pytorch.org/get-started"
    return Check("GPUs", "failure", problem, expected=expected, remedy=remedy)


def _check_usable(facts: Facts) -> Check:
    from cce_dist.backends.triton.launch.tiles import LEAST_CAPABILITY

    kinds = Counter(
        f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, compute capability {dotted(gpu.capability)}"
        for gpu in facts.gpus
    )
    remedy = ""
    if len(kinds) > 1:
        remedy = "the slowest GPU sets the pace: choose GPUs by CUDA_VISIBLE_DEVICES"
    if any(gpu.capability < LEAST_CAPABILITY for gpu in facts.gpus):
        remedy = "eager torch computes the loss on the older GPUs, slower and in more memory"
    return make_check(
        "GPUs",
        not remedy,
        "; ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        expected=f"compute capability >= {dotted(LEAST_CAPABILITY)}, of one kind; tuned for 9.0",
        remedy=remedy,
        otherwise="warning",
    )
