"""KLs and Jensen-Shannon by Triton kernels against dense softmaxes in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, linear_distillation
from cce_dist.reference import divergence_reference
from cce_dist.testing import DTYPES, TRITON_PLACES, Place
from tests.backends.triton.triton_cases import give_programs
from tests.distillation.test_distillation import CLASSES, TOKENS, Both, error, upstream_of

EVERY = Filter(keep=1e-30)
# Of values and gradients, relative: logits are not rounded, d_logits are.
VALUES = {"fp32": 2e-6, "fp16": 2e-6, "bf16": 2e-6}
# Of a KL whose log ratios have a student's logit that fp16 holds.
BY_HOPPER = 2.0**-12
GRADIENTS = {
    "forward_kl": {"fp32": 3e-6, "fp16": 1e-3, "bf16": 4e-3},
    # Log ratios of ten nats are rounded as logits are: torch's eager fp32 errs by 7e-6. Their mean,
    # the KL, is that of BY_HOPPER.
    "reverse_kl": {"fp32": 1e-5, "fp16": 2e-3, "bf16": 4e-3},
    # Of models with little mass in common the mean log ratio is nearly a column's own, near log 2:
    # torch's eager fp32 errs by 4.5e-5.
    "jsd": {"fp32": 6e-5, "fp16": 1e-3, "bf16": 4e-3},
}
MARKS = {"cpu": [], "cuda": [pytest.mark.gpu]}
BY_PLACE = [
    pytest.param(place, dtype, id=f"{place}-{dtype}", marks=MARKS[place.device])
    for place in TRITON_PLACES
    for dtype in place.dtypes
]
KLS = pytest.mark.parametrize("kl", ["forward_kl", "reverse_kl", "jsd"])


def wide_leaves(both: Both) -> dict[str, Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in both.leaves().items()}


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad((loss * upstream_of(loss)).sum(), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


CALLS: dict[str, dict[str, Any]] = {
    "two temperatures": {},
    "one pass": {"temperature": 1.0},
    "no cross-entropy": {"alpha": 0.0, "stats": ("divergence",)},
    "teacher's softcap": {"alpha": 0.0, "stats": (), "softcap": None, "teacher_softcap": 5.0},
    # Hopper's kernel, if there is one.
    "plain": {"alpha": 0.0, "stats": (), "softcap": None},
}


# In the interpreter these do: what a kernel rounds depends on no option.
IN_16_BITS = ("two temperatures", "plain")


@KLS
@pytest.mark.parametrize(
    ("place", "dtype", "call"),
    [
        pytest.param(*each.values, call, id=f"{each.id}-{call}", marks=each.marks)
        for each in BY_PLACE
        for call in CALLS
        if not each.values[0].interprets or each.values[1] == "fp32" or call in IN_16_BITS
    ],
)
def test_values_and_gradients_are_those_of_dense_logits(
    place: Place, dtype: str, call: str, kl: str
) -> None:
    both, options = Both.make(DTYPES[dtype], place.device), {**CALLS[call], "divergence": kl}
    leaves, wide = both.leaves(), wide_leaves(both)
    run = {"filter": EVERY, **place.options, **options}
    found = both.run(leaves, **run)
    loss = found if isinstance(found, Tensor) else found.loss
    expected = both.dense(wide, kl, options)
    rounds = call == "plain" and place.compiles and dtype != "fp32"
    # Of the logits of the first model Hopper's kernel rounds what the KL reads to fp16.
    assert error(loss, expected.loss) < (BY_HOPPER if rounds else VALUES[dtype])
    if not isinstance(found, Tensor):
        assert error(found.divergence, expected.divergence) < VALUES[dtype]  # pyright: ignore
        assert found.nll is None or error(found.nll, expected.nll) < VALUES[dtype]  # pyright: ignore
    ours, right = gradients(loss, leaves), gradients(expected.loss, wide)
    for name, grad in ours.items():
        assert error(grad, right[name]) < GRADIENTS[kl][dtype], name


@KLS
@pytest.mark.parametrize("count", [TOKENS[0] * TOKENS[1], 9])
@pytest.mark.parametrize(("place", "dtype"), BY_PLACE)
def test_without_biases(place: Place, dtype: str, count: int, kl: str) -> None:
    both = Both.make(DTYPES[dtype], place.device)
    leaves = both.leaves()
    hidden, weight = leaves["hidden"].flatten(0, 1)[:count], leaves["weight"]
    of_teacher = both.teacher_hidden.flatten(0, 1)[:count], both.teacher_weight
    given = {"reduction": "none", "filter": EVERY, "divergence": kl, **place.options}
    loss = linear_distillation(hidden, weight, *of_teacher, **given)
    z = (hidden.double() @ weight.double().T).log_softmax(-1)
    y = (of_teacher[0].double() @ of_teacher[1][:CLASSES].double().T).log_softmax(-1)
    right = divergence_reference(z, y, kl)
    limit = BY_HOPPER if place.compiles and dtype != "fp32" else VALUES[dtype]
    assert error(loss, right) < limit  # pyright: ignore[reportArgumentType]
    some = {name: leaves[name] for name in ("hidden", "weight")}
    wanted = gradients(right, some)
    for name, grad in gradients(loss, some).items():  # pyright: ignore[reportArgumentType]
        assert error(grad, wanted[name].double()) < GRADIENTS[kl][dtype], name


def zipf(dtype: torch.dtype, device: str, tokens: int = 512, classes: int = 6000) -> Both:
    """Both models know how frequent each id is; the teacher knows more of the context."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dim, frequency = 64, -1.1 * torch.arange(1, classes + 1).log()
    context, weight = randn(tokens, dim), 0.15 * randn(classes, dim)
    cut = [x.to(device, dtype) for x in (context + 0.5 * randn(tokens, dim), weight)]
    of_teacher = (context.to(device, dtype), (1.4 * weight).to(device, dtype))
    biases = (frequency + 0.3 * randn(classes)).to(device), frequency.to(device)
    targets = torch.randint(50, (tokens,), generator=generator).to(device)
    return Both(*cut, biases[0], *of_teacher, biases[1], targets)  # pyright: ignore[reportCallIssue]


