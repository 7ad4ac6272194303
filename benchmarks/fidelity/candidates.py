"""Methods by name, the thresholds at which they are measured, and what reaches a threshold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from cce_dist import Filter, LinearCrossEntropy, Screen, VocabShard
from cce_dist.algorithm.plan import plan_of
from cce_dist.backends.triton.launch.tiles import why_not
from cce_dist.bench.golden import LossFunction
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.methods import METHODS as LOSSES
from cce_dist.bench.rank_methods import Setup
from cce_dist.core.types import Tokens
from cce_dist.options import TOKEN_BLOCK, Backend

SCREENED, NO_TAIL = "screened", "no-tail"
# Our methods whose threshold is a column's mass in a block of 128 tokens, `Filter.keep`.
OVER_MASS = ("filtered", NO_TAIL, SCREENED)
# Apple's presets, which have a filter of their own.
APPLE = ("cce", "cce-kahan-full-c")
METHODS = ("dense", "exact", "in_forward", *OVER_MASS, *APPLE)
DEFAULT_KEEP = tuple(2.0**power for power in range(-13, -4))


def build_loss(
    name: str,
    keep: float | Literal["auto"] = "auto",
    *,
    screen: Screen | None = None,
    backend: Backend = "auto",
) -> LossFunction:
    """Returns the loss of one of METHODS; with `screen` a screened one says what was screened."""
    if name not in OVER_MASS:
        return LOSSES[name].build(Setup(backend))
    ours = functools.partial(LinearCrossEntropy, backend=backend)
    rule = Filter(keep=keep, tail=name != NO_TAIL)
    if name != SCREENED:
        return ours(filter=rule)
    if torch.cuda.is_available():
        # A CPU needs no Triton.
        from cce_dist.backends.triton.screened.quantize import screen_small_calls

        # What 8 bits do is asked, and not whether they pay.
        screen_small_calls()
    if screen is None:
        return ours(filter=rule, logits="screened")
    return ours(filter=rule, logits="screened", screen=screen, stats=("screened",))


@dataclass(frozen=True)
class Candidate:
    """A method at one threshold; `keep` is None if the method has none of ours.

    Args:
        default: the threshold is the method's default.
    """

    method: str
    build: Callable[[], LossFunction]
    keep: float | None = None
    default: bool = False

    @property
    def name(self) -> str:
        return self.method + ("" if self.keep is None else f" at {self.keep:.6g}")

    @property
    def may_fail(self) -> bool:
        """Tells whether the method may be missing or refuse; its failure is then recorded."""
        return self.method in (SCREENED, *APPLE)


def choose_names(names: Sequence[str], with_apple: bool) -> list[str]:
    """Returns the names in the order of METHODS; without `names` all, Apple's if `with_apple`.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = sorted(set(names) - set(METHODS))
    if unknown:
        raise ValueError(f"method must be among {list(METHODS)}, got {unknown}")
    wanted = names or [name for name in METHODS if with_apple or name not in APPLE]
    return [name for name in METHODS if name in wanted]


def candidates_of(
    names: Sequence[str], inputs: BenchInputs, keeps: Sequence[float], backend: Backend
) -> list[Candidate]:
    """Returns each method's candidates: its default threshold first, then `keeps`, rising.

    A method without a threshold is a single candidate.
    """
    default = default_keep(inputs, backend)
    candidates = []
    for name in names:
        build = functools.partial(build_loss, name, backend=backend)
        if name not in OVER_MASS:
            candidates.append(Candidate(name, build))
            continue
        candidates.append(Candidate(name, build, default, True))
        for keep in sorted(set(keeps) - {default}):
            candidates.append(Candidate(name, functools.partial(build, keep), keep))
    return candidates


def default_keep(inputs: BenchInputs, backend: Backend) -> float:
    """Returns the threshold that `Filter()` has for these inputs."""
    shard = VocabShard(0, len(inputs.weight), len(inputs.weight))
    options = LinearCrossEntropy(backend=backend).options
    return plan_of(inputs.hidden, len(inputs.targets), options, None, shard).threshold


@torch.no_grad()
def shares_kept(inputs: BenchInputs, keeps: Sequence[float]) -> list[float]:
    """Returns for each threshold the share of all blocks' columns whose true mass reaches it.

    Targets' columns count as kept. The filter keeps a few more, since its forward knows only an
    upper bound of the mass. If backend "triton" runs here, blocks follow its order of the tokens;
    else they follow the order of `inputs`.
    """
    valid = inputs.without_ignored()
    if why_not(valid.hidden) is None and len(valid.targets) > TOKEN_BLOCK:
        from cce_dist.backends.triton.tokens.order import similar_order

        order = similar_order(Tokens(valid.hidden, None, valid.targets))
        valid = replace(valid, hidden=valid.hidden[order], targets=valid.targets[order])
    kept, total = [0] * len(keeps), 0
    weight = valid.weight.float()
    blocks = zip(valid.hidden.split(TOKEN_BLOCK), valid.targets.split(TOKEN_BLOCK), strict=True)
    for hidden, ids in blocks:
        mass = (hidden.float() @ weight.T).softmax(-1).sum(0)
        mass[ids] = TOKEN_BLOCK
        total += len(mass)
        kept = [count + int((mass >= keep).sum()) for count, keep in zip(kept, keeps, strict=True)]
    return [count / total for count in kept]
