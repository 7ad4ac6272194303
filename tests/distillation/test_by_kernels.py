"""KLs and Jensen-Shannon by Triton kernels against dense softmaxes in float64, over ranks too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import Filter, VocabShard, linear_distillation
from cce_dist.distillation.by_kernels import _Heads
from cce_dist.reference import divergence_reference, reference_logits
from cce_dist.testing import DTYPES, TRITON_PLACES, Place, nccl_pool, shared_pool
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


@KLS
@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize(("place", "dtype"), BY_PLACE)
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
    hidden, weight = torch.zeros(64, 16), 0.1 * torch.randn(2000, 16, generator=generator)
    hidden[:, 0], weight[:, 0], weight[-5, 0] = 80 + torch.arange(64) / 4, 0, 1
    others = tuple(torch.randn(n, 16, generator=generator) for n in (64, 2000))
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


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The marks of each forward."""
    seen, whole = [], _Heads._of_heads

    def of_heads(heads: _Heads, *request: Any) -> Any:
        out = whole(heads, *request)
        seen.append(out.scores)
        return out

    monkeypatch.setattr(_Heads, "_of_heads", of_heads)
    return seen


def logits_of(both: Both, softcaps: tuple[float | None, float | None]) -> tuple[Tensor, Tensor]:
    """Returns the student's and the teacher's, float64."""
    heads = (
        (both.hidden, both.weight, both.bias),
        (both.teacher_hidden, both.teacher_weight, both.teacher_bias),
    )
    z, y = (
        reference_logits(*head, softcap=softcap).double()
        for head, softcap in zip(heads, softcaps, strict=True)
    )
    return z, y


@KLS
@pytest.mark.parametrize("softcaps", [(3.0, None), (None, 3.0)])
def test_targets_leave_the_dropped_mass(
    scores: list[Any], softcaps: tuple[float | None, float | None], kl: str
) -> None:
    """A target's column is kept: both models' dropped sums lose what they had of it."""
    targets = torch.arange(1000, 1100)
    both = replace(zipf(torch.float32, "cpu", 100, 2000), targets=targets)
    call = {**PLAIN, "softcap": softcaps[0], "teacher_softcap": softcaps[1], "divergence": kl}
    with torch.no_grad():
        both.run(both.leaves(), **call, backend="triton", filter=Filter(keep=0.1))
    z, y = (x.float() for x in logits_of(both, softcaps))
    slope = 1.0 if softcaps[0] is None else 1 - (z / softcaps[0]) ** 2
    dropped = (scores[0].kept[:, 0] & 1) == 0
    assert dropped.any() and not dropped[targets].any()
    of_student, of_teacher = (((x.exp() * slope)[:, dropped]).sum(1) for x in (z, y))
    torch.testing.assert_close(scores[0].log_dropped.exp(), of_student, rtol=1e-4, atol=0)
    if kl == "forward_kl":
        torch.testing.assert_close(scores[0].of_dropped.exp(), of_teacher, rtol=1e-4, atol=0)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("softcaps", [(3.0, None), (None, 3.0), (None, None)])
