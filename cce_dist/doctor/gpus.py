"""The NVIDIA driver and the GPUs."""

from __future__ import annotations

from cce_dist.doctor.check import Check
from cce_dist.doctor.facts import Facts, Gpu, numbers_of

# The oldest driver for CUDA of a major version:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
GIB = 2**30


def check_driver(facts: Facts) -> Check:
    """Checks that the driver is new enough for the CUDA of torch."""
    if facts.driver is None and facts.gpus:
        unknown = "of unknown version: neither /proc/driver/nvidia nor nvidia-smi states it"
        return Check(
            name="driver", status="warning", observed=unknown, remedy="put nvidia-smi on PATH"
        )
    if facts.driver is None:
        return Check(
            name="driver",
            status="skipped",
            observed="no NVIDIA driver: eager torch computes the loss on the CPU",
        )
    cuda = facts.cuda or ""
    oldest = OLDEST_DRIVER.get((numbers_of(cuda) or (0,))[0])
    driver = (numbers_of(facts.driver) or (0,))[0]
    expected = f">= {oldest} for CUDA {cuda}" if oldest else ""
    too_old = oldest is not None and driver < oldest
    # An older driver works with NVIDIA's compatibility package: torch then finds its GPUs.
    status = "ok" if not too_old else "warning" if facts.gpus else "failure"
    return Check(
        name="driver",
        status=status,
        observed=facts.driver,
        expected=expected,
        remedy="update the driver, or install a torch for an older CUDA" if too_old else "",
    )


def check_gpus(facts: Facts) -> Check:
    """Checks that torch can use the GPUs; shows names, memory and compute capability."""
    if facts.gpus:
        return _check_usable(facts)
    if facts.driver is None:
        return Check(name="GPUs", status="skipped", observed="none")
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if hidden in ("", "-1"):
        return Check(
            name="GPUs",
            status="skipped",
            observed=f"hidden by CUDA_VISIBLE_DEVICES={hidden}: the loss is computed on the CPU",
        )
    if facts.cuda is None:
        return Check(
            name="GPUs",
            status="failure",
            observed=f"an NVIDIA driver, but torch {facts.versions.get('torch', '')} has no CUDA",
            expected="a torch built for CUDA",
            remedy="install torch's CUDA wheel: https://pytorch.org/get-started",
        )
    return Check(
        name="GPUs",
        status="failure",
        observed=f"torch can use none: {facts.why_no_gpu or 'it counts 0'}",
        expected="at least one",
        remedy="see whether nvidia-smi lists GPUs, and whether the container was given any",
    )


def _check_usable(facts: Facts) -> Check:
    from cce_dist.backends.triton.launch.tiles import LEAST_CAPABILITY

    kinds: dict[str, int] = {}
    for gpu in facts.gpus:
        kind = f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, compute capability {_dotted(gpu)}"
        kinds[kind] = kinds.get(kind, 0) + 1
    remedy = ""
    if len(kinds) > 1:
        remedy = "the slowest GPU sets the pace: choose GPUs by CUDA_VISIBLE_DEVICES"
    if any(gpu.capability < LEAST_CAPABILITY for gpu in facts.gpus):
        remedy = "eager torch computes the loss on the older GPUs, slower and in more memory"
    least = ".".join(str(number) for number in LEAST_CAPABILITY)
    return Check(
        name="GPUs",
        status="warning" if remedy else "ok",
        observed="; ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        expected=f"compute capability >= {least}, of one kind; tuned for 9.0",
        remedy=remedy,
    )


def _dotted(gpu: Gpu) -> str:
    return ".".join(str(number) for number in gpu.capability)
