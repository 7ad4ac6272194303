"""linear_distillation within torch.compile(fullgraph=True): the numbers of an eager call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cce_dist import VocabShard, linear_cross_entropy, linear_distillation
from cce_dist.testing import DTYPES, TORCH_CPU, TRITON_PLACES, Place, shared_pool
from tests.distillation.test_by_kernels import PLAIN, zipf
from tests.distillation.test_distillation import CLASSES, Both, upstream_of
from tests.frontend.compile.compile_cases import WARNING, poison  # noqa: F401
from tests.support.graphs import AOT_CHECKED

pytestmark = pytest.mark.filterwarnings(f"ignore:{WARNING}:DeprecationWarning")
RELATIVE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
MARKS = {"cpu": [], "cuda": [pytest.mark.gpu]}
CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "alpha, one temperature": {"temperature": 1.0},
    "the mean alone": {"alpha": 0.0, "stats": (), "reduction": "mean", "shift": 0},
}


# Each call and each divergence: a graph has their operators side by side. "all" has a divergence of
# one pass over the tiles, and one of two.
PAIRS = (
    *(("all", divergence) for divergence in ("forward_kl", "jsd")),
    *(("alpha, one temperature", "tvd"), ("the mean alone", "reverse_kl")),
)
OF_KERNELS = (("all", "forward_kl"), ("alpha, one temperature", "jsd"), PAIRS[-1])


def of_two_tiles(dtype: torch.dtype) -> Both:
    """What eager torch computes in two tiles: torch.compile traces each."""
    both = Both.make(dtype).few()
    rows = {"weight": 32, "bias": 32, "teacher_weight": 38, "teacher_bias": 38}
    heads = {name: getattr(both, name)[:count] for name, count in rows.items()}
    return replace(both, **heads, targets=both.targets.clamp_max(31))


def results_of(run: Any, both: Both) -> tuple[Any, tuple[Tensor, ...]]:
    leaves = both.leaves()
    computed = run(both, leaves)
    loss = computed if isinstance(computed, Tensor) else computed.loss
    grads = torch.autograd.grad((loss * upstream_of(loss)).sum(), list(leaves.values()))
    return computed, grads


def check_compiled(both: Both, as_if: str = "", **options: Any) -> None:
    """Args: as_if: the gradient of the eager call, if it is another."""

    def run(both: Both, leaves: dict[str, Tensor]) -> Any:
        return both.run(leaves, **options)

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    found = results_of(compiled, both)
    options |= {"gradient": as_if} if as_if else {}
    # The order of the mean's sum is another: more tokens than count are in it.
    of_dtype = {"rtol": RELATIVE[both.hidden.dtype], "atol": 0}
    torch.testing.assert_close(found, results_of(run, both), **of_dtype)


@pytest.mark.parametrize(("call", "divergence"), PAIRS)
def test_eager_torch(divergence: str, call: str) -> None:
    options = {**CALLS[call], "divergence": divergence, "backend": "torch"}
    check_compiled(of_two_tiles(torch.float64), **options)


# In the interpreter PAIRS alone, of which "tvd" has no kernels of both heads: the call with alpha
# has Jensen-Shannon's in its place.
@pytest.mark.parametrize(
    ("divergence", "place", "dtype", "call"),
    [
        pytest.param(
            *(divergence, place, dtype, call),
            id=f"{divergence}-{place}-{dtype}-{call}",
            marks=MARKS[place.device],
        )
        for place in TRITON_PLACES
        for dtype in ("fp32", "bf16")
        for call in CALLS
        for divergence in ("forward_kl", "reverse_kl", "jsd")
        if dtype in place.dtypes and (not place.interprets or (call, divergence) in OF_KERNELS)
    ],
)
def test_kernels(divergence: str, place: Place, dtype: str, call: str) -> None:
    options = {**place.options, **CALLS[call], "divergence": divergence}
    both = Both.make(DTYPES[dtype], place.device)
    # More than a block of tokens have an order, which the graph carries to the backward.
    is_few = place.interprets and (call, divergence) != ("all", "forward_kl")
    check_compiled(both.few() if is_few else both, **options)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(TORCH_CPU, id="torch"),
        *(pytest.param(x, id=str(x), marks=MARKS[x.device]) for x in TRITON_PLACES),
    ],
)
def test_screened(place: Place) -> None:
    both = zipf(torch.float16, place.device, 12 if place.interprets else 140, 5000)
    options = {**PLAIN, **place.options, "logits": "screened", "stats": ("divergence", "screened")}
    check_compiled(both, **options)
    is_screened = both.run(both.leaves(), **options).screened
    assert bool(is_screened) == (place is not TORCH_CPU)


# Of one pass over the tiles, and of two.
@pytest.mark.parametrize("divergence", ["reverse_kl", "tvd"])
def test_kernels_of_tiles(divergence: str) -> None:
    options = {"divergence": divergence, "gradient": "exact", "backend": "triton"}
    check_compiled(Both.make(torch.float32).few(), **options)


def test_in_forward_is_exact() -> None:
    """Its gradients come in the backward."""
    options = {"divergence": "jsd", "reduction": "mean"}
    check_compiled(of_two_tiles(torch.float64), **options, gradient="in_forward", as_if="exact")


def test_a_frozen_head_and_no_gradient() -> None:
    both = of_two_tiles(torch.float32)

    def run(hidden: Tensor) -> Any:
        return both.run({"hidden": hidden, "weight": both.weight, "bias": both.bias})

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    with torch.no_grad():
        torch.testing.assert_close(compiled(both.hidden), run(both.hidden))
    hidden = [both.hidden.clone().requires_grad_() for _ in range(2)]
    for each, leaf in zip((compiled, run), hidden, strict=True):
        each(leaf).loss.sum().backward()
    torch.testing.assert_close(hidden[0].grad, hidden[1].grad, rtol=0, atol=0)


def test_other_numbers_of_tokens_and_other_options() -> None:
    """A call of another shape or temperature has its own values, and is compiled for them."""
    both = Both.make(torch.float64).few()
    # One tile.
    both = replace(both, weight=both.weight[:16], teacher_weight=both.teacher_weight[:16])

    def run(hidden: Tensor, teacher_hidden: Tensor, temperature: float, softcap: float) -> Any:
        tensors = hidden, both.weight, teacher_hidden, both.teacher_weight
        caps = {"softcap": softcap, "teacher_softcap": 2 * softcap}
        return linear_distillation(*tensors, temperature=temperature, **caps)

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    for count, *numbers in ((6, 1.0, 9.0), (4, 1.0, 9.0), (5, 2.0, 9.0), (5, 3.0, 5.0)):
        arguments = both.hidden[:, :count], both.teacher_hidden[:, :count], *numbers
        torch.testing.assert_close(compiled(*arguments), run(*arguments), rtol=1e-13, atol=0)


def test_dynamic() -> None:
    """With dynamic=True the numbers of an argument's default are symbols, too."""
    hidden, weight, targets = torch.randn(2, 8), torch.randn(9, 8), torch.zeros(2).long()

    def run(*tensors: Tensor) -> Any:
        distilled = linear_distillation(*tensors, hidden, 2 * weight, backend="torch")
        return distilled, linear_cross_entropy(*tensors, targets, backend="torch")

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(hidden, weight), run(hidden, weight))


