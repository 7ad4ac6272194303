"""Filter(draw=True): the tail of the hidden gradient is right on average, and varies as little as
docs/design/filter.md#drawn-columns says; nothing else knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter
from cce_dist.backends.torch.filter import draw_levels_of
from cce_dist.core.types import Tokens
from cce_dist.options import DRAW_FACTOR
from cce_dist.testing import (
    CPU_PLACES,
    DTYPES,
    PLACES,
    TRITON_PLACES,
    Case,
    Place,
    gaussian_inputs,
    golden_outputs,
    grid,
    join_ranks,
    run_case,
    shared_pool,
    zipf_inputs,
)
from tests.support.grids import joined
from tests.support.loss_cases import generator

BLOCK = 128
SEEDS = (0, 1, -1, 123456789, -(2**31), 2**31 - 1)


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


# -- what is drawn, in float64 ------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A loss that drops much: inputs with a whole block of tokens and a part, and options."""

    maker: Any
    keep: float
    options: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    num_classes: int | None = None  # None: as many as the place is fit for

    def case(self, place: Place, *, draw: bool = True) -> Case:
        num_classes = self.num_classes or (600 if place.interprets else 1500)
        inputs = self.maker(200, num_classes, 16, generator=generator(), dtype=place.widest)
        # A bias for every test: what differs between seeds is a constant in it.
        inputs = replace(inputs, bias=torch.zeros(num_classes, dtype=place.widest))
        inputs = inputs.with_options(generator(), *self.tensors)
        options = {**self.options, "reduction": "sum", "stats": ("lse", "tail_mass")}
        filter = Filter(keep=self.keep, draw=draw)
        return Case(inputs, {**options, "filter": filter}).at(place)


PROBLEMS = {
    "zipf": Problem(zipf_inputs, 0.1),
    "nearly_all_dropped": Problem(gaussian_inputs, 0.5),
    "weights_z_loss": Problem(zipf_inputs, 0.1, {"z_loss": 0.1}, ("token_weight",)),
    "softcap_scale": Problem(zipf_inputs, 0.05, {"softcap": 4.0, "logit_scale": 1.5}),
    "smoothing": Problem(zipf_inputs, 0.3, {"label_smoothing": 0.1}, ("class_weight",)),
}
# "weights_z_loss" is of the same inputs as "zipf" and draws as many columns, by weights besides.
AVERAGED = {name: problem for name, problem in PROBLEMS.items() if name != "zipf"}
# Interpreted for long: of the other problems test_drawn_rows_of_d_logits_keep_their_sum shows the
# factors, which are those of a column that is drawn and of what replaces the others.
INTERPRETED = ("nearly_all_dropped", "softcap_scale")
# Triton's interpreter takes its centroids from some of so many columns.
SUMMED = {**PROBLEMS, "many_classes": Problem(zipf_inputs, 0.02, num_classes=4200)}


def in_blocks(case: Case, place: Place) -> Case:
    """The case with its tokens in the order in which the backend makes blocks of them."""
    if place.backend != "triton":
        return case
    from cce_dist.backends.triton.tokens.order import similar_order

    inputs = case.inputs
    hidden = inputs.hidden.to(place.device)
    targets = inputs.targets.to(place.device)
    order = similar_order(Tokens(hidden, None, targets)).cpu()
    weight = inputs.token_weight
    inputs = replace(
        inputs,
        hidden=inputs.hidden[order],
        targets=inputs.targets[order],
        token_weight=None if weight is None else weight[order],
    )
    return replace(case, inputs=inputs)


def golden_of(case: Case) -> dict[str, Tensor]:
    """Without statistics that the dense reference does not have."""
    return golden_outputs(replace(case, options={**case.options, "stats": ("lse",)}))