PLAIN: dict[str, Any] = {
    **{"temperature": 1.0, "softcap": None, "teacher_logit_scale": 1.0, "shift": 0},
    **{"alpha": 0.2, "reduction": "mean", "stats": ()},
}


@KLS
@pytest.mark.parametrize(
    "place",
    [pytest.param(place, id=str(place), marks=MARKS[place.device]) for place in TRITON_PLACES],
)
def test_filtered_is_no_worse_than_dense_16_bit(place: Place, kl: str) -> None:
    """Dense: logits and their gradients in 16 bits, softmaxes in fp32."""
    dtype = torch.float16 if place.interprets else torch.bfloat16
    both = zipf(dtype, place.device, *((256, 3000) if place.interprets else ()))
    leaves, wide = both.leaves(), wide_leaves(both)
    loss = both.run(leaves, **PLAIN, **place.options, divergence=kl)
    assert isinstance(loss, Tensor)
    loss.backward()
    right = both.dense(wide, kl, PLAIN).loss.mean()
    right.backward()
    dense = both.leaves()
    z = torch.nn.functional.linear(dense["hidden"], dense["weight"], dense["bias"].to(dtype))
    y = torch.nn.functional.linear(
        both.teacher_hidden, both.teacher_weight, both.teacher_bias.to(dtype)
    )
    divergence = divergence_reference(z.float(), y.float(), kl)
    nll = torch.nn.functional.cross_entropy(z.float(), both.targets, reduction="none")
    (0.8 * divergence + 0.2 * nll).mean().backward()
    assert error(loss, right) < 1e-5
    for name, leaf in leaves.items():
        expected = wide[name].grad
        assert expected is not None and leaf.grad is not None
        ours = error(leaf.grad, expected)
        theirs = error(dense[name].grad, expected)  # pyright: ignore[reportArgumentType]
        assert ours <= theirs, f"{name}: error {ours:.2e}, dense {theirs:.2e}"


