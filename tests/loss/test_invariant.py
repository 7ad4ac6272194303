"""invariant=True: a token's bytes in other batches, in any order, and on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cce_dist import Filter, VocabShard, linear_cross_entropy, token_logprobs
from cce_dist.testing import (
    CPU_PLACES,
    DTYPES,
    TORCH_CPU,
    TRITON_CUDA,
    Case,
    Place,
    RankError,
    RankPool,
    check_outputs,
    gaussian_inputs,
    join_ranks,
    nccl_pool,
    run_case,
)
from cce_dist.testing.inputs import Inputs
from tests.support.grids import paired_grid

STATS = ("lse", "entropy", "correct", "logit_moments", "sum_p2")
OPTIONS = {"reduction": "none", "stats": STATS, "invariant": True}
PLACES = (*CPU_PLACES, TRITON_CUDA)
DIM = 24


def inputs_of(tokens: int, classes: int, dtype: torch.dtype, dim: int = DIM) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    inputs = gaussian_inputs(tokens, classes, dim, generator=generator, dtype=torch.float64)
    inputs = inputs.with_options(generator, "bias").ignoring(generator, 0.2)
    assert inputs.bias is not None
    # Peaked for some tokens, flat for others.
    hidden = 4 * torch.rand(tokens, 1, generator=generator, dtype=torch.float64) * inputs.hidden
    weight, bias = inputs.weight.to(dtype), inputs.bias.to(dtype)
    return replace(inputs, hidden=hidden.to(dtype), weight=weight, bias=bias)


def upstream(tokens: int) -> dict[str, Tensor]:
    """Gradients of very different sizes: no token's may divide another's."""
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** torch.randint(-6, 4, (tokens,), generator=generator)
    of_loss = sizes * torch.randn(tokens, generator=generator)
    return {"loss": of_loss, "entropy": 0.1 * of_loss.flip(0), "lse": 0.01 * of_loss}


def case_of(inputs: Inputs, at: Tensor | slice = slice(None), **options: Any) -> Case:
    some = replace(inputs, hidden=inputs.hidden[at], targets=inputs.targets[at])
    grads = {name: grad[at] for name, grad in upstream(len(inputs.targets)).items()}
    return Case(some, {**OPTIONS, **options}, upstream=grads)


def of_tokens(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in results.items() if name not in ("grad_weight", "grad_bias")}


def assert_same_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        ours, theirs = (x.contiguous().view(torch.uint8) for x in (tensor, expected[name]))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(
    **paired_grid(
        places=PLACES,
        dtype=DTYPES,
        softcap=(None, 5.0),
        classes=(5, 700, 5000),
    )
)
def test_a_token_has_the_same_bytes_in_every_batch(
    place: Place, dtype: torch.dtype, softcap: float | None, classes: int
) -> None:
    if dtype == torch.float16 and place.backend == "triton":
        pytest.skip("refused: test_refused_in_fp16_by_kernels")
    if classes == 5000 and place.interprets:
        classes = 1500
    inputs = inputs_of(4096 if place.compiles else 300, classes, dtype)
    tokens = len(inputs.targets)
    whole = run_case(None, case_of(inputs, softcap=softcap).at(place))
    generator = torch.Generator().manual_seed(2)
    sizes = (1, 2, 127, 128, 129, tokens - 1)
    for size in sizes[:3] if place.interprets else sizes:
        at = torch.randperm(tokens, generator=generator)[:size]
        part = run_case(None, case_of(inputs, at, softcap=softcap).at(place))
        expected = {name: x[at] for name, x in of_tokens(whole).items()}
        assert_same_bytes(of_tokens(part), expected)
    check_outputs(case_of(inputs, softcap=softcap).at(place), whole)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_an_overflow_changes_no_other_token(place: Place) -> None:
    """The kernels start from a token's first logit, and here some logits are 200 above it."""
    inputs = inputs_of(140, 600, torch.float32)
    inputs.hidden[::3] *= 60
    whole = run_case(None, case_of(inputs).at(place))
    assert all(bool(x.isfinite().all()) for x in whole.values())
    assert float(whole["lse"].max()) > 150
    rest = torch.arange(140) % 3 > 0
    part = run_case(None, case_of(inputs, rest).at(place))
    expected = {name: x[rest] for name, x in of_tokens(whole).items()}
    assert_same_bytes(of_tokens(part), expected)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    eight = RankPool(8, timeout=100)
    yield eight
    eight.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    **paired_grid(
        places=CPU_PLACES, split=(False, True), padded=(False, True), dtype=("fp32", "bf16")
    )
)
def test_ranks_have_the_same_bytes(
    pool: RankPool, place: Place, split: bool, padded: bool, dtype: str
) -> None:
    inputs = inputs_of(136, 640, DTYPES[dtype])
    how: dict[str, Any] = {"vocab_size": 539} if padded else {}
    if padded:
        inputs = replace(inputs, targets=inputs.targets.where(inputs.targets < 0, 7))
    case = replace(case_of(inputs), **how).at(place)
    one = pool.run(1, run_case, case)[0]
    for size in (2, 4, 8):
        at = replace(case, options={**case.options, "sequence_parallel": split})
        if padded:
            rows = 640 // size
            at = replace(at, bounds=tuple((i * rows, (i + 1) * rows) for i in range(size)))
        joined = join_ranks(at, pool.run(size, run_case, at))
        assert_same_bytes(joined, one)