@dataclass(frozen=True)
class Softmax:
    """p softcap'(z) of every token and column, and what the loss multiplies it by."""

    slope_p: Tensor  # [N, V]
    pull: Tensor  # [N]

    @classmethod
    def of(cls, case: Case) -> Softmax:
        whole, options = case.inputs, case.options
        assert whole.bias is not None
        z = whole.hidden.double() @ whole.weight.double().T + whole.bias.double()
        slope = torch.ones_like(z)
        if "softcap" in options:
            z = options["softcap"] * torch.tanh(z / options["softcap"])
            slope = 1 - (z / options["softcap"]) ** 2
        scale = options.get("logit_scale", 1.0)
        lse = (scale * z).logsumexp(-1)
        nll = torch.ones_like(lse)
        smoothing = options.get("label_smoothing", 0.0)
        if whole.class_weight is not None:
            weights = whole.class_weight.double()
            nll = (1 - smoothing) * weights[whole.targets] + smoothing * weights.mean()
        pull = nll + 2 * options.get("z_loss", 0.0) * lse
        if whole.token_weight is not None:
            pull = pull * whole.token_weight.double()
        return cls((scale * z - lse[:, None]).exp() * slope, scale * pull)

    def variance(self, weight: Tensor, targets: Tensor, keep: float) -> Tensor:
        """Expected |error of grad_hidden|^2 of each token, [N], if masses are known exactly.

        A column of mass m, drawn with probability q = 2^-j, adds pull p / q (C_v - centroid) or
        nothing: the variance of that is (pull p)^2 (1 / q - 1) |C_v - centroid|^2.
        """
        found = torch.zeros_like(self.pull)
        for start in range(0, len(found), BLOCK):
            block = slice(start, start + BLOCK)
            p = self.slope_p[block]
            mass, full = p.sum(0), len(p) / BLOCK
            dropped = mass < keep * full
            dropped[targets[block]] = False
            level = (DRAW_FACTOR * keep * full / mass).log2().floor().clamp_min(0) + 1
            share = torch.where(dropped, mass, 0)
            centroid = (share / share.sum()) @ weight
            spread = (weight - centroid).square().sum(-1) * (2**level - 1) * dropped
            found[block] = self.pull[block] ** 2 * (p.square() @ spread)
        return found


def variance_bound(case: Case, tail_mass: Tensor) -> float:
    """Of the expected |error of grad_hidden|^2, averaged over tokens, by the reported tail mass.

    With top = DRAW_FACTOR keep: 1 / q <= 2 top / m and p <= m, so that sum_v p^2 (1 / q - 1) is
    at most 2 top times the token's dropped mass.
    """
    weight = case.inputs.weight.double()
    diameter = float(torch.cdist(weight, weight).max())
    pulled = (Softmax.of(case).pull ** 2 * tail_mass.double()).mean()
    return 2 * DRAW_FACTOR * case.options["filter"].keep * float(pulled) * diameter**2


# -- the estimate -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    **joined(
        grid(places=[x for x in PLACES if not x.interprets], problem=AVERAGED),
        grid(
            places=[x for x in PLACES if x.interprets],
            problem={name: PROBLEMS[name] for name in INTERPRETED},
        ),
    )
)
def test_drawn_hidden_gradient_is_right_on_average(place: Place, problem: Problem) -> None:
    num_seeds, most_errors = (16, 10.0) if place.interprets else (24, 5.0)
    # Which gradients are asked for changes no bit of another: test_local_triton_numbers.
    base = replace(problem.case(place), trainable=("hidden",))
    errors = []
    for seed in range(num_seeds):
        # The seed is of the data: a constant in the bias changes lse, and p not at all.
        assert base.inputs.bias is not None
        case = replace(base, inputs=replace(base.inputs, bias=base.inputs.bias + 0.01 * seed))
        outputs, golden = run_case(None, case), golden_of(case)
        errors.append(outputs["grad_hidden"].double() - golden["grad_hidden"])
        found = float(errors[-1].square().sum(-1).mean())
        assert 0 < found <= variance_bound(case, outputs["tail_mass"])
    every = torch.stack(errors)
    single, mean = rms(every), rms(every.mean(0))
    # Tokens of a block share what is drawn: few numbers are independent, and none is exact.
    assert mean <= 1.5 * single / num_seeds**0.5
    undrawn = run_case(None, problem.case(place, draw=False))
    systematic = undrawn["grad_hidden"].double() - golden_of(base)["grad_hidden"]
    assert mean < 0.8 * rms(systematic)
    # Columns that count half as often as they should leave half of that error.
    left = float((every.mean(0) * systematic).sum() / systematic.square().sum())
    assert abs(left) < (0.4 if place.interprets else 0.25)
    totals = every.sum(1)  # [seeds, D]
    standard_error = totals.std(0) / num_seeds**0.5
    assert bool((totals.mean(0).abs() <= most_errors * standard_error).all())
    # Recorded masses are upper bounds, and columns drawn in proportion to them: oftener than by
    # the mass itself, and by Triton, which knows no lse yet, far oftener.
    blocks = in_blocks(base, place)
    weight, targets = blocks.inputs.weight.double(), blocks.inputs.targets
    expected = float(Softmax.of(blocks).variance(weight, targets, problem.keep).mean())
    least = 0.3 if place.backend == "torch" else 0.05
    if place.backend == "torch" and problem.maker is gaussian_inputs:
        least = 0.8  # flat masses: the bounds are tight
    assert least * expected <= float(every.square().sum(-1).mean()) <= 1.25 * expected