@KLS
def test_a_wider_filter_errs_more(kl: str) -> None:
    both, errors = zipf(torch.float32, "cpu", 140, 1500), []
    exact, call = both.leaves(), {**PLAIN, "divergence": kl}
    both.run(exact, **call, gradient="exact").backward()  # pyright: ignore
    for keep in (1e-30, 0.02, 0.2):
        leaves = both.leaves()
        both.run(leaves, **call, backend="triton", filter=Filter(keep=keep)).backward()  # pyright: ignore
        errors.append([error(leaves[name].grad, exact[name].grad) for name in leaves])  # pyright: ignore
    for least, some, most in zip(*errors, strict=True):
        assert least < 2e-6 < some < most < 0.2


@KLS
@pytest.mark.parametrize("programs", [1, 3])
def test_launches_and_overflow(monkeypatch: pytest.MonkeyPatch, programs: int, kl: str) -> None:
    """Several splits and launches; one token of each model whose sums overflow."""
    give_programs(monkeypatch, programs)
    both = Both.make(torch.float32)
    for hidden, at in ((both.hidden, (0, 1)), (both.teacher_hidden, (1, 7))):
        hidden[at] *= 300
    call = {"softcap": None, "alpha": 0.0, "stats": (), "temperature": 1.0}
    leaves = both.leaves()
    found = both.run(leaves, **call, backend="triton", filter=EVERY, divergence=kl)
    expected = both.dense(wide_leaves(both), kl, call).loss
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=3e-6)


@KLS
@pytest.mark.parametrize("height", [80.0, 84.0, 87.0, 89.0, 95.0])
def test_log_ratios_overflow_before_their_weights(height: float, kl: str) -> None:
    """One logit lies so far above the first reference that exponentials, or their log ratios'
    products alone, overflow."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.zeros(1, 16), 0.1 * torch.randn(300, 16, generator=generator)
    hidden[0, 0], weight[5, 0] = height, 1.0
    others = tuple(torch.randn(n, 16, generator=generator) for n in (1, 300))
    for heads in ((hidden, weight, *others), (*others, hidden, weight)):
        call = {"divergence": kl, "filter": EVERY, "backend": "triton"}
        found = linear_distillation(*heads, **call)  # pyright: ignore
        z, y = (e.double() @ c.double().T for e, c in (heads[:2], heads[2:]))
        assert error(found, divergence_reference(z, y, kl).mean()) < 1e-5  # pyright: ignore


@KLS
@pytest.mark.parametrize("gradient", ["filtered", "exact"])
@pytest.mark.parametrize(
    "place",
    [pytest.param(place, id=str(place), marks=MARKS[place.device]) for place in TRITON_PLACES],
)
def test_sums_that_nearly_overflow(
    place: Place, gradient: str, kl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One logit of a model lies 80 to 96 above all others, in a tile that no launch has seen
    before. Within 2^128 a sum is finite, but its inverse is below the hardware's least
    exponential."""
    give_programs(monkeypatch, 2)
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.zeros(32, 16), 0.1 * torch.randn(2000, 16, generator=generator)
    hidden[:, 0], weight[:, 0], weight[-5, 0] = 80 + torch.arange(32) / 2, 0, 1
    others = tuple(torch.randn(n, 16, generator=generator) for n in (32, 2000))
    for heads in ((hidden, weight, *others), (*others, hidden, weight)):
        ours = [x.to(place.device).requires_grad_(i < 2) for i, x in enumerate(heads)]
        wide = [x.double().requires_grad_(i < 2) for i, x in enumerate(heads)]
        call = {"divergence": kl, "gradient": gradient, **place.options}
        call |= {"filter": EVERY} if gradient == "filtered" else {}
        found = linear_distillation(*ours, **call)  # pyright: ignore
        z, y = (e @ c.T for e, c in (wide[:2], wide[2:]))
        right = divergence_reference(z, y, kl, 0.5).mean()  # pyright: ignore
        assert error(found.cpu(), right) < 1e-5  # pyright: ignore
        grads = (torch.autograd.grad(x, heads[:2]) for x, heads in ((found, ours), (right, wide)))  # pyright: ignore
        for grad, expected in zip(*grads, strict=True):
            # A student that is sure has next to no gradient.
            off = (grad.cpu().double() - expected).norm()
            assert off < 1e-4 * expected.norm() + 1e-3


