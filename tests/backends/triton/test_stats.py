"""The Triton backend's own edges: tile shapes, blocks of tokens, workspaces, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, Screen
from cce_dist.options import DRAW_FACTOR
from cce_dist.testing import (
    DTYPES,
    TRITON_CPU,
    TRITON_CUDA,
    TRITON_PLACES,
    Case,
    Place,
    check_gate,
    check_outputs,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    pairwise,
    run_case,
    zipf_inputs,
)
from tests.backends.triton.triton_cases import WAYS, give_programs
from tests.support.loss_cases import generator


@pytest.mark.parametrize("splits", [1, 7, 8, 9, 19])
@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_what_splits_have_summed_is_merged(place: Place, splits: int) -> None:
    """Of two blocks; some have summed nothing, in one the sum overflowed."""
    from cce_dist.backends.triton.kernels.forward.bounds import bound_kernel
    from cce_dist.backends.triton.kernels.forward.launches import LAST, SLOTS

    tokens, num = 128, 200
    size = 20 * 2 * tokens
    state = torch.full((SLOTS.value, 4, size), float("nan"))
    launch = LAST.value - 1
    ref, part = state[launch, :2, : splits * 2 * tokens].view(2, splits, 2 * tokens)
    ref.copy_(40 * torch.randn(ref.shape, generator=generator()))
    part.copy_(torch.rand(part.shape, generator=generator()) + 0.1)
    part[0, :50] = 0
    part[splits // 2, 40:90] = float("inf")
    lower = torch.full((2 * tokens,), -1e30)
    known = torch.where(
        (part > 0) & (part < float("inf")), ref.double() + part.double().log2(), -1e30
    )
    top = known.amax(0)
    expected = top + (known - top).exp2().sum(0).log2()
    shape = torch.tensor([2, splits, 2], dtype=torch.int32)
    shape, lower, state = (tensor.to(place.device) for tensor in (shape, lower, state))
    bound = lower.new_full((num,), float("nan"))
    bound_kernel[(2,)](
        *(shape, lower, state, shape, bound, launch, size, num), BLOCK_N=tokens, HAS_ORDER=False
    )
    torch.testing.assert_close(bound.cpu().double(), expected[:num], rtol=1e-6, atol=1e-5)


# -- shapes -------------------------------------------------------------------------------------

EDGES = {
    "num_tokens": (1, 7, 127, 128, 129, 300),  # around a block of 128, and three of them
    "num_classes": (1, 255, 256, 257, 1000),  # around a tile of 256, and several
    "dim": (1, 7, 16, 37, 64, 130),  # below 16, multiples of 16, and more than one step
    "layout": ("plain", "hidden_of_batches", "padded_rows", "weight_transposed"),
    "way": ("exact", "in_forward", "filtered"),
}
SHAPES = [
    pytest.param(place, row, id="-".join([str(place), *map(str, row.values())]))
    for place in TRITON_PLACES
    for row in pairwise({**EDGES, "dtype": place.dtypes})
]


@pytest.mark.parametrize(("place", "row"), SHAPES)
def test_triton_shapes(place: Place, row: dict[str, Any]) -> None:
    tokens, num_classes, dim = row["num_tokens"], row["num_classes"], row["dim"]
    inputs = gaussian_inputs(
        tokens, num_classes, dim, generator=generator(), dtype=DTYPES[row["dtype"]]
    )
    if row["layout"] == "hidden_of_batches":  # [T, B, D] seen as [B, T, D]
        hidden = inputs.hidden[None].expand(2, -1, -1).transpose(0, 1).contiguous()
        hidden = hidden.transpose(0, 1)
        targets = inputs.targets[None].expand(2, -1).clone()
        targets[1, ::2] = -100
        inputs = replace(inputs, hidden=hidden, targets=targets)
    elif row["layout"] == "padded_rows":
        weight = torch.nn.functional.pad(inputs.weight, (0, 5))[:, :-5]
        hidden = torch.nn.functional.pad(inputs.hidden, (0, 3))[:, :-3]
        inputs = replace(inputs, weight=weight, hidden=hidden)
    elif row["layout"] == "weight_transposed":
        inputs = replace(inputs, weight=inputs.weight.T.contiguous().T)
    # Everything is kept: the filter's own error is test_loss_filter's matter.
    options = {"filtered": {"filter": Filter(keep=1e-7)}}.get(row["way"], {"gradient": row["way"]})
    options = {**options, "reduction": "sum", "stats": ("lse",)}
    case = Case(inputs, options).at(place)
    outputs = run_case(None, case)
    if num_classes > 1:
        check_outputs(case, outputs)
        return
    check_outputs(case, outputs, but=("loss", "grad_hidden", "grad_weight"))
    golden, dense = golden_outputs(case), dense_outputs(case, torch.float32)
    lse = golden["lse"].abs().sum()
    check_gate("loss", outputs["loss"], golden["loss"], dense["loss"], scale=lse)
    for name in ("grad_hidden", "grad_weight"):  # 0, but for how lse is rounded
        assert float(outputs[name].abs().max()) <= 1e-5 * max(1.0, float(lse)), name


UNDRAWN = {**WAYS, "undrawn": {"filter": Filter(keep=0.05, draw=False)}}


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=UNDRAWN))
def test_triton_more_than_64_blocks(place: Place, way: dict[str, Any]) -> None:
    # 65 blocks that count: the marks of a column take a second word, a group of the tail nine.
    inputs = zipf_inputs(8400, 40, 4, generator=generator()).ignoring(generator(), 0.01)
    case = Case(inputs, {**way, "reduction": "sum", "stats": ("lse", "tail_mass")}).at(place)
    outputs = run_case(None, case)
    golden = golden_outputs(case)
    if "filter" not in way:
        check_outputs(case, outputs, but=("loss",))
        torch.testing.assert_close(outputs["loss"].double(), golden["loss"], rtol=1e-6, atol=0)
        return
    # As in test_loss_filter: d_logits are wrong by twice the mass that was dropped, at most; where
    # columns are drawn that bounds an average.
    mass, longest = outputs["tail_mass"].double(), float(inputs.weight.norm(dim=-1).max())
    error = (outputs["grad_hidden"] - golden["grad_hidden"]).norm(dim=-1)
    if way["filter"].draw:
        variance = 2 * DRAW_FACTOR * way["filter"].keep * float(mass.mean()) * (2 * longest) ** 2
        assert float(error.square().mean()) <= variance
    else:
        assert bool((error <= 2 * mass * longest + 1e-4).all())
    total = outputs["grad_weight"].sum(0).abs().max()
    assert float(total) < 1e-5 * float(inputs.hidden.norm(dim=-1).sum())


@pytest.mark.parametrize(
    **grid(places=TRITON_PLACES, keep=(0.002, 0.05, 1.0), dtype=("fp32", "fp16", "bf16"))
)
def test_triton_blocks_of_which_few_tokens_count(place: Place, keep: float, dtype: str) -> None:
    # 11 blocks, of which the last six hold no token that counts; a group of the tail mixes both.
    inputs = zipf_inputs(1300, 150, 16, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias").ignoring(generator(), 0.55)
    counts = inputs.targets != -100
    rest = replace(inputs, hidden=inputs.hidden[counts], targets=inputs.targets[counts])
    options = {"filter": Filter(keep=keep), "reduction": "sum", "stats": ("lse", "tail_mass")}
    found, golden = (
        run_case(None, Case(inputs, options).at(place)),
        golden_outputs(Case(inputs, {"reduction": "sum", "stats": ("lse",)})),
    )
    alone = run_case(None, Case(rest, options).at(place))
    for name in ("lse", "tail_mass", "grad_hidden"):
        assert not found[name][~counts].any(), name
        assert bool(found[name].isfinite().all()), name
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        expected = alone[name]
        ours = found[name][counts] if name == "grad_hidden" else found[name]
        unit = float(golden[name].norm())
        # Groups of blocks differ with the number of all tokens: so does what they approximate.
        mass = float(found["tail_mass"].double().sum() / counts.sum())
        difference = float((ours.double() - expected.double()).norm())
        assert difference <= (0.01 + mass) * unit, f"{name}: {difference / unit:.3e}"


@pytest.mark.parametrize(
    **grid(
        places=(TRITON_CPU,),
        ignored=(0.0, 0.6, 1.0),
        cached={"all": 2**20, "two_blocks": 2, "one_block": 1},
        stats={
            "plain": ("lse",),
            "merged_in_torch": ("lse", "entropy", "sum_p2", "correct", "logit_moments"),
        },
        way=WAYS,
    )
)
def test_triton_splits_follow_the_tokens_that_count(
    place: Place,
    ignored: float,
    cached: int,
    stats: tuple[str, ...],
    way: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Seven programs over the blocks that count, as a device would have: two splits or more, of
    # three blocks or of as many at a time as the cache holds.
    give_programs(monkeypatch, 7)
    monkeypatch.setattr(
        "cce_dist.backends.triton.forward.state.cached_blocks", lambda tensor, size, beside: cached
    )
    monkeypatch.setattr(
        "cce_dist.backends.triton.backward.exact.cached_blocks", lambda tensor, size: cached
    )
    inputs = gaussian_inputs(330, 2200, 16, generator=generator()).ignoring(generator(), ignored)
    if "filter" in way:
        way = {"filter": Filter(keep=1e-7)}
    case = Case(inputs, {**way, "reduction": "sum", "stats": stats}).at(place)
    check_outputs(case, run_case(None, case))


# -- workspace, microbatches --------------------------------------------------------------------


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=WAYS, dtype=("fp32", "fp16", "bf16")))
def test_triton_workspace_changes_rounding_only(
    place: Place, way: dict[str, Any], dtype: str
) -> None:
    # 2**16 bytes hold two tiles of 128 columns at the least: five chunks of 1100 columns.
    inputs = zipf_inputs(200, 1100, 24, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias")
    found, expected = (
        run_case(None, Case(inputs, {**way, "workspace_bytes": size}).at(place))
        for size in (2**16, 2**26)
    )
    for name in expected:
        unit = float(expected[name].abs().max())
        eps = torch.finfo(expected[name].dtype).eps
        difference = float((found[name].double() - expected[name].double()).abs().max())
        assert difference <= 4 * eps * unit, name


# With everything that has mass kept: what is, near the threshold, follows the size of tiles.
OTHER_GPUS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": Filter(keep=2e-4)},
    "exact": WAYS["exact"],
    "in_forward": {"gradient": "in_forward", "filter": Filter(keep=2e-4)},
    "screened": {
        "filter": Filter(keep=2e-4),
        "logits": "screened",
        "screen": Screen("e4m3", max_kept=1.0),
    },
}


@pytest.mark.interpreter
@pytest.mark.parametrize("way", OTHER_GPUS)
@pytest.mark.parametrize("name", ["sm80", "sm86", "sm100"])
def test_triton_tiles_of_other_gpus(monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> None:
    """Those of GPUs that the kernels are only compiled for, and no branches around products where
    there are none; several chunks."""
    asked = []

    def key_of(tensor: Tensor) -> tuple[str, int]:
        asked.append(tensor.dtype)
        return name, tensor.dtype.itemsize

    monkeypatch.setattr("cce_dist.backends.triton.launch.tiles.key_of", key_of)
    monkeypatch.setattr(
        "cce_dist.backends.triton.backward.filtered.takes_branches", lambda _: name != "sm100"
    )
    inputs = zipf_inputs(200, 1100, 40, generator=generator(), dtype=torch.float16)
    options = {**OTHER_GPUS[way], "workspace_bytes": 2**16}
    case = Case(inputs, options, upstream={"loss": 1024.0}).at(TRITON_CPU)
    found = run_case(None, case)
    assert asked
    check_outputs(case, found, but=("loss", "lse") if way == "screened" else ())


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("dtype", "words"),
    [("float64", "float64.*bf16, fp16 and fp32"), ("bf16", "no bf16 product")],
    ids=["float64", "bf16"],
)
def test_triton_refuses_what_it_cannot_interpret(dtype: str, words: str) -> None:
    inputs = gaussian_inputs(3, 5, 4, generator=generator(), dtype=DTYPES[dtype])
    with pytest.raises(ValueError, match=rf'backend="triton" cannot run.*{words}.*"torch"'):
        run_case(None, Case(inputs).at(TRITON_CPU))


def test_triton_refuses_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    inputs = gaussian_inputs(3, 5, 4, generator=generator())
    with pytest.raises(ValueError, match=r'"triton" cannot run.*(CUDA device|not installed)'):
        run_case(None, Case(inputs).at(TRITON_CPU))


@pytest.mark.gpu
def test_triton_refuses_float64_on_a_gpu() -> None:
    inputs = gaussian_inputs(3, 5, 4, generator=generator(), dtype=torch.float64)
    with pytest.raises(ValueError, match=r'"triton" cannot run.*float64'):
        run_case(None, Case(inputs).at(TRITON_CUDA))