@pytest.mark.parametrize(**grid(problem=PROBLEMS))
def test_drawn_columns_change_the_hidden_gradient_alone(place: Place, problem: Problem) -> None:
    drawn, undrawn = (run_case(None, problem.case(place, draw=draw)) for draw in (True, False))
    assert float(drawn["tail_mass"].mean()) > 0.01
    for name in ("loss", "lse", "tail_mass", "grad_weight", "grad_bias"):
        assert torch.equal(drawn[name], undrawn[name]), name
    assert not torch.equal(drawn["grad_hidden"], undrawn["grad_hidden"])


NOTHING_DRAWN = {
    "no_tail": {"keep": 0.1, "tail": False},
    "eps": {"eps": 2.0**-8},
    "eps_no_tail": {"eps": 2.0**-8, "tail": False},
    "keep_everything": {"keep": 0},
}


@pytest.mark.parametrize(**grid(filter=NOTHING_DRAWN))
def test_drawn_columns_need_a_tail_and_masses(place: Place, filter: dict[str, Any]) -> None:
    case = PROBLEMS["zipf"].case(place)
    drawn, undrawn = (
        run_case(
            None, replace(case, options={**case.options, "filter": Filter(**filter, draw=draw)})
        )
        for draw in (True, False)
    )
    for name in drawn:
        assert torch.equal(drawn[name], undrawn[name]), name


@pytest.mark.parametrize(**grid(problem=SUMMED))
def test_drawn_rows_of_d_logits_keep_their_sum(place: Place, problem: Problem) -> None:
    # A dim in which all columns of the weight are 1: its hidden gradient is the sum of d_logits.
    case = problem.case(place)
    weight = torch.nn.functional.pad(case.inputs.weight, (0, 1), value=1.0)
    hidden = torch.nn.functional.pad(case.inputs.hidden, (0, 1), value=0.25)
    case = replace(case, inputs=replace(case.inputs, weight=weight, hidden=hidden))
    outputs, golden = run_case(None, case), golden_of(case)
    assert float(outputs["tail_mass"].mean()) > 0.01
    error = (outputs["grad_hidden"].double() - golden["grad_hidden"]).abs()
    pull = Softmax.of(case).pull.abs()
    rounding = 1e-12 if place.widest == torch.float64 else 4e-6
    assert bool((error[:, -1] <= rounding * pull).all())
    assert float(error[:, :-1].amax()) > 100 * rounding, "nothing was drawn"


