"""Within torch.compile(fullgraph=True): one graph, the numbers of an eager call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from cce_dist import (
    Filter,
    LinearCrossEntropy,
    LossOutput,
    Screen,
    TokenLogprobs,
    TokenSupport,
    VocabShard,
    linear_cross_entropy,
    token_logprobs,
)
from cce_dist.ranks.mpi import MPIGroup
from cce_dist.testing import DTYPES, TORCH_CPU, TRITON_CPU, TRITON_CUDA, Place, grid
from tests.frontend.compile.compile_cases import (
    BATCH,
    CLASSES,
    DIM,
    LENGTH,
    SOME,
    WARNING,
    made,
    poison,  # noqa: F401
)
from tests.support.graphs import AOT_CHECKED
from tests.support.grids import GPU_PLACES, joined
from tests.support.listed_cases import STATS, Listing
from tests.support.reachable import largest_storage

pytestmark = [
    # What torch 2.11's compiler imports.
    pytest.mark.filterwarnings(f"ignore:{WARNING}:DeprecationWarning"),
    # The default compiler starts with torch's headers: a minute of C++ on a loaded machine.
    pytest.mark.timeout(200),
]
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"filter": SOME},
    "none": {"gradient": "exact", "reduction": "none", "shift": 2, "label_smoothing": 0.1},
    "stats": {"filter": SOME, "stats": EVERY_STAT, "z_loss": 0.1},
    "tail_mass": {"filter": SOME, "stats": ("tail_mass",)},
    "in_forward": {"gradient": "in_forward", "label_smoothing": 0.1, "softcap": 5.0},
}
IN_BOTH = ("fp32", "bf16")
LEAVES = ("hidden", "weight", "bias", "token_weight")


def scalar_of(result: Tensor | LossOutput) -> Tensor:
    """A number that depends on whatever can be differentiated."""
    if isinstance(result, Tensor):
        return result.sum()
    total = result.loss.sum()
    if result.lse is not None:
        total = total + 0.01 * result.lse.square().sum()
    return total if result.entropy is None else total + result.entropy.sum()


def step(run: Callable[..., Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results and gradients. A loss that is kept after its backward keeps vectors of tokens."""
    for tensor in tensors.values():
        tensor.grad = None
    result = run(**tensors)
    total = scalar_of(result)
    if tensors["weight"].requires_grad:
        # What the walk is for: it finds the weight, which autograd saves until the backward.
        assert largest_storage(total) >= tensors["weight"].nbytes
    total.backward()
    assert largest_storage(total) <= 64 * BATCH * LENGTH
    found: dict[str, Any] = {"loss": result}
    if not isinstance(result, Tensor):
        found = result._asdict()
        moments = found.pop("logit_moments")
        found |= {} if moments is None else moments._asdict()
    found |= {f"grad_{name}": x.grad for name, x in tensors.items() if x.requires_grad}
    return {name: x.detach().clone() for name, x in found.items() if x is not None}


# A graph holds calls of a backend and none of its code, and its shapes and dtypes: on a CPU torch
# takes each option in one dtype, and Triton, which is traced alike, those with most of the calls.
IN_BF16 = {"filtered", "none", "in_forward"}
TRACED = {name: OPTIONS[name] for name in ("none", "stats", "in_forward")}


def takes_one_dtype(row: dict[str, str]) -> bool:
    return (row["option"] in IN_BF16) == (row["dtype"] == "bf16")