def on_a_rank(group: Any, both: Both, split: bool, place: Any, options: Any) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    cut = both
    if split:
        tokens = slice(rank * len(both.hidden) // size, (rank + 1) * len(both.hidden) // size)
        cut = replace(both, hidden=both.hidden[tokens], teacher_hidden=both.teacher_hidden[tokens])
    start, stop = [rank * CLASSES // size, (rank + 1) * CLASSES // size]
    rows = slice(start, stop)
    cut = replace(
        cut,
        **{name: getattr(both, name)[rows]
           for name in ("weight", "bias", "teacher_weight", "teacher_bias")},
    )  # fmt: skip
    ranks = {"group": group, "sequence_parallel": split, **options}
    check_compiled(cut, vocab_shard=VocabShard(start, stop, CLASSES), **ranks)


# Tokens are gathered before a backend is called, and gradients summed after it.
@pytest.mark.parametrize(("backend", "split"), [("torch", False), ("triton", True)])
def test_ranks(backend: str, split: bool) -> None:
    options = {"backend": backend, "reduction": "sum", "alpha": 0.25}
    shared_pool().run(2, on_a_rank, Both.make(torch.float32).few(), split, None, options)


def with_dtensors(group: Any, both: Both) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    rows = {"weight": both.weight, "bias": both.bias}
    placed = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in rows.items()}
    placed["hidden"] = distribute_tensor(both.hidden, mesh, [Replicate()])
    of_teacher = [distribute_tensor(both.teacher_hidden, mesh, [Replicate()])]
    of_teacher += [distribute_tensor(both.teacher_weight[:CLASSES], mesh, [Shard(0)])]

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return linear_distillation(hidden, weight, *of_teacher, bias=bias)  # pyright: ignore

    results = []
    for each in (run, torch.compile(run, fullgraph=True, backend=AOT_CHECKED)):
        leaves = {name: x.detach().requires_grad_() for name, x in placed.items()}
        loss = each(**leaves)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        results.append((loss, *(x.to_local() for x in grads)))  # pyright: ignore
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_dtensors() -> None:
    shared_pool().run(2, with_dtensors, Both.make(torch.float32).few())


def test_fake_tensors() -> None:
    both, mode = Both.make(torch.bfloat16), FakeTensorMode()
    fake = Both(*(mode.from_tensor(x) for x in vars(both).values()))
    with mode:
        computed, grads = results_of(Both.run, fake)
    real, real_grads = results_of(Both.run, both)
    for found, expected in zip((*computed[:3], *grads), (*real[:3], *real_grads), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_refusals_have_the_messages_of_eager_calls() -> None:
    both = Both.make(torch.float32)
    wide = replace(both, teacher_weight=both.teacher_weight[:, :-1])
    with pytest.raises(Exception, match=r"teacher_weight must be \[V_local, D_teacher=40\]"):
        check_compiled(wide)