def test_how_far_dropped_logits_are_apart(
    monkeypatch: pytest.MonkeyPatch,
    scores: list[Any],
    softcaps: tuple[float | None, float | None],
    programs: int,
) -> None:
    """For reverse KL: in the mean, weighed by the student's exponentials times softcap'. A token of
    each model overflows, and is computed again."""
    give_programs(monkeypatch, programs)
    both = zipf(torch.float32, "cpu", 100, 2000)
    both.hidden[1] *= 30
    both.teacher_hidden[2] *= 30
    call = {**PLAIN, "softcap": softcaps[0], "teacher_softcap": softcaps[1], "alpha": 0.0}
    call["divergence"] = "reverse_kl"
    with torch.no_grad():
        loss = both.run(both.leaves(), **call, backend="triton", filter=Filter(keep=0.1))
    z, y = logits_of(both, softcaps)
    assert error(loss, divergence_reference(z, y, "reverse_kl").mean()) < 1e-5
    slope = 1.0 if softcaps[0] is None else 1 - (z / softcaps[0]) ** 2
    dropped = (scores[0].kept[:, 0] & 1) == 0
    weight = ((z - z.logsumexp(1, keepdim=True)).exp() * slope)[:, dropped]
    expected = (weight * (z - y)[:, dropped]).sum(1) / weight.sum(1)
    torch.testing.assert_close(scores[0].of_dropped.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beta", [0.001, 0.1])
def test_a_mixture_near_the_student_is_filtered_as_the_middle_one(beta: float) -> None:
    """All log ratios are at most -log(1 - beta), and a column's score has them in proportion."""
    both, errors = zipf(torch.float32, "cpu", 140, 1500), []
    for each in (beta, 0.5):
        call = {**PLAIN, "alpha": 0.0, "divergence": "jsd", "beta": each}
        leaves, exact = both.leaves(), both.leaves()
        ours = both.run(leaves, **call, backend="triton", filter=Filter(keep=0.01))
        right = gradients(both.run(exact, **call, gradient="exact"), exact)
        ours = gradients(ours, leaves)
        errors.append({name: error(ours[name], right[name]) for name in ("hidden", "weight")})
    of_beta, of_middle = errors
    for name, middle in of_middle.items():
        assert of_beta[name] < 1.2 * middle, (name, errors)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("softcaps", [(3.0, None), (None, 3.0), (None, None)])
def test_how_far_dropped_columns_are_from_the_mixture(
    scores: list[Any], softcaps: tuple[float | None, float | None], beta: float
) -> None:
    """For Jensen-Shannon: the mean log ratio, weighed by the student's probabilities times
    softcap', beside how far both log-sum-exps are apart."""
    both = zipf(torch.float32, "cpu", 140, 1500)
    call = {**PLAIN, "softcap": softcaps[0], "teacher_softcap": softcaps[1], "alpha": 0.0}
    call |= {"divergence": "jsd", "beta": beta}
    with torch.no_grad():
        loss = both.run(both.leaves(), **call, backend="triton", filter=Filter(keep=0.1))
    z, y = logits_of(both, softcaps)
    assert error(loss, divergence_reference(z, y, "jsd", beta).mean()) < 1e-5
    leaves, exact = both.leaves(), both.leaves()
    ours: Any = both.run(leaves, **call, backend="triton", filter=Filter(keep=0.01))
    right: Any = both.run(exact, **call, gradient="exact")
    wanted = gradients(right, exact)
    for name, grad in gradients(ours, leaves).items():
        assert error(grad, wanted[name]) < 0.15, name
    slope = 1.0 if softcaps[0] is None else 1 - (z / softcaps[0]) ** 2
    log_q, log_p = z.log_softmax(1), y.log_softmax(1)
    ratios = log_q - (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    marks, place = scores[0], torch.empty(140, dtype=torch.int64)
    place[marks.order.long()] = torch.arange(140)
    dropped = ((marks.kept[:, 0][None, :] >> (place // 128)[:, None]) & 1) == 0
    weight = log_q.exp() * slope * dropped
    apart = z.logsumexp(1) - y.logsumexp(1)
    expected = (weight * ratios).sum(1) / weight.sum(1) + apart
    torch.testing.assert_close(marks.of_dropped.double(), expected, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("who", ["hidden", "teacher_hidden"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "tvd"])
@pytest.mark.parametrize(
    "way", [("torch", "exact"), ("triton", "exact"), ("triton", "filtered")], ids="-".join
)
def test_what_is_not_finite_shows(
    way: tuple[str, str], divergence: str, value: float, who: str
) -> None:
    """In its token, and there alone: not in its block of tokens, nor in another."""
    both = zipf(torch.float32, "cpu", 140, 700)
    getattr(both, who)[3, 5] = value
    call = {**PLAIN, "alpha": 0.0, "reduction": "none", "divergence": divergence}
    loss = both.run(both.leaves(), **call, backend=way[0], gradient=way[1])
    assert loss[3].isnan() and loss.isnan().sum() == 1


# -- ranks --------------------------------------------------------------------------------------


def on_a_rank(group: Any, both: Both, cuts: tuple[int, ...], split: bool, call: Any) -> Any:
    rank = dist.get_rank(group)
    if both.hidden.device.type != group_device(group):
        both = Both(*(x.to(group_device(group)) for x in vars(both).values()))
    start, stop = cuts[rank], cuts[rank + 1]
    leaves = both.leaves()
    for name in ("weight", "bias"):
        leaves[name] = leaves[name].detach()[start:stop].clone().requires_grad_()
    teacher = {
        "teacher_weight": both.teacher_weight[start:stop],
        "teacher_bias": both.teacher_bias[start:stop],
    }
    if split:
        leaves["hidden"] = both.hidden.chunk(group.size())[rank].clone().requires_grad_()
        teacher["teacher_hidden"] = both.teacher_hidden.chunk(group.size())[rank]
    shard = VocabShard(start, stop, len(both.weight))
    ranks = {"group": group, "vocab_shard": shard, "sequence_parallel": split}
    found = replace(both, **teacher).run(leaves, **call, **ranks, backend="triton")
    loss = found if isinstance(found, Tensor) else found.loss
    grads = gradients(loss, leaves)
    return loss.detach().cpu(), {name: x.cpu() for name, x in grads.items()}


def group_device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


@KLS
@pytest.mark.parametrize("call", ["one pass", "two temperatures"])
@pytest.mark.parametrize(
    ("cuts", "split"),
    [((0, 350, CLASSES), True), ((0, 11, 11, CLASSES), False)],
    ids=["even_and_sequence_parallel", "ragged_with_an_empty_shard"],
)
def test_over_ranks(cuts: tuple[int, ...], split: bool, call: str, kl: str) -> None:
    both, options = Both.make(torch.float32), {**CALLS[call], "filter": EVERY, "divergence": kl}
    ranks = shared_pool().run(len(cuts) - 1, on_a_rank, both, cuts, split, options)
    check_ranks(both, ranks, split, options, 5e-6)


@KLS
def test_a_shard_where_a_model_has_no_mass(kl: str) -> None:
    """Its sum underflows beside the other rank's; the other model's does not."""
    both, cuts = Both.make(torch.float32), (0, 350, CLASSES)
    far = both.bias if kl == "forward_kl" else both.teacher_bias
    far[350:] -= 130
    options = {**CALLS["plain"], "temperature": 1.0, "filter": EVERY, "divergence": kl}
    ranks = shared_pool().run(2, on_a_rank, both, cuts, False, options)
    check_ranks(both, ranks, False, options, GRADIENTS[kl]["fp32"] if kl == "jsd" else 5e-6)


@KLS
def test_a_shard_that_a_model_masks(kl: str) -> None:
    both, cuts = Both.make(torch.float32), (0, 350, CLASSES)
    far = both.bias if kl == "forward_kl" else both.teacher_bias
    far[350:] = -torch.inf
    options = {**CALLS["plain"], "filter": EVERY, "divergence": kl}
    ranks = shared_pool().run(2, on_a_rank, both, cuts, False, options)
    if kl == "jsd":
        check_ranks(both, ranks, False, options, GRADIENTS[kl]["fp32"])
    else:
        assert all((loss[both.targets[..., 1:] >= 0] == torch.inf).all() for loss, _ in ranks)


@KLS
def test_filtered_over_ranks(kl: str) -> None:
    """Each rank's dropped columns have the sum of their derivatives: the direction that all rows
    share is right."""
    both, cuts = zipf(torch.float32, "cpu", 140, 3000), (0, 700, 3000)
    generator = torch.Generator().manual_seed(5)
    both.weight.add_(0.5 * torch.randn(both.weight.shape[1], generator=generator))
    options = {**PLAIN, "reduction": "none", "filter": Filter(keep=0.01), "divergence": kl}
    ranks = shared_pool().run(2, on_a_rank, both, cuts, False, options)
    check_ranks(both, ranks, False, options, 5e-2)
    # A column's sum over tokens is right, whether it is kept or not.
    wide = wide_leaves(both)
    right = gradients(both.dense(wide, kl, options).loss, wide)["bias"]
    assert error(torch.cat([grads["bias"] for _, grads in ranks]), right) < 1e-2


@pytest.mark.gpu
@pytest.mark.multigpu
@KLS
@pytest.mark.parametrize("split", [False, True])
def test_filtered_over_two_gpus(split: bool, kl: str) -> None:
    both = zipf(torch.bfloat16, "cpu", 1024, 8192)
    options = {**PLAIN, "reduction": "none", "divergence": kl}
    ranks = nccl_pool().run(2, on_a_rank, both, (0, 3000, 8192), split, options)
    check_ranks(both, ranks, split, options, 1.2e-2)


def check_ranks(both: Both, ranks: Any, split: bool, call: Any, limit: float) -> None:
    wide = wide_leaves(both)
    expected = both.dense(wide, call.get("divergence", "forward_kl"), call).loss
    right = gradients(expected, wide)
    for loss, _ in ranks:
        assert torch.equal(loss, ranks[0][0])
        assert error(loss, expected) < min(limit, BY_HOPPER)
    for name in ("weight", "bias"):
        assert error(torch.cat([grads[name] for _, grads in ranks]), right[name]) < limit, name
    hidden = [grads["hidden"] for _, grads in ranks]
    assert error(torch.cat(hidden) if split else hidden[0], right["hidden"]) < limit


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