@pytest.mark.parametrize(
    **joined(
        grid(places=(TORCH_CPU,), option=OPTIONS, dtype=IN_BOTH, allowed=takes_one_dtype),
        grid(places=(TRITON_CPU,), option=TRACED, dtype=IN_BOTH),
        grid(places=GPU_PLACES, option=OPTIONS, dtype=IN_BOTH),
    )
)
def test_compiled_as_eager(place: Place, option: dict[str, Any], dtype: str) -> None:
    tensors = made(DTYPES[dtype], place.device)
    # So many that the weight's marks are more than the tokens' vectors.
    for name, shape in {"weight": (2304, DIM), "bias": (2304,)}.items():
        # Logits near 300: of fp32 the graph carries what lse is rounded by.
        near = 300.0 if name == "bias" and "softcap" not in option else 0.0
        tensors[name] = (near + torch.randn(shape)).to(tensors[name]).detach().requires_grad_()
    if option.get("gradient") == "in_forward":
        # It makes the gradients of hidden, weight and bias alone.
        tensors["token_weight"] = tensors["token_weight"].detach()

    def run(hidden: Tensor, **more: Tensor) -> Any:
        return linear_cross_entropy(2 * hidden, **more, backend=place.backend, **option)  # pyright: ignore

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    eager, found = step(run, tensors), step(compiled, tensors)
    assert found.keys() == eager.keys()
    for name, expected in eager.items():
        # What a graph adds up may be in another order.
        torch.testing.assert_close(found[name], expected, msg=name)


@pytest.mark.parametrize(
    ("shape", "shift", "reduction"),
    [
        pytest.param((4, 1), 1, "mean", id="one_token-mean"),
        pytest.param((2, 3), 5, "none", id="shift_beyond-none"),
        pytest.param((0, 5), 1, "mean", id="no_sequence-mean"),
        pytest.param((2, 0), 0, "none", id="no_token-none"),
    ],
)
def test_compiled_of_a_batch_without_targets(
    shape: tuple[int, ...], shift: int, reduction: str
) -> None:
    tensors = {
        "hidden": torch.randn(*shape, DIM, requires_grad=True),
        "weight": torch.randn(CLASSES, DIM, requires_grad=True),
        "targets": torch.zeros(shape, dtype=torch.int64),
    }

    def run(**tensors: Tensor) -> Any:
        return linear_cross_entropy(**tensors, shift=shift, reduction=reduction)  # pyright: ignore

    found = step(torch.compile(run, fullgraph=True, backend=AOT_CHECKED), tensors)
    left = (*shape[:-1], max(shape[-1] - shift, 0)) if reduction == "none" else ()
    assert found["loss"].shape == left
    assert found["grad_hidden"].shape == (*shape, DIM)
    assert not any(bool(x.any()) for x in found.values())


def test_compiled_with_options_of_another_kind() -> None:
    """The module's are Python's since it was made; a call says what to do."""
    hidden, weight, targets = torch.randn(9, DIM), torch.randn(CLASSES, DIM), torch.arange(9)
    cap = np.float32(30)
    loss = LinearCrossEntropy(softcap=cap, z_loss=torch.tensor(0.5))
    compiled = torch.compile(loss, fullgraph=True, backend=AOT_CHECKED)
    torch.testing.assert_close(compiled(hidden, weight, targets), loss(hidden, weight, targets))

    def run(hidden: Tensor) -> Any:
        return linear_cross_entropy(hidden, weight, targets, softcap=cap)  # pyright: ignore

    with pytest.raises(Exception, match=r"softcap must be a Python number within torch.compile"):
        torch.compile(run, fullgraph=True, backend=AOT_CHECKED)(hidden)