def run_with_short_splits(group: Any, case: Case) -> dict[str, Tensor]:
    """Splits of two tiles: a segment of this test has four, its cut one five tiles."""
    with mock.patch.multiple("cce_dist.backends.triton.launch.tiles", TURNS=2, WIDE=1):
        return run_case(group, case)


@pytest.mark.parametrize("place", CPU_PLACES, ids=str)
def test_a_rank_whose_last_segment_padding_cuts(pool: RankPool, place: Place) -> None:
    """And rows of odd sizes: a segment begins at another alignment on each rank."""
    inputs = inputs_of(20, 8 * 1001, torch.float32, dim=25)
    inputs = replace(inputs, targets=inputs.targets % 7500)
    case = replace(case_of(inputs), vocab_size=7600).at(place)
    one = pool.run(1, run_with_short_splits, case)[0]
    for size in (2, 8):
        rows = 8 * 1001 // size
        at = replace(case, bounds=tuple((i * rows, (i + 1) * rows) for i in range(size)))
        assert_same_bytes(join_ranks(at, pool.run(size, run_with_short_splits, at)), one)


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.timeout(280)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "sequence_parallel"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_gpus_have_the_same_bytes(split: bool, dtype: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA device(s), found {torch.cuda.device_count()}")
    inputs = inputs_of(1024, 8192, DTYPES[dtype])
    case = case_of(inputs).at(TRITON_CUDA)
    one = run_case(None, case)
    case = replace(case, options={**case.options, "sequence_parallel": split})
    assert_same_bytes(join_ranks(case, nccl_pool().run(2, run_case, case)), one)


def test_token_logprobs_and_its_temperature() -> None:
    inputs = inputs_of(150, 300, torch.float32)
    temperature = 0.5 + torch.rand(150, generator=torch.Generator().manual_seed(3))

    def run(at: Tensor) -> dict[str, Tensor]:
        hidden = inputs.hidden[at].requires_grad_()
        t = temperature[at].requires_grad_()
        given = (hidden, inputs.weight, inputs.targets[at])
        result = token_logprobs(*given, temperature=t, stats=("sum_p2",), invariant=True)
        (result.logprobs * upstream(150)["loss"][at]).sum().backward()
        assert hidden.grad is not None and t.grad is not None and result.sum_p2 is not None
        values = {"logprobs": result.logprobs.detach(), "sum_p2": result.sum_p2}
        return {**values, "hidden": hidden.grad, "temperature": t.grad}

    whole = run(torch.arange(150))
    at = torch.randperm(150, generator=torch.Generator().manual_seed(4))[:33]
    assert_same_bytes(run(at), {name: x[at] for name, x in whole.items()})


def on_a_mesh(group: Any) -> dict[str, Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    inputs = inputs_of(40, 64, torch.float32)
    hidden = distribute_tensor(inputs.hidden, mesh, [Shard(0)]).requires_grad_()
    weight = distribute_tensor(inputs.weight, mesh, [Shard(0)])
    targets = distribute_tensor(inputs.targets, mesh, [Replicate()])
    found = token_logprobs(hidden, weight, targets, stats=("entropy",), invariant=True)
    found.logprobs.sum().backward()
    assert isinstance(hidden.grad, DTensor) and isinstance(found.entropy, DTensor)
    values = {"logprobs": found.logprobs, "entropy": found.entropy, "hidden": hidden.grad}
    return {name: x.full_tensor().detach() for name, x in values.items()}


def test_dtensors_have_the_same_bytes(pool: RankPool) -> None:
    one, *_ = pool.run(1, on_a_mesh)
    for size in (2, 4):
        for found in pool.run(size, on_a_mesh):
            assert_same_bytes(found, one)


WRONG: dict[str, dict[str, Any]] = {
    "gradient='in_forward'": {"gradient": "in_forward", "reduction": "mean"},
    "logits='screened'": {"logits": "screened"},
    "filter=": {"filter": Filter(keep=0.1)},
    "keep_logits=True": {"gradient": "exact", "keep_logits": True},
    "label_smoothing=0.1": {"label_smoothing": 0.1},
    "stats=": {"stats": ("lse", "tail_mass")},
}


@pytest.mark.parametrize("name", list(WRONG))
def test_refused(name: str) -> None:
    inputs = inputs_of(4, 20, torch.bfloat16)
    with pytest.raises(ValueError, match=rf"^invariant=True computes .* with {name}"):
        linear_cross_entropy(*inputs_of_loss(inputs), invariant=True, **WRONG[name])


def inputs_of_loss(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.hidden, inputs.weight, inputs.targets


def test_refused_lists_and_kernels_of_fp16() -> None:
    given = inputs_of_loss(inputs_of(4, 20, torch.float16))
    with pytest.raises(ValueError, match=r"^top_k must be None with invariant=True, got"):
        token_logprobs(*given, top_k=2, invariant=True)
    with pytest.raises(ValueError, match=r"^invariant must be True or False, got 1"):
        token_logprobs(*given, invariant=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("place", [CPU_PLACES[1]], ids=str)
def test_refused_in_fp16_by_kernels(place: Place) -> None:
    given = inputs_of_loss(inputs_of(4, 20, torch.float16))
    with pytest.raises(ValueError, match=r"^invariant=True cannot run here: in fp16 the kernels"):
        linear_cross_entropy(*given, invariant=True, **place.options)


def uneven(group: Any) -> None:
    inputs = inputs_of(8, 20, torch.float32)
    bounds = ((0, 8), (8, 20))[group.rank()]
    rule = r"^invariant=True needs ranks with shards of one size, .*rank: \[\(0, 8\), \(8, 20\)\]"
    with pytest.raises(ValueError, match=rule):
        linear_cross_entropy(
            inputs.hidden,
            inputs.weight[slice(*bounds)],
            inputs.targets,
            group=group,
            vocab_shard=VocabShard(*bounds, 20),
            invariant=True,
        )


def test_ranks_without_whole_segments(pool: RankPool) -> None:
    pool.run(2, uneven)
    inputs = inputs_of(8, 24, torch.float32)
    with pytest.raises(RankError, match="invariant=True needs 1, 2, 4, 8 ranks in group, got 3"):
        pool.run(3, run_case, case_of(inputs).at(TORCH_CPU))
    with pytest.raises(RankError, match=r"each of whole segments: .* got \(start, stop\) by rank"):
        pool.run(2, run_case, case_of(inputs_of(8, 20, torch.float32)).at(TORCH_CPU))