@pytest.mark.parametrize(**grid(dtype=("fp32", "bf16", "fp16", "float64")))
def test_drawn_columns_are_the_same_in_each_run(place: Place, dtype: str) -> None:
    inputs = zipf_inputs(200, 700, 16, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias").ignoring(generator(), 0.3)
    case = Case(inputs, {"filter": Filter(keep=0.1), "stats": ("lse", "tail_mass")}).at(place)
    first, second = run_case(None, case), run_case(None, case)
    assert float(first["tail_mass"].mean()) > 0.005
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize(**grid(places=CPU_PLACES, problem=("zipf", "weights_z_loss")))
def test_drawn_columns_on_a_group(place: Place, problem: str) -> None:
    def on_two_ranks(case: Case) -> dict[str, Tensor]:
        # That lse and grad_hidden are bitwise equal on both is asserted there.
        return join_ranks(case, shared_pool().run(2, run_case, case))

    case = PROBLEMS[problem].case(place)
    drawn, undrawn = on_two_ranks(case), on_two_ranks(PROBLEMS[problem].case(place, draw=False))
    for name in ("loss", "lse", "tail_mass", "grad_weight", "grad_bias"):
        assert torch.equal(drawn[name], undrawn[name]), name
    golden = golden_of(case)
    error = drawn["grad_hidden"].double() - golden["grad_hidden"]
    assert 0 < float(error.square().sum(-1).mean()) <= variance_bound(case, drawn["tail_mass"])
    assert rms(error) < 0.15 * rms(golden["grad_hidden"])


# -- levels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_levels_of_halve_from_level_to_level(seed: int) -> None:
    num_columns = 200_000
    levels = draw_levels_of(num_columns, torch.tensor([seed], dtype=torch.int32))
    assert levels.shape == (num_columns,) and int(levels.min()) == 1 and int(levels.max()) <= 24
    counts = torch.bincount(levels, minlength=25).double()
    expected = num_columns * 2.0 ** -torch.arange(25).double()
    # 5 standard deviations, and one column more where none is expected.
    assert bool(((counts - expected).abs()[1:] <= 5 * expected.sqrt()[1:] + 1).all())


def test_levels_of_two_seeds_are_independent() -> None:
    first, *others = (
        draw_levels_of(200_000, torch.tensor([seed], dtype=torch.int32)) for seed in SEEDS
    )
    for other in others:
        # sum_j 4^-j = 1/3 of the columns agree by chance.
        agree = float((first == other).double().mean())
        assert abs(agree - 1 / 3) < 5 * (2 / 9 / 200_000) ** 0.5


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, seed=SEEDS))
def test_marks_of_draws_the_levels_of_torch(place: Place, seed: int) -> None:
    from cce_dist.backends.triton.filter.marks import MassFactors, marks_of

    # Block n has masses of level n + 1 alone; a mass of the last one is a column's that is kept.
    num_levels, num_columns, threshold = 20, 3000, 1.0
    levels = torch.arange(1, num_levels + 1)
    mass = 1.5 * DRAW_FACTOR * threshold * 2.0**-levels
    mass = torch.cat([mass, torch.tensor([-1.0, 0.0])])[:, None].expand(-1, num_columns)
    num_blocks = len(mass)
    one_split = torch.tensor([num_blocks, 1, 1], dtype=torch.int32, device=place.device)
    marks = marks_of(
        mass.bfloat16().contiguous().to(place.device),
        MassFactors(torch.ones(num_blocks, 1, device=place.device), one_split, 128, 1),
        torch.tensor([num_blocks * BLOCK], dtype=torch.int32, device=place.device),
        torch.zeros(num_blocks * BLOCK, device=place.device),
        torch.tensor([seed], dtype=torch.int32, device=place.device),
        torch.bfloat16,
        threshold=threshold,
        draws=True,
    )
    assert marks.drawn.shape == (num_columns, 1)
    bits = marks.drawn.cpu() >> torch.arange(num_blocks) & 1
    expected = draw_levels_of(num_columns, torch.tensor([seed], dtype=torch.int32))
    assert torch.equal(bits[:, :num_levels].bool(), expected[:, None] == levels)
    assert not bits[:, num_levels:].any()
    kept = marks.kept.cpu() >> torch.arange(num_blocks) & 1
    assert bool(kept[:, num_levels].all()) and int(kept.sum()) == num_columns