@pytest.mark.parametrize(
    **joined(
        grid(
            places=(TORCH_CPU,),
            learned=(False, True),
            dtype=IN_BOTH,
            allowed=lambda row: (row["learned"] == "True") == (row["dtype"] == "fp32"),
        ),
        grid(places=(TRITON_CPU,), learned=(False,), dtype=IN_BOTH),
        grid(places=GPU_PLACES, learned=(False, True), dtype=IN_BOTH),
    )
)
def test_compiled_with_a_temperature_of_each_token(place: Place, learned: bool, dtype: str) -> None:
    tensors = made(DTYPES[dtype], place.device)
    # Any of its size will do.
    weight = tensors.pop("token_weight").detach()
    tensors["temperature"] = (weight + 0.5).requires_grad_(learned)

    def run(hidden: Tensor, **more: Tensor) -> Any:
        how: dict[str, Any] = {"filter": SOME, "shift": 1, "softcap": 8.0, "backend": place.backend}
        how["stats"] = ("sum_p2",)
        return token_logprobs(2 * hidden, **more, entropy=not learned, **how)  # pyright: ignore

    def gradients(run: Callable[..., Any]) -> list[Tensor]:
        needing = [x for x in tensors.values() if x.requires_grad]
        found = run(**tensors)
        total = (
            found.logprobs.square().sum()
            if learned
            else sum(x.sum() for x in found if x is not None)
        )
        return [found.logprobs.detach(), *torch.autograd.grad(total, needing)]

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    for found, expected in zip(gradients(compiled), gradients(run), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(**grid(places=(TORCH_CPU, TRITON_CPU, TRITON_CUDA)))
def test_compiled_has_the_bytes_of_eager_with_invariant(place: Place) -> None:
    tensors = made(torch.float32, place.device)
    stats = ("lse", "entropy", "correct", "sum_p2")

    def run(hidden: Tensor, **more: Tensor) -> Any:
        given = {"reduction": "none", "stats": stats, "invariant": True, **place.options}
        return linear_cross_entropy(2 * hidden, **more, **given)  # pyright: ignore

    eager = step(run, tensors)
    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    for name, found in step(compiled, tensors).items():
        assert torch.equal(found, eager[name]), name


@pytest.mark.parametrize("supported", [True, False])
def test_compiled_with_listed_ids(supported: bool) -> None:
    listing = Listing.make(torch.float64)
    usable = listing.usable(1)

    def run(leaves: dict[str, Tensor], offsets: Tensor, ids: Tensor, **more: Any) -> TokenLogprobs:
        temperature = leaves["temperature"] if supported else leaves["temperature"].detach()
        return token_logprobs(
            2 * leaves["hidden"],
            leaves["weight"],
            listing.targets,
            bias=leaves["bias"],
            temperature=temperature,
            support=TokenSupport(offsets, ids) if supported else None,
            candidates=listing.candidates,
            stats=STATS,
            shift=1,
            **more,
        )

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    results = []
    for each in (run, compiled):
        leaves = listing.leaves()
        found = each(leaves, *listing.support)
        needing = [x for name, x in leaves.items() if supported or name != "temperature"]
        chosen = found.candidates
        assert chosen is not None and found.entropy is not None
        finite = chosen.masked_fill(chosen == -torch.inf, 0).sin().sum()
        total = finite + (found.logprobs.exp() + found.entropy)[usable].sin().sum()
        results.append((found, torch.autograd.grad(total, needing)))
    torch.testing.assert_close(results[1], results[0])
    if not supported:
        with pytest.raises(Exception, match=r"top_k must be None within torch\.compile"):
            torch.compile(run, fullgraph=True, backend=AOT_CHECKED)(
                listing.leaves(), *listing.support, top_k=2
            )


def test_compiled_with_screened_logits() -> None:
    tensors = made(torch.bfloat16)
    how: dict[str, Any] = {"logits": "screened", "screen": Screen(max_kept=1.0)}
    how |= {"filter": Filter(keep=0.2), "stats": ("lse", "screened")}

    def run(**tensors: Tensor) -> Any:
        return linear_cross_entropy(**tensors, **how)  # pyright: ignore

    eager = step(run, tensors)
    found = step(torch.compile(run, fullgraph=True, backend=AOT_CHECKED), tensors)
    assert bool(eager["screened"].any())
    torch.testing.assert_close(found, eager)


def test_compiled_with_dataclasses_made_in_the_graph() -> None:
    tensors = {name: made(torch.float32)[name] for name in ("hidden", "weight", "targets")}

    def run(**tensors: Tensor) -> Any:
        shard = VocabShard(0, CLASSES, CLASSES)
        return linear_cross_entropy(**tensors, filter=Filter(keep=0.02), vocab_shard=shard)  # pyright: ignore

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    torch.testing.assert_close(step(compiled, tensors), step(run, tensors))


def test_compiled_without_gradients() -> None:
    tensors = made(torch.float32)
    module = LinearCrossEntropy(stats=("lse", "correct"))

    def run() -> Any:
        return module(tensors["hidden"], tensors["weight"], tensors["targets"])

    with torch.no_grad():
        eager, found = run(), torch.compile(run, fullgraph=True, backend=AOT_CHECKED)()
    assert torch.equal(found.lse, eager.lse) and torch.equal(found.correct, eager.correct)
    assert not found.lse.requires_grad


@pytest.mark.parametrize("trainable", ["hidden", "weight"])
def test_compiled_with_frozen_inputs(trainable: str) -> None:
    tensors = {n: made(torch.float32)[n].detach() for n in ("hidden", "weight", "targets")}
    tensors[trainable].requires_grad_()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=AOT_CHECKED)
    eager, found = step(linear_cross_entropy, tensors), step(compiled, tensors)
    torch.testing.assert_close(found, eager)


