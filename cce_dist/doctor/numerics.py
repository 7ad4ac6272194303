"""A comparison of this machine's kernels with float64, by the tolerance rule of the tests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.doctor.check import Check, first_line
from cce_dist.doctor.facts import Facts
from cce_dist.testing.cases import Case, run_case
from cce_dist.testing.inputs import zipf_inputs
from cce_dist.testing.interpreter import speed_up_interpreter
from cce_dist.testing.places import (
    DTYPES,
    TORCH_CPU,
    TORCH_CUDA,
    TRITON_CPU,
    TRITON_CUDA,
    Place,
)
from cce_dist.testing.tolerance import check_outputs

GRADIENTS = ("filtered", "exact", "in_forward")
# Tokens, classes, dims. The filter drops columns from 4096 classes on; no size is a multiple of a
# tile's.
SHAPE = ((2, 200), 4500, 64)
INTERPRETED_SHAPE = ((2, 70), 4100, 16)
# The loss's upstream gradient. Like a loss scaler it lifts gradients above fp16's smallest number.
UPSTREAM = 1024.0
RULE = "errors within the rule of docs/design/loss.md#tolerances"


@dataclass
class Tried:
    """The results of a dtype in a place, by gradient mode."""

    # The error of each output over the allowed error.
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    not_started: list[str] = field(default_factory=list)
    seconds: float = 0.0


def places(facts: Facts) -> list[Place]:
    """Lists the places where the loss computes by default, and the interpreter if it is on."""
    if facts.gpus:
        from cce_dist.backends.triton.launch.tiles import why_not

        reason = why_not(torch.empty(0, device="cuda", dtype=torch.float16))
        return [TRITON_CUDA if reason is None and not interpreted() else TORCH_CUDA]
    return [TORCH_CPU, TRITON_CPU] if interpreted() and "triton" in facts.versions else [TORCH_CPU]


def check_numerics(facts: Facts, seconds: float) -> list[Check]:
    """Returns a row for each backend and dtype: every gradient mode, forward and all gradients.

    Args:
        seconds: no mode starts later; a row names the modes that did not start, and is "skipped".
    """
    deadline = time.perf_counter() + seconds
    speed_up_interpreter()
    checks = []
    for place in places(facts):
        for name in ("bf16", "fp32", "fp16"):
            if name in place.dtypes:
                checks.append(_row(place, name, _try(place, name, deadline), seconds))
    return checks


def _try(place: Place, dtype: str, deadline: float) -> Tried:
    tried = Tried()
    started = time.perf_counter()
    for gradient in GRADIENTS:
        if time.perf_counter() >= deadline:
            tried.not_started.append(gradient)
            continue
        try:
            case = make_case(place, dtype, gradient)
            tried.shares[gradient] = check_outputs(case, run_case(None, case))
        except Exception as error:
            # An AssertionError names the output and its error; any other error names the failure.
            is_wrong = isinstance(error, AssertionError)
            tried.failures[gradient] = str(error) if is_wrong else first_line(error)
    tried.seconds = time.perf_counter() - started
    return tried


def make_case(place: Place, dtype: str, gradient: str) -> Case:
    """Makes the same inputs for every mode: a trained model's softmax, some targets ignored."""
    tokens, num_classes, dim = INTERPRETED_SHAPE if place.interprets else SHAPE
    generator = torch.Generator().manual_seed(0)
    inputs = zipf_inputs(tokens, num_classes, dim, generator=generator, dtype=DTYPES[dtype])
    inputs = inputs.ignoring(generator, 0.2)
    options = {"gradient": gradient, "stats": ("lse",)}
    return Case(inputs, options, upstream={"loss": UPSTREAM}).at(place)


def _row(place: Place, dtype: str, tried: Tried, seconds: float) -> Check:
    largest = {name: max(shares.values()) for name, shares in tried.shares.items()}
    parts = [f"{name} {share:.2f}" for name, share in largest.items()]
    figures = f"{', '.join(parts)} of the allowed error, {tried.seconds:.1f} s" if parts else ""
    remedy = ""
    if tried.failures:
        wrong = "; ".join(f"{name}: {why}" for name, why in tried.failures.items())
        status, figures = "failure", f"{wrong}{'; ' if figures else ''}{figures}"
        remedy = "do not train with these kernels: report this, with the versions above"
    elif tried.not_started:
        late = f"{', '.join(tried.not_started)} not started within {seconds:g} s"
        status, figures = "skipped", f"{figures}; {late}" if figures else late
        # Compiled kernels stay in Triton's cache; nothing else does, and a busy CPU may be late.
        hint = "; compiled kernels are kept" if place.compiles else ", or fewer other processes"
        remedy = f"--seconds {max(2 * seconds, 60):g}{hint}"
    else:
        status = "ok"
    return Check(
        name=f"numerics {'interpreted' if place.interprets else place.backend} {dtype}",
        status=status,
        observed=figures,
        expected=RULE,
        remedy=remedy,
        numbers={
            "share": max(largest.values(), default=0.0),
            "shares": tried.shares,
            "failed": sorted(tried.failures),
            "not_started": tried.not_started,
            "wall_seconds": tried.seconds,
        },
    )