@KLS
@pytest.mark.parametrize("count", [0, 1, 128, 129])
def test_tokens_that_count(count: int, kl: str) -> None:
    both = Both.make(torch.float32)
    targets = torch.full(TOKENS, -100)
    targets.view(-1)[5 : 5 + count] = 3
    some, call = replace(both, targets=targets), {"shift": 0, "temperature": 1.0, "softcap": None}
    call["divergence"] = kl
    # What is ignored may hold anything.
    some.hidden.view(-1, some.hidden.shape[-1])[4] = torch.nan
    ours, right = some.leaves(), some.leaves()
    found = some.run(ours, **call, backend="triton", filter=EVERY)
    expected = some.run(right, **call, gradient="exact")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    wanted = gradients(expected.loss, right)
    for name, grad in gradients(found.loss, ours).items():
        off = (grad - wanted[name]).norm()
        assert off <= GRADIENTS[kl]["fp32"] * wanted[name].norm(), name


@KLS
def test_an_id_that_one_model_masks(kl: str) -> None:
    """The other gives it mass: one KL is infinite. To the other KL the id adds nothing.
    Jensen-Shannon is finite."""
    both = Both.make(torch.float32)
    call = {"alpha": 0.0, "stats": (), "softcap": None, "divergence": kl}
    biases = (both.teacher_bias, both.bias)
    near, far = biases if kl == "forward_kl" else reversed(biases)
    near[7] = -torch.inf
    found = both.run(both.leaves(), **call, backend="triton", filter=EVERY)
    expected = both.run(both.leaves(), **call, gradient="exact")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    far[9] = -torch.inf
    with torch.no_grad():
        found = both.run(both.leaves(), **call, backend="triton")
        exact = both.run(both.leaves(), **call, gradient="exact")
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    is_infinite = found[both.targets[..., 1:] >= 0] == torch.inf
    assert is_infinite.all() if kl != "jsd" else not is_infinite.any()


@pytest.mark.parametrize("programs", [1, 3])
def test_a_mass_on_a_masked_id_that_underflows_later(
    monkeypatch: pytest.MonkeyPatch, programs: int
) -> None:
    """The log ratio of the first tile is infinite, until the teacher's reference rises above it."""
    give_programs(monkeypatch, programs)
    both = zipf(torch.float32, "cpu", 140, 3000)
    both.bias[9] = -torch.inf
    both.teacher_weight[2900] = 20 * both.teacher_hidden[0]
    call = {**PLAIN, "alpha": 0.0, "reduction": "none"}
    found = both.run(both.leaves(), **call, backend="triton", filter=EVERY)
    expected = both.run(both.leaves(), **call, gradient="exact")
    sure = expected < torch.inf
    assert sure.any() and not found.isnan().any()
    torch.testing.assert_close(found[sure], expected[sure], rtol=1e-5, atol=1e-5)


@KLS
def test_each_value_alone_has_its_gradient(kl: str) -> None:
    """A loss of nll alone, or of the divergence alone, has no part of the other."""
    both, call = zipf(torch.float32, "cpu", 140, 1000), {**PLAIN, "stats": ("divergence", "nll")}
    call["divergence"] = kl
    for name in call["stats"]:
        leaves, right = both.leaves(), both.leaves()
        ours = getattr(both.run(leaves, **call, backend="triton"), name)
        exact = getattr(both.run(right, **call, gradient="exact"), name)
        wanted = gradients(exact, right)
        for key, grad in gradients(ours, leaves).items():
            assert error(grad, wanted[key]) < 2e-2, (name, key)


