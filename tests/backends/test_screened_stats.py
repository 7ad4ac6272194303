"""Statistics beside screened logits: exact for the kept columns, of 8 bits for all others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, Screen, linear_cross_entropy
from cce_dist.testing import (
    CPU_PLACES,
    PLACES,
    Case,
    Inputs,
    Place,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    join_ranks,
    run_case,
    shared_pool,
    zipf_inputs,
)
from tests.backends.screened_cases import (
    EIGHT_BITS,
    EVERY_STAT,
    WIDE,
    WITH_STATS,
    check_stats,
    dtype_of,
    error_of,
    with_hits,
)
from tests.support.loss_cases import generator

pytest.importorskip("triton")
OPTIONS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "int8": (None, {}),
    "e4m3": (None, {"screen": replace(WIDE, dtype="e4m3")}),
    "softcap": (None, {"softcap": 6.0}),
    "softcap_scale_bias": ("bias", {"softcap": 8.0, "logit_scale": 1.3}),
    "negative_scale": (None, {"logit_scale": -0.9}),
    "by_largest": (None, {"filter": Filter(eps=2**-9)}),
}


@pytest.mark.parametrize(**grid(places=PLACES, options=OPTIONS))
def test_statistics_are_as_close_as_dense_16_bit_ones(
    place: Place, options: tuple[str | None, dict[str, Any]]
) -> None:
    bias, given = options
    inputs = zipf_inputs(300, 3000, 72, generator=generator(), dtype=dtype_of(place))
    if bias:
        made = 0.5 * torch.randn(3000, generator=generator(1))
        inputs = replace(inputs, bias=made.to(inputs.hidden.dtype))
    inputs = with_hits(inputs.ignoring(generator(4), 0.2), given)
    case = Case(inputs, {**WITH_STATS, **given}).at(place)
    outputs = run_case(None, case)
    check_stats(case, outputs)
    assert float(outputs["tail_mass"].mean()) > 0.003, "nothing was screened"


@pytest.mark.parametrize(**grid(places=PLACES, bits=EIGHT_BITS))
def test_statistics_at_odd_shapes(place: Place, bits: str) -> None:
    for num_tokens, num_columns, dim in ((1, 700, 24), (129, 1283, 17)):
        inputs = gaussian_inputs(
            num_tokens, num_columns, dim, generator=generator(), dtype=dtype_of(place)
        )
        case = Case(with_hits(inputs), {**WITH_STATS, "screen": replace(WIDE, dtype=bits)}).at(
            place
        )
        check_stats(case, run_case(None, case))


@pytest.mark.parametrize(**grid(places=PLACES))
def test_statistics_of_a_call_that_is_computed_in_full(place: Place) -> None:
    inputs = with_hits(zipf_inputs(150, 3000, 40, generator=generator(), dtype=dtype_of(place)))
    case = Case(inputs, {**WITH_STATS, "screen": Screen(max_error=0.0)}, backward=False).at(place)
    outputs = run_case(None, case)
    check_stats(case, outputs, screened=False)
    full = replace(case, options={"stats": EVERY_STAT, "filter": case.options["filter"]}).at(place)
    expected = run_case(None, full)
    for name in ("entropy", "sum_p2", "correct"):
        torch.testing.assert_close(outputs[name], expected[name], atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(**grid(places=CPU_PLACES, softcap={"linear": None, "softcap": 20.0}))
def test_statistics_on_a_group(place: Place, softcap: float | None) -> None:
    inputs = with_hits(zipf_inputs(150, 1500, 40, generator=generator(), dtype=torch.float16))
    options = {**WITH_STATS, "softcap": softcap}
    case = Case(inputs, options, bounds=((0, 900), (900, 900), (900, 1500))).at(place)
    check_stats(case, join_ranks(case, shared_pool().run(3, run_case, case)))


@pytest.mark.parametrize(**grid(places=PLACES))
def test_entropy_is_differentiable(place: Place) -> None:
    """Its gradient goes by kept columns and a tail, as that of full logits."""
    inputs = zipf_inputs(300, 3000, 40, generator=generator(), dtype=dtype_of(place))
    options = {**WITH_STATS, "filter": Filter(keep=2e-4)}
    case = Case(inputs, options, upstream={"loss": 1024.0, "entropy": 0.1}).at(place)
    outputs, golden, dense = run_case(None, case), golden_outputs(case), dense_outputs(case)
    assert bool(outputs["screened"].all())
    for name in ("grad_hidden", "grad_weight"):
        assert error_of(outputs, golden, name) <= 1.5 * error_of(dense, golden, name), name


@pytest.mark.parametrize(**grid(places=PLACES))
def test_of_equal_logits_the_first_is_correct(place: Place) -> None:
    """Kept columns whose products are equal to the bit."""
    inputs = zipf_inputs(130, 3000, 40, generator=generator(), dtype=dtype_of(place))
    weight = inputs.weight.clone()
    top = (inputs.hidden.double() @ weight.double().T).argmax(1)
    twin = (torch.arange(3000) + 1500) % 3000
    weight[1500:] = weight[:1500]
    low, high = torch.minimum(top, twin[top]), torch.maximum(top, twin[top])
    for targets, expected in ((low, True), (high, False)):
        given = Inputs(inputs.hidden, weight, targets)
        z = given.hidden.double() @ weight.double().T
        case = Case(given, {**WITH_STATS, "stats": ("lse", "screened", "correct")}, backward=False)
        outputs = run_case(None, case.at(place))
        assert bool(outputs["screened"].all())
        is_top = z.amax(1) == z.gather(1, targets[:, None])[:, 0]
        assert outputs["correct"].equal(is_top & expected)


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_a_largest_logit_in_the_tail_is_found(place: Place) -> None:
    """A filter that keeps targets alone: nothing else is known of the tail than 8 bits say."""
    inputs = with_hits(zipf_inputs(150, 1500, 40, generator=generator(), dtype=torch.float16))
    options = {**WITH_STATS, "filter": Filter(keep=100.0), "screen": Screen("int8", 1.0, 10.0)}
    case = Case(inputs, options, backward=False).at(place)
    outputs, golden = run_case(None, case), golden_outputs(case)
    assert bool(outputs["screened"].all())
    agrees = outputs["correct"] == golden["correct"].bool()
    assert float(agrees.float().mean()) > 0.97
    assert error_of(outputs, golden, "entropy") < 0.02


LOGITS: dict[str, dict[str, Any]] = {
    "screened": WITH_STATS,
    "filtered": {"stats": EVERY_STAT, "filter": WITH_STATS["filter"]},
    "exact": {"stats": EVERY_STAT, "gradient": "exact"},
}


@pytest.mark.parametrize(**grid(places=PLACES, logits=LOGITS))
def test_statistics_keep_nan(place: Place, logits: dict[str, Any]) -> None:
    inputs = zipf_inputs(40, 900, 24, generator=generator(), dtype=dtype_of(place))
    inputs.hidden[3, 5] = float("nan")
    leaves = (x.to(place.device) for x in (inputs.hidden, inputs.weight, inputs.targets))
    options = {**logits, "reduction": "none", "backend": place.backend}
    out: Any = linear_cross_entropy(*leaves, **options)
    for value in (out.loss, out.lse, out.entropy, out.sum_p2, *out.logit_moments):
        assert bool(value[3].isnan()) and bool(value[:3].isfinite().all())
    assert not bool(out.correct[3])
