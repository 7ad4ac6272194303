"""Filter and LossOptions: what they hold, and what they refuse."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cce_dist import Filter, LossOptions
from cce_dist.algorithm.plan import Plan
from cce_dist.frontend.inputs import options_of
from cce_dist.options import AUTO_KEEP_ORDERED


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        pytest.param({"keep": -0.1}, r"Filter.keep must be >= 0.*-0\.1", id="keep_negative"),
        pytest.param({"keep": 129}, r"Filter.keep must be .*\[0, 128\].*129", id="keep_large"),
        pytest.param({"keep": float("nan")}, r"Filter.keep must be a finite", id="keep_nan"),
        pytest.param({"keep": "all"}, r"Filter.keep must be .*'all'", id="keep_str"),
        pytest.param({"keep": None}, r"Filter.keep must be .*None", id="keep_none"),
        pytest.param({"keep": True}, r"Filter.keep must be .*True", id="keep_bool"),
        pytest.param({"tail": 1}, r"Filter.tail must be True or False.*1", id="tail_int"),
        pytest.param({"draw": 1}, r"Filter.draw must be True or False.*1", id="draw_int"),
        pytest.param({"draw": "yes"}, r"Filter.draw must be True or False.*'yes'", id="draw_str"),
        pytest.param({"eps": -1e-3}, r"Filter.eps must be >= 0", id="eps_negative"),
        pytest.param({"eps": 1.5}, r"Filter.eps must be a probability.*1\.5", id="eps_large"),
        pytest.param({"eps": "auto"}, r"Filter.eps must be a finite.*'auto'", id="eps_str"),
        pytest.param(
            {"eps": 0.1, "keep": 0.1}, r"Filter.keep and Filter.eps exclude each other", id="both"
        ),
    ],
)
def test_filter_refuses(values: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        Filter(**values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"keep": 0},
        {"keep": 128},
        {"keep": 2**-9},
        {"draw": False},
        {"eps": 0},
        {"eps": 1, "tail": False},
    ],
    ids=str,
)
def test_filter_is_a_value(values: dict[str, Any]) -> None:
    made = Filter(**values)
    assert made == Filter(**values) and hash(made) == hash(Filter(**values))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.keep = 0.5


@pytest.mark.parametrize(
    ("dtype", "mass", "ordered"),
    [
        pytest.param("bfloat16", 2**-10.5, 2**-9.5, id="bf16"),
        pytest.param("float16", 2**-14, 2**-13.5, id="fp16"),
        pytest.param("float32", 2**-24 * 128 / 8192, 2**-24 * 128 / 8192, id="fp32"),
        pytest.param("float64", 2**-53 * 128 / 8192, 2**-53 * 128 / 8192, id="float64"),
    ],
)
def test_filter_threshold(dtype: str, mass: float, ordered: float) -> None:
    assert Filter().threshold(dtype, 8192) == mass
    assert Filter().threshold(dtype, 8192, ordered_tokens=1024) == ordered
    assert Filter().threshold(dtype, 8192, ordered_tokens=65536) == ordered
    if dtype in AUTO_KEEP_ORDERED:
        # One block of tokens has no order.
        assert Filter().threshold(dtype, 8192, ordered_tokens=128) == ordered / 8
    assert Filter().threshold(dtype, 4095) == 0 and Filter().threshold(dtype, 4096) > 0
    assert Filter(keep=0.25).threshold(dtype, 5, ordered_tokens=1) == 0.25
    assert Filter(eps=2**-12).threshold(dtype, 5) == 2**-12


def test_loss_options_defaults_are_those_of_the_function() -> None:
    made = LossOptions()
    assert made.reduction == "mean" and made.gradient == "filtered" and made.filter == Filter()
    assert made.ignore_index == -100 and made.workspace_bytes is None and made.stats == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.shift = 1


@pytest.mark.parametrize(
    ("workspace_bytes", "num_tokens", "expected"),
    [
        (None, 1, 2**26),
        (None, 8192, 2**26),
        (None, 8193, 2**26 + 2**13),
        (None, 65536, 2**29),
        (2**20, 65536, 2**20),
        (2**30, 1, 2**30),
    ],
)
def test_the_workspace_grows_with_the_tokens_unless_it_is_given(
    workspace_bytes: int | None, num_tokens: int, expected: int
) -> None:
    assert LossOptions(workspace_bytes=workspace_bytes).workspace_for(num_tokens) == expected


@pytest.mark.parametrize(
    ("options", "num_tokens", "columns", "expected"),
    [
        ({"logits": "full"}, 8192, 2**18, 2**26),
        ({"logits": "screened"}, 8192, 2**18, 17 * 2**23),
        ({"logits": "screened"}, 1024, 2**18, 2**26),
        ({"logits": "screened"}, 65536, 2**22, 17 * 2**26),
        # No more than the 8-bit copy of the weight, nor less than without it.
        ({"logits": "screened"}, 8192, 2**17, 2**27),
        ({"logits": "screened"}, 8192, 100_000, 100_000 * 1024),
        ({"logits": "screened"}, 8192, 2**14, 2**26),
        ({"logits": "screened", "workspace_bytes": 2**20}, 8192, 2**18, 2**20),
    ],
)
def test_the_workspace_of_screened_logits(
    options: dict[str, Any], num_tokens: int, columns: int, expected: int
) -> None:
    backend: Any = SimpleNamespace(traits=SimpleNamespace(in_forward_filters=True))
    made: Any = LossOptions(**options), None, None, backend, None, 1.0
    head: Any = SimpleNamespace(weight=torch.empty(columns, 1024, device="meta"))
    assert Plan(*made).workspace_bytes(num_tokens, head) == expected


@pytest.mark.parametrize(
    ("values", "filters"),
    [
        pytest.param({}, True, id="default"),
        pytest.param({"gradient": "exact"}, False, id="exact"),
        # Of a backend that keeps no logits: sharded.Plan.
        pytest.param({"gradient": "in_forward"}, True, id="in_forward"),
        pytest.param(
            {"gradient": "in_forward", "filter": Filter(keep=0)}, False, id="in_forward_keep_0"
        ),
        pytest.param(
            {"gradient": "in_forward", "softcap": 2.0, "label_smoothing": 0.1},
            False,
            id="in_forward_every_column",
        ),
        pytest.param({"filter": Filter(keep=0)}, False, id="keep_0"),
        pytest.param({"filter": Filter(eps=0)}, False, id="eps_0"),
        pytest.param({"filter": Filter(keep=0.1)}, True, id="keep"),
    ],
)
def test_loss_options_filters(values: dict[str, Any], filters: bool) -> None:
    assert LossOptions(**values).filters == filters


@pytest.mark.parametrize(
    ("values", "draws"),
    [
        pytest.param({}, True, id="default"),
        pytest.param({"keep": 0.1}, True, id="keep"),
        pytest.param({"draw": False}, False, id="draw_false"),
        pytest.param({"tail": False}, False, id="no_tail"),
        pytest.param({"eps": 0.1}, False, id="eps"),
    ],
)
def test_loss_options_draws(values: dict[str, Any], draws: bool) -> None:
    assert LossOptions(filter=Filter(**values)).draws == draws


@pytest.mark.parametrize("gradient", ["exact", "in_forward"])
def test_loss_options_admit_softcap_with_label_smoothing(gradient: str) -> None:
    LossOptions(softcap=30.0, label_smoothing=0.1, gradient=gradient)
    LossOptions(softcap=30.0, label_smoothing=0.1, filter=Filter(keep=0))


def test_options_of_equal_values_are_checked_once() -> None:
    assert options_of(softcap=30.0, stats=("lse",)) is options_of(softcap=30.0, stats=("lse",))
    # Equal numbers of other types are other values: a bool is no number here.
    with pytest.raises(ValueError, match="shift must be an int, got True"):
        options_of(shift=True)
    assert options_of(shift=1).shift == 1
    with pytest.raises(ValueError, match="every entry of stats"):
        options_of(stats=(["lse"],))


def test_options_of_a_tensor_follow_its_value() -> None:
    softcap = torch.tensor(30.0)
    assert options_of(softcap=softcap).softcap == 30.0
    softcap.fill_(20.0)
    assert options_of(softcap=softcap).softcap == 20.0