def test_other_numbers_of_tokens_take_one_more_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    how: dict[str, Any] = {"filter": SOME}

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
        return linear_cross_entropy(hidden, weight, targets, **how)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(CLASSES, DIM, generator=generator))
    for tokens in (200, 333, 512, 190):
        hidden = torch.randn(tokens, DIM, generator=generator).requires_grad_()
        targets = torch.randint(CLASSES, (tokens,), generator=generator)
        loss = compiled(hidden, weight, targets)
        loss.backward()
        torch.testing.assert_close(loss, run(hidden, weight, targets))
    # One for the first number, one for all others.
    assert counter.frame_count == 2


CHANGING: dict[str, tuple[Any, ...]] = {
    "softcap": (30.0, 20.0, 10.0),
    "z_loss": (0.1, 0.2, 0.3),
    "shift": (1, 2, 0),
    "ignore_index": (-100, 3, -4),
    "workspace_bytes": (2**20, 2**21, 2**22),
}


def test_options_that_change() -> None:
    """The compiler makes a symbol of a number that has another value in a later call."""
    inputs = made(torch.float64, ignored=0.0)

    def run(options: dict[str, Any]) -> Any:
        return linear_cross_entropy(**inputs, **options)

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    for values in zip(*CHANGING.values(), strict=True):
        options = dict(zip(CHANGING, values, strict=True))
        torch.testing.assert_close(compiled(options), run(options), rtol=1e-13, atol=0)


def test_a_temperature_that_changes() -> None:
    inputs = made(torch.float64)
    del inputs["token_weight"]

    def run(temperature: float) -> Any:
        return token_logprobs(**inputs, temperature=temperature).logprobs

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    for temperature in (1.0, 2.0, 3.0):
        torch.testing.assert_close(compiled(temperature), run(temperature), rtol=1e-13, atol=0)


def test_heads_of_several_sizes() -> None:
    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
        return linear_cross_entropy(hidden, weight, targets, **{"filter": SOME})

    compiled = torch.compile(run, fullgraph=True, backend=AOT_CHECKED)
    generator = torch.Generator().manual_seed(0)
    for classes, dim in ((500, 16), (600, 16), (700, 24), (800, 24)):
        hidden = torch.randn(50, dim, generator=generator).requires_grad_()
        weight = nn.Parameter(torch.randn(classes, dim, generator=generator))
        targets = torch.randint(classes, (50,), generator=generator)
        got = []
        for function in (compiled, run):
            loss = function(hidden, weight, targets)
            got.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
        torch.testing.assert_close(*got)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient": "exact", "keep_logits": True}, "keep_logits must be False within torch"),
        ({"check_ranks": True}, "check_ranks must be False within torch.compile"),
        ({"grad_weight_into": torch.zeros(CLASSES, DIM)}, "grad_weight_into must be None within"),
        ({"group": object.__new__(MPIGroup)}, "group must be a ProcessGroup within torch.compile"),
        ({"label_smoothing": 2.0}, r"label_smoothing must lie in \[0, 1\], got 2.0"),
    ],
)
def test_compiled_refusals(options: dict[str, Any], message: str) -> None:
    inputs = [made(torch.float32)[name] for name in ("hidden", "weight", "targets")]
    run = partial(linear_cross_entropy, *inputs, **options)
    with pytest.raises(Exception, match=message):
        torch.compile(run, fullgraph=True, backend=AOT_CHECKED)()
