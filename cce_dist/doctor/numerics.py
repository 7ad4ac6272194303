"""A comparison of this machine's kernels with float64, by the tolerance rule of the tests."""

from __future__ import annotations

import time

import torch

from cce_dist.backends.triton.launch.tiles import interpreted, why_not
from cce_dist.doctor.check import Check, Status
from cce_dist.doctor.facts import Facts
from cce_dist.testing.cases import Case, run_case
from cce_dist.testing.inputs import zipf_inputs
from cce_dist.testing.interpreter import speed_up_interpreter
from cce_dist.testing.places import CPU_PLACES, DTYPES, TORCH_CUDA, TRITON_CUDA, Place
from cce_dist.testing.tolerance import check_outputs
from cce_dist.train.errors import first_line

GRADIENTS = ("filtered", "exact", "in_forward")
# Tokens, classes, dims. The filter drops columns from 4096 classes on; no size is a multiple of a
# tile's.
SHAPE = ((2, 200), 4500, 64)
INTERPRETED_SHAPE = ((2, 70), 4100, 16)
# The loss's upstream gradient. Like a loss scaler it lifts gradients above fp16's smallest number.
UPSTREAM = 1024.0
RULE = "errors within the rule of docs/design/loss.md#tolerances"


def places(facts: Facts) -> list[Place]:
    """Lists the places where the loss computes by default, and the interpreter if it is on."""
    if not facts.gpus:
        return list(CPU_PLACES[: 2 if interpreted() and "triton" in facts.versions else 1])
    reason = why_not(torch.empty(0, device="cuda", dtype=torch.float16))
    return [TRITON_CUDA if reason is None and not interpreted() else TORCH_CUDA]


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
                checks.append(_row(place, name, seconds, deadline))
    return checks


def make_case(place: Place, dtype: str, gradient: str) -> Case:
    """Makes the same inputs for every mode: a trained model's softmax, some targets ignored."""
    tokens, num_classes, dim = INTERPRETED_SHAPE if place.interprets else SHAPE
    generator = torch.Generator().manual_seed(0)
    inputs = zipf_inputs(tokens, num_classes, dim, generator=generator, dtype=DTYPES[dtype])
    inputs = inputs.ignoring(generator, 0.2)
    options = {"gradient": gradient, "stats": ("lse",)}
    return Case(inputs, options, upstream={"loss": UPSTREAM}).at(place)


def _row(place: Place, dtype: str, seconds: float, deadline: float) -> Check:
    # By gradient mode: the error of each output over the allowed error; or why it failed.
    shares: dict[str, dict[str, float]] = {}
    failures: dict[str, str] = {}
    started = time.perf_counter()
    not_started = []
    for gradient in GRADIENTS:
        if time.perf_counter() >= deadline:
            not_started.append(gradient)
            continue
        try:
            case = make_case(place, dtype, gradient)
            shares[gradient] = check_outputs(case, run_case(None, case))
        except AssertionError as error:  # names the output and its error
            failures[gradient] = str(error)
        except Exception as error:
            failures[gradient] = first_line(error)
    wall = time.perf_counter() - started
    largest = {name: max(of_outputs.values()) for name, of_outputs in shares.items()}
    texts = [f"{name}: {why}" for name, why in failures.items()]
    if largest:
        parts = [f"{name} {share:.2f}" for name, share in largest.items()]
        texts.append(f"{', '.join(parts)} of the allowed error, {wall:.1f} s")
    status: Status = "ok"
    remedy = ""
    if failures:
        status = "failure"
        remedy = "do not train with these kernels: report this, with the versions above"
    elif not_started:
        status = "skipped"
        texts.append(f"{', '.join(not_started)} not started within {seconds:g} s")
        # Compiled kernels stay in Triton's cache; nothing else does, and a busy CPU may be late.
        hint = "; compiled kernels are kept" if place.compiles else ", or fewer other processes"
        remedy = f"--seconds {max(2 * seconds, 60):g}{hint}"
    return Check(
        f"numerics {'interpreted' if place.interprets else place.backend} {dtype}",
        status,
        "; ".join(texts),
        expected=RULE,
        remedy=remedy,
        numbers={
            "share": max(largest.values(), default=0.0),
            "shares": shares,
            "failed": sorted(failures),
            "not_started": not_started,
            "wall_seconds": wall,
        },
    )