@KLS
@pytest.mark.parametrize(
    ("place", "dtype"), [each for each in BY_PLACE if each.values[1] != "fp32"]
)
def test_a_token_of_little_weight_has_its_digits(place: Place, dtype: str, kl: str) -> None:
    both, call = Both.make(DTYPES[dtype], place.device), {**CALLS["plain"], "shift": 0}
    call["divergence"] = kl
    little = torch.zeros(TOKENS, dtype=torch.bool, device=place.device)
    little[1:] = True
    # Jensen-Shannon's gradients are smaller: rounding to hidden's fp16 would decide.
    weight = 3e-4 if kl == "jsd" else 1e-4
    some = {**call, "token_weight": torch.ones_like(little).float().masked_fill(little, weight)}
    leaves, wide = both.leaves(), wide_leaves(both)
    loss = both.run(leaves, **some, **place.options, filter=EVERY)
    right = both.dense(wide, kl, call).loss * some["token_weight"].double()
    ours = torch.autograd.grad(loss.sum(), leaves["hidden"])[0][little]
    wanted = torch.autograd.grad(right.sum(), wide["hidden"])[0][little]
    # In fp16 d_logits themselves have fewer digits.
    assert error(ours, wanted) < {"fp16": 1e-2, "bf16": GRADIENTS[kl]["bf16"]}[dtype]


@KLS
def test_the_same_bytes_in_every_run(kl: str) -> None:
    both = zipf(torch.float32, "cpu", 140, 1000)
    runs = []
    for _ in range(2):
        leaves = both.leaves()
        loss = both.run(leaves, **PLAIN, backend="triton", divergence=kl)
        loss.backward()  # pyright: ignore
        runs.append([loss, *(leaf.grad for leaf in leaves.values())])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


# Each divergence has both values, and either model has both.
@pytest.mark.parametrize(
    ("divergence", "who", "value"),
    [
        (divergence, who, (torch.inf, torch.nan)[(number + at) % 2])
        for number, divergence in enumerate(("forward_kl", "reverse_kl", "jsd", "tvd"))
        for at, who in enumerate(("hidden", "teacher_hidden"))
    ],
)
@pytest.mark.parametrize(
    "way", [("torch", "exact"), ("triton", "exact"), ("triton", "filtered")], ids="-".join
)
def test_what_is_not_finite_shows(
    way: tuple[str, str], divergence: str, value: float, who: str
) -> None:
    """In its token, and there alone: not in its block of tokens, nor in another."""
    # Tiles have a program of each token: there are no blocks of 128.
    both = zipf(torch.float32, "cpu", 12 if way == ("triton", "exact") else 140, 700)
    getattr(both, who)[3, 5] = value
    call = {**PLAIN, "alpha": 0.0, "reduction": "none", "divergence": divergence}
    loss = both.run(both.leaves(), **call, backend=way[0], gradient=way[1])
    assert loss[3].isnan() and loss.isnan().sum() == 1


# -- what is refused ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "eps": ({"filter": Filter(eps=0.01)}, "^filter .* must keep columns by mass, got eps=0.01"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    changes, rule = REFUSED[name]
    both = Both.make(torch.float32)
    with pytest.raises(ValueError, match=rule):
        both.run(both.leaves(), backend="triton", **changes)


def test_a_wide_teacher_is_refused() -> None:
    both = Both.make(torch.float32)
    given = [x.double() for x in (both.teacher_hidden, both.teacher_weight)]
    with pytest.raises(ValueError, match=r'^backend="triton" .* needs a teacher in bf16, .* float'):
        linear_distillation(both.hidden, both.weight, *given, backend="triton")
