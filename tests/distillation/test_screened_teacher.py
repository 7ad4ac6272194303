"""Forward KL with the teacher's logits in 8 bits: errors, refusals, small calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from cce_dist import DistillationOutput, Filter, Screen, linear_distillation
from cce_dist.backends.triton import backend as triton_backend
from cce_dist.backends.triton.teacher import eight_bits
from cce_dist.core.allocations import track_allocations
from cce_dist.distillation import by_kernels
from cce_dist.testing import TORCH_CPU, TRITON_PLACES, Place
from tests.backends.triton.triton_cases import give_programs
from tests.distillation.test_by_kernels import EVERY, PLAIN, gradients, wide_leaves, zipf
from tests.distillation.test_distillation import Both, error

MARKS = {"cpu": [], "cuda": [pytest.mark.gpu]}
PLACES = [pytest.param(place, id=str(place), marks=MARKS[place.device]) for place in TRITON_PLACES]
INF = float("inf")
OF_TEACHER = ("teacher_hidden", "teacher_weight")
KL_ALONE: dict[str, Any] = {**PLAIN, "alpha": 0.0}
CALLS: dict[str, dict[str, Any]] = {
    # Hopper's kernel, if there is one.
    "plain": KL_ALONE,
    "cross-entropy": PLAIN,
    "temperature": {**KL_ALONE, "temperature": 2.0},
    "softcaps": {**KL_ALONE, "softcap": 20.0, "teacher_softcap": 25.0},
}


def in_16_bits(place: Place) -> Both:
    if place.interprets:
        return zipf(torch.float16, place.device, 140, 4200)
    return zipf(torch.bfloat16, place.device)


def screened(both: Both, leaves: dict[str, Tensor] | None = None, **call: Any) -> Any:
    """Returns the loss of a call whose teacher is screened, and checks that it is."""
    stats = {"logits": "screened", "stats": ("screened",)}
    out = both.run(both.leaves() if leaves is None else leaves, **{**call, **stats})
    assert out.screened
    return out.loss


def dense_in_bf16(both: Both, call: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns each token's KL, and the gradients of the loss, by logits and their gradients in
    bf16."""

    def logits(hidden: Tensor, weight: Tensor, bias: Tensor, softcap: float | None) -> Tensor:
        z = torch.nn.functional.linear(hidden.float(), weight.float(), bias.float())
        z = z.to(torch.bfloat16).float()
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    leaves, T = both.leaves(), call["temperature"]
    z = logits(*leaves.values(), call["softcap"])
    of_teacher = both.teacher_hidden, both.teacher_weight, both.teacher_bias
    y = logits(*of_teacher, call.get("teacher_softcap"))
    log_q, log_p = (z / T).log_softmax(-1), (y / T).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    nll = -z.log_softmax(-1).gather(-1, both.targets[:, None])[:, 0]
    alpha = call["alpha"]
    loss = ((1 - alpha) * kl + alpha * nll).mean()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return kl.detach(), dict(zip(leaves, grads, strict=True))


def rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("place", PLACES)
def test_errors_are_at_most_those_of_dense_bf16(place: Place, call: str) -> None:
    both, options = in_16_bits(place), CALLS[call]
    leaves, wide = both.leaves(), wide_leaves(both)
    given = {"logits": "screened", "stats": ("divergence", "screened")}
    out = both.run(leaves, **{**options, **given, **place.options})
    assert out.screened.shape == () and out.screened.dtype == torch.bool and out.screened
    out.loss.backward()
    right = both.dense(wide, "forward_kl", options)
    right.loss.mean().backward()
    kl, grads = dense_in_bf16(both, options)
    ours, theirs = (rms(x - right.divergence) for x in (out.divergence, kl))
    # Of flat softmaxes 8-bit logits err more than those in bf16, which are small numbers.
    assert ours <= theirs + 1e-4, f"KL: {ours:.2e}, dense {theirs:.2e}"
    for name, leaf in leaves.items():
        expected = wide[name].grad
        assert expected is not None and leaf.grad is not None
        ours, theirs = error(leaf.grad, expected), error(grads[name], expected)
        assert ours <= theirs, f"{name}: {ours:.2e}, dense {theirs:.2e}"


