"""Methods and thresholds that `cce-dist bench fidelity` compares with float64."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.fidelity.kept import default_keep
from cce_dist import Filter, LinearCrossEntropy
from cce_dist.bench.golden import LossFunction, dense_loss
from cce_dist.bench.inputs import IGNORE_INDEX, BenchInputs
from cce_dist.options import Backend

DENSE = "dense"
# Values of `gradient` that are run without a list of thresholds.
WITHOUT_THRESHOLD = ("exact", "in_forward")
SCREENED, NO_TAIL = "screened", "no-tail"
# Our methods whose threshold is a column's mass in a block, `Filter.keep`.
OVER_MASS = ("filtered", NO_TAIL, SCREENED)
# Apple's methods, whose threshold filter_eps is a probability, with the other options of Apple's
# function; the second is the preset cce_kahan_full_c.
OVER_PROBABILITY: dict[str, dict[str, Any]] = {
    "cce": {},
    "cce-kahan-full-c": {"accum_e_fp32": True, "accum_c_fp32": True, "filter_c_grad": False},
}
METHODS = (DENSE, *WITHOUT_THRESHOLD, *OVER_MASS, *OVER_PROBABILITY)
# Methods that may be missing or refuse: their failure is recorded, not raised.
MAY_FAIL = (SCREENED, *OVER_PROBABILITY)

# 2^-13 to 2^-5 and, around Apple's default in bf16, 2^-18 to 2^-6.
DEFAULT_KEEP = tuple(2.0**power for power in range(-13, -4))
DEFAULT_EPS = tuple(2.0**power for power in (-18, -16, -14, -10, -8, -6))


@dataclass(frozen=True)
class Candidate:
    """A method at one threshold.

    Args:
        by: the number that is compared with the threshold: a column's mass in a block of 128
            tokens, or a single probability; None: there is no threshold.
        default: the threshold is the method's default.
    """

    method: str
    build: Callable[[], LossFunction]
    threshold: float | None = None
    by: Literal["mass", "probability"] | None = None
    default: bool = False


def choose_names(names: Sequence[str], with_apple: bool) -> list[str]:
    """Returns the names in the order of METHODS; without `names` all, Apple's if `with_apple`.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = sorted(set(names) - set(METHODS))
    if unknown:
        raise ValueError(f"method must be among {list(METHODS)}, got {unknown}")
    wanted = names or [name for name in METHODS if with_apple or name not in OVER_PROBABILITY]
    return [name for name in METHODS if name in wanted]


def candidates_of(
    names: Sequence[str],
    inputs: BenchInputs,
    keeps: Sequence[float],
    epsilons: Sequence[float],
    backend: Backend,
) -> list[Candidate]:
    """Returns each method's candidates: its default threshold first, then the listed ones, rising.

    A method without a threshold is a single candidate.
    """
    candidates = []
    for name in names:
        if name == DENSE:
            candidates.append(Candidate(name, lambda: dense_loss))
        elif name in WITHOUT_THRESHOLD:
            build = functools.partial(LinearCrossEntropy, gradient=name, backend=backend)
            candidates.append(Candidate(name, build))
        elif name in OVER_MASS:
            candidates += _over_mass(name, inputs, keeps, backend)
        else:
            candidates += _over_probability(name, inputs, epsilons)
    return candidates


def _over_mass(
    name: str, inputs: BenchInputs, keeps: Sequence[float], backend: Backend
) -> list[Candidate]:
    logits = "screened" if name == SCREENED else "full"

    def candidate(threshold: float, default: bool = False) -> Candidate:
        def build() -> LossFunction:
            rule = Filter(keep="auto" if default else threshold, tail=name != NO_TAIL)
            return LinearCrossEntropy(filter=rule, logits=logits, backend=backend)

        return Candidate(name, build, threshold, "mass", default)

    default_threshold = default_keep(inputs, backend)
    return [
        candidate(default_threshold, True),
        *(candidate(keep) for keep in sorted(set(keeps) - {default_threshold})),
    ]


def _over_probability(name: str, inputs: BenchInputs, epsilons: Sequence[float]) -> list[Candidate]:
    def candidate(threshold: float, default: bool = False) -> Candidate:
        build = functools.partial(_build_apple, name, "auto" if default else threshold)
        return Candidate(name, build, threshold, "probability", default)

    default_threshold = torch.finfo(inputs.hidden.dtype).eps / 32
    return [
        candidate(default_threshold, True),
        *(candidate(eps) for eps in sorted(set(epsilons) - {default_threshold})),
    ]


def _build_apple(name: str, filter_eps: float | Literal["auto"]) -> LossFunction:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return functools.partial(
        function,
        ignore_index=IGNORE_INDEX,
        impl="cce",
        filter_eps=filter_eps,
        **OVER_PROBABILITY[name],
    )