@pytest.mark.parametrize("place", PLACES)
def test_columns_of_much_mass_are_exact(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their exact logits 8 bits cost several times as much."""
    both = in_16_bits(place)
    given = {"logits": "screened", "stats": ("divergence",)}
    right = both.dense(wide_leaves(both), "forward_kl", KL_ALONE).divergence

    def off() -> float:
        out = both.run(both.leaves(), **{**KL_ALONE, **given, **place.options})
        return rms(out.divergence - right)

    corrected = off()
    monkeypatch.setattr(eight_bits, "LARGE", 1e9)
    assert corrected < off() / 4


@pytest.mark.parametrize("programs", [1, 3])
def test_launches_and_overflow(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Several splits; a token of each model whose sums overflow; ids that a model masks."""
    give_programs(monkeypatch, programs)
    both = zipf(torch.float16, "cpu", 140, 3000)
    both.hidden[1] *= 300
    both.teacher_hidden[2] *= 20
    both.teacher_bias[7] = -torch.inf
    call = {**KL_ALONE, "backend": "triton", "reduction": "none", "filter": EVERY}
    found, right = screened(both, **call), both.run(both.leaves(), **call)
    torch.testing.assert_close(found, right, rtol=2e-2, atol=1e-2)


def test_an_id_that_the_student_masks() -> None:
    """The teacher gives it much mass: KL is infinite, and not NaN."""
    both = zipf(torch.float16, "cpu", 140, 4200)
    both.bias[0] = -torch.inf
    call = {**KL_ALONE, "backend": "triton", "reduction": "none"}
    assert (screened(both, **call) == INF).all()


@pytest.mark.parametrize("count", [0, 1, 128, 129])
def test_tokens_that_count(count: int) -> None:
    both = zipf(torch.float16, "cpu", 140, 4200)
    # A softmax does not change by it; of a token that does not count only the bias is left.
    both.teacher_bias.add_(100)
    targets = torch.full_like(both.targets, -100)
    targets[5 : 5 + count] = 3
    both = replace(both, targets=targets)
    # What is ignored may hold anything.
    both.teacher_hidden[4], both.hidden[4] = torch.nan, torch.nan
    call = {**KL_ALONE, "backend": "triton", "reduction": "none"}
    leaves = both.leaves()
    out = both.run(leaves, **{**call, "stats": ("screened",)}, logits="screened")
    right = both.run(both.leaves(), **call)
    torch.testing.assert_close(out.loss, right, rtol=1e-2, atol=5e-3)
    assert out.screened and not out.loss[targets < 0].any()
    assert all(not grad.isnan().any() for grad in gradients(out.loss, leaves).values())


def test_frequent_ids_at_the_end() -> None:
    """Masses of columns before them are recorded far too large: all of these are listed."""
    both = zipf(torch.float16, "cpu", 140, 12000)
    both = replace(
        both,
        **{
            name: getattr(both, name).flip(0)
            for name in ("weight", "bias", "teacher_weight", "teacher_bias")
        },
        targets=len(both.weight) - 1 - both.targets,
    )
    call = {**KL_ALONE, "backend": "triton", "reduction": "none"}
    assert rms(screened(both, **call) - both.run(both.leaves(), **call)) < 3e-4


def test_columns_that_the_student_saturates() -> None:
    """Their softcap' is near 0, and so is the mass by which they are kept; they are listed."""
    both = zipf(torch.float16, "cpu", 140, 4200)
    both.bias[:300] += 80
    call = {**KL_ALONE, "backend": "triton", "reduction": "none", "softcap": 10.0}
    assert rms(screened(both, **call) - both.run(both.leaves(), **call)) < 4e-3


def test_equal_models_have_no_divergence_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit logits raise a KL by half their variance; it is taken off."""
    in_e4m3 = Mock(return_value=Screen(dtype="e4m3"))
    monkeypatch.setattr(by_kernels, "Screen", in_e4m3)
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (
        0.4 * torch.randn(n, 64, generator=generator).to(torch.float16) for n in (256, 5000)
    )
    out = linear_distillation(
        *(hidden, weight, hidden, weight),
        logits="screened",
        stats=("screened",),
        backend="triton",
        reduction="none",
    )
    assert isinstance(out, DistillationOutput) and out.screened and in_e4m3.called
    assert abs(out.loss.mean()) < 3e-5


@pytest.mark.parametrize("place", PLACES)
def test_8_bits_that_would_err_are_refused(place: Place) -> None:
    """Larger logits err more. Refused, all is as with full logits."""
    both = in_16_bits(place)
    call = {**PLAIN, **place.options, "stats": ("divergence", "screened")}
    outs, grads = [], []
    for given in (
        {"logits": "screened", "teacher_logit_scale": 30.0},
        {"teacher_logit_scale": 30.0},
        {"logits": "screened"},
    ):
        leaves = both.leaves()
        outs.append(both.run(leaves, **{**call, **given}))
        grads.append(torch.autograd.grad(outs[-1].loss, list(leaves.values())))
    assert [bool(out.screened) for out in outs] == [False, False, True]
    assert all(torch.equal(x, y) for x, y in zip(outs[0][:2], outs[1][:2], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(*grads[:2], strict=True))


def test_one_token_that_would_err_is_refused() -> None:
    both = zipf(torch.float16, "cpu", 140, 4200)
    both.teacher_hidden[7] *= 60
    call = {**KL_ALONE, "backend": "triton", "logits": "screened", "stats": ("screened",)}
    assert not both.run(both.leaves(), **call).screened
    others = replace(both, targets=both.targets.index_fill(0, torch.tensor([7]), -100))
    assert others.run(others.leaves(), **call).screened


@pytest.mark.usefixtures("unextended")
def test_a_small_call_has_the_bits_of_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []

    def note(*of_call: int) -> bool:
        sizes.append(of_call)
        return False

    monkeypatch.setattr(triton_backend.TritonBackend, "gains_by_screening", staticmethod(note))
    both = zipf(torch.float16, "cpu", 140, 4200)
    wide = {name: torch.cat([getattr(both, name)] * 2, 1) for name in OF_TEACHER}
    both = replace(both, **wide)
    call = {**PLAIN, "backend": "triton", "stats": ("divergence", "screened")}
    found = both.run(both.leaves(), **call, logits="screened")
    right = both.run(both.leaves(), **call)
    assert not found.screened and torch.equal(found.divergence, right.divergence)
    assert sizes == [(140, 4200, 2 * both.weight.shape[1])]


def test_a_small_vocabulary_has_full_logits() -> None:
    both = zipf(torch.float16, "cpu", 140, 4095)
    call = {**PLAIN, "backend": "triton", "stats": ("screened",)}
    assert not both.run(both.leaves(), **call, logits="screened").screened


def test_recordings_keep_calls_apart() -> None:
    """Of the same shapes; with full logits and without, of two teachers, in turns."""
    first = zipf(torch.float16, "cpu", 12, 4200)
    second = replace(first, teacher_weight=1.2 * first.teacher_weight)
    call = {**KL_ALONE, "backend": "triton"}
    rounds = []
    # Computed, recorded, played.
    for _ in range(3):
        losses = []
        for both in (first, second):
            losses += [screened(both, **call), both.run(both.leaves(), **call)]
        rounds.append(torch.stack(losses))
    assert len(set(rounds[0].tolist())) == 4
    assert all(torch.equal(losses, rounds[0]) for losses in rounds)


def test_8_bit_rows_are_freed_before_the_backward() -> None:
    both = zipf(torch.float16, "cpu", 140, 4200)
    call, num_bytes = {**KL_ALONE, "backend": "triton"}, both.teacher_weight.numel()
    live, peak = [], []
    for logits in ("screened", "full"):
        with track_allocations() as allocations:
            loss = both.run(both.leaves(), **call, logits=logits)
            live.append(allocations.live_bytes)
        peak.append(allocations.peak_bytes)
        assert loss.requires_grad
    assert live[0] < live[1] + num_bytes / 10 and peak[0] > peak[1] + num_bytes


@pytest.mark.parametrize("logits", ["screened", "full"])
def test_an_infinite_hidden_state_shows(logits: str) -> None:
    both = zipf(torch.float16, "cpu", 140, 4200)
    both.teacher_hidden[3, 5] = torch.inf
    call = {**KL_ALONE, "backend": "triton", "reduction": "none"}
    kl = both.run(both.leaves(), **call, logits=logits)
    assert kl[3].isnan() and kl.isnan().sum() == 1


def test_without_kernels_logits_are_full() -> None:
    both = zipf(torch.bfloat16, "cpu", 100, 5000)
    call = {**PLAIN, **TORCH_CPU.options, "stats": ("divergence", "screened")}
    found = both.run(both.leaves(), **call, logits="screened")
    right = both.run(both.leaves(), **call)
    assert not found.screened and torch.equal(found.divergence, right.divergence)


def test_the_same_bytes_in_every_run() -> None:
    both = zipf(torch.float16, "cpu", 140, 4200)
    runs = []
    for _ in range(2):
        leaves = both.leaves()
        loss = screened(both, leaves, **PLAIN, backend="triton")
        loss.backward()
        runs.append([loss, *(leaf.grad for leaf in leaves.values())])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divergence": "jsd"}, 'needs divergence="forward_kl", got \'jsd\'; use logits="full"'),
        ({"gradient": "exact"}, "needs a filter that leaves columns out, and gradient='exact'"),
        ({"filter": Filter(keep=0.0)}, "a filter whose keep is above 0"),
        ({"logits": "8bit"}, "logits must be one of 'full', 'screened', got '8bit'"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_has_no_screened_logits(backend: str, changes: dict[str, Any], message: str) -> None:
    both = zipf(torch.float16, "cpu", 40, 4200)
    with pytest.raises(ValueError) as caught:
        both.run(both.leaves(), **{**KL_ALONE, "backend": backend, "logits": "screened", **changes})
    assert message in str(caught.value)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_teacher_of_more_digits_is_refused(backend: str) -> None:
    both = zipf(torch.float32, "cpu", 40, 4200)
    call = {**KL_ALONE, "backend": backend}
    message = 'teacher_hidden must be bf16 or fp16 with logits="screened"'
    with pytest.raises(ValueError, match=message):
        both.run(both.leaves(), **call, logits="screened")
    # The student may have them.
    halves = {name: getattr(both, name).half() for name in ("teacher_hidden", "teacher_weight")}
    both = replace(both, **halves)
    found = both.run(both.leaves(), **{**call, "logits": "screened", "stats": ("screened",)})
    assert found.screened == (backend == "triton")
    torch.testing.assert_close(found.loss, both.run(both.leaves(), **call), rtol=1e-2, atol=1e-3)


def test_padding_of_the_teacher() -> None:
    """Its rows are no classes, and are not quantised."""
    both = zipf(torch.float16, "cpu", 100, 5000)
    rows = both.teacher_weight
    padded = torch.cat([rows, rows.new_full((100, rows.shape[1]), 1e4)])
    call = {**KL_ALONE, "backend": "triton"}
    bias = torch.cat([both.teacher_bias, both.teacher_bias[:100]])
    of_padded = replace(both, teacher_weight=padded, teacher_bias=bias)
    assert torch.equal(screened(of_padded, **call), screened(both, **call))
