"""Calls of almost as many tokens are one kind: ignored tokens extend them to one size."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cce_dist import Filter, LossOptions, linear_cross_entropy, linear_distillation, token_logprobs
from cce_dist.algorithm import plan
from cce_dist.backends.triton.launch.steps import Recording
from cce_dist.frontend import prepare
from cce_dist.frontend.inputs import Extension, Inputs
from cce_dist.testing import TRITON_CPU, TRITON_PLACES, Place, grid, speed_up_interpreter
from cce_dist.testing.forks import fork_context
from cce_dist.vocab_shard import VocabShard
from tests.backends.triton.launch.replay_cases import (
    COLUMNS,
    PLAYED,
    WAYS,
    kinds,
    problem,
    recordings,
    require_same,
    run,
)

# All of them are 208 with the ignored ones at the end. The third call of a kind is played.
NUMBERS = (193, 207, 200)
EXTENDED = {
    "filtered": WAYS["filtered"],
    "exact": WAYS["exact"],
    "screened": WAYS["screened"],
    "kept logits": {"gradient": "exact", "keep_logits": True},
    "each token": {"reduction": "none", "stats": ("lse", "entropy", "tail_mass", "logit_moments")},
    "distillation": WAYS["distillation"],
    "screened teacher": {"teacher": True, "logits": "screened"},
    "Jensen-Shannon": WAYS["Jensen-Shannon"],
}


def problem_of(place: Place, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """So many tokens, whose memory ends with them."""
    hidden, weight, targets = problem(place)
    rows = torch.arange(number, device=place.device)
    return hidden[rows % len(hidden)], weight, targets[(3 * rows) % len(targets)]


def output_of(tensors: tuple[Tensor, Tensor, Tensor], way: str, **changes: Any) -> Any:
    """A teacher has the student's hidden states, in the same memory."""
    options = {**EXTENDED[way], "backend": "triton", **changes}
    if not options.pop("teacher", False):
        return linear_cross_entropy(*tensors, **options)
    hidden, weight, targets = tensors
    teacher = hidden.detach(), weight.detach().flip(0)
    return linear_distillation(hidden, weight, *teacher, targets, **options)


def results(tensors: tuple[Tensor, Tensor, Tensor], way: str) -> list[Tensor]:
    options = dict(EXTENDED[way])
    if options.get("reduction") != "none":
        return run(tensors, **options)
    hidden, weight = (x.detach().clone().requires_grad_() for x in tensors[:2])
    result: Any = linear_cross_entropy(hidden, weight, tensors[2], backend="triton", **options)
    ramp = torch.arange(result.loss.numel(), device=hidden.device).view_as(result.loss)
    (result.loss * ramp + result.lse - result.entropy * ramp).sum().backward()
    values = result.loss, result.lse, result.entropy, result.tail_mass, *result.logit_moments
    assert hidden.grad is not None and weight.grad is not None
    return [*(x.detach() for x in values), hidden.grad, weight.grad]


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=tuple(EXTENDED)))
def test_numbers_of_tokens_share_a_recording(
    place: Place, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [problem_of(place, number) for number in NUMBERS]
    rounded = [results(tensors, way) for tensors in problems]
    # The tokens of a distillation are picked apart.
    played = 3 if "teacher" in EXTENDED[way] else 2
    assert len(recordings()) == PLAYED.get(way, played)
    known = len(kinds())
    plays = []
    play = Recording.play
    monkeypatch.setattr(Recording, "play", lambda *given: plays.append(given) or play(*given))
    again = [results(tensors, way) for tensors in problems]
    assert len(plays) == played * len(NUMBERS) and len(kinds()) == known
    monkeypatch.setattr(Extension, "of", lambda inputs, options: None)
    for tensors, first, second in zip(problems, rounded, again, strict=True):
        require_same(first, second)
        # As many blocks of tokens, so all sums have their order.
        require_same(first, results(tensors, way))
        assert [x.shape for x in first[-2:]] == [x.shape for x in tensors[:2]]


SHAPES = ((2, 70), (3, 1), (5, 29, 1))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, shape=SHAPES, shift=(0, 1, 2)))
def test_each_shape_and_shift(place: Place, shape: tuple[int, ...], shift: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, 16, generator=generator) for size in (shape, (40,)))
    temperature = 0.5 + torch.rand(shape, generator=generator)
    leaves = [x.to(place.device).requires_grad_() for x in (hidden, weight, temperature)]
    targets = torch.randint(40, shape, generator=generator).to(place.device)
    found = []
    for backend in ("triton", "torch"):
        output: Any = token_logprobs(
            *(leaves[0], leaves[1], targets),
            temperature=leaves[2],
            shift=shift,
            gradient="exact",
            backend=backend,
        )
        total = output.logprobs.square().sum()
        found.append((output.logprobs, *torch.autograd.grad(total, leaves)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, number=(2, 5, 17)))
def test_hidden_of_one_dim(place: Place, number: int) -> None:
    """torch calls a column contiguous, whatever its strides."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 1, generator=generator) for size in (number, 40))
    targets = torch.randint(40, (number,), generator=generator).to(place.device)
    hidden, weight = hidden.to(place.device), weight.to(place.device)
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    wide = torch.cat([hidden, hidden], 1)
    for same in (hidden, wide[:, :1], hidden.T.contiguous().T):
        loss = linear_cross_entropy(same, weight, targets, backend="triton")
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=tuple(EXTENDED)))
def test_memory_behind_hidden_changes_nothing(place: Place, way: str) -> None:
    tensors = problem_of(place, 200)
    for ignored in (False, True):
        if ignored:
            tensors = (*tensors[:2], torch.full_like(tensors[2], -100))
        found = []
        for behind in (0.0, float("nan")):
            memory = tensors[0].new_full((512, tensors[0].shape[1]), behind)
            memory[:200] = tensors[0]
            hidden, weight = memory.requires_grad_()[:200], tensors[1].clone().requires_grad_()
            loss = output_of((hidden, weight, tensors[2]), way, bias=None, stats=())
            found.append([loss, *torch.autograd.grad(loss.sum(), (memory, weight))])  # pyright: ignore
        require_same(*found)
        assert not found[0][1][200:].any()


def read_to_the_end(way: str) -> None:
    """Computes with hidden states at the end of memory: a read of a row more ends the process."""
    speed_up_interpreter()
    page = mmap.PAGESIZE
    hidden, weight, targets = problem_of(TRITON_CPU, 200)
    size = hidden.nbytes + -hidden.nbytes % page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    # PROT_NONE
    assert protect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    at_end = torch.frombuffer(
        memory, dtype=hidden.dtype, count=hidden.numel(), offset=size - hidden.nbytes
    ).view_as(hidden)
    at_end.copy_(hidden)
    for some in (targets, torch.full_like(targets, -100)):
        leaves = at_end.detach().requires_grad_(), weight.detach().requires_grad_()
        # A first call, a recorded one and a played one.
        for _ in range(3):
            loss = output_of((*leaves, some), way, bias=None)
            getattr(loss, "loss", loss).sum().backward()


@pytest.mark.interpreter
@pytest.mark.parametrize("way", tuple(EXTENDED))
def test_no_row_behind_hidden_is_read(way: str) -> None:
    process: Any = fork_context().Process(target=read_to_the_end, args=(way,))
    process.start()
    process.join()
    assert process.exitcode == 0


def inputs_of(number: int, **changes: Tensor) -> Inputs:
    hidden, targets = torch.empty(number, 2), torch.empty(number, dtype=torch.int64)
    return Inputs(hidden, torch.empty(COLUMNS, 2), targets)._replace(**changes)


def test_sizes() -> None:
    options = LossOptions()
    by_size: dict[int, set[int]] = {}
    for number in range(1, 20000):
        extension = Extension.of(inputs_of(number), options)
        if extension is None:
            assert number % 16 == 0
            continue
        assert 0 < extension.size - number < max(16, number / 16)
        assert 1 <= extension.num_rows <= number
        by_size.setdefault(extension.size, set()).add(extension.num_rows)
    # The view of hidden has one shape for all numbers of a size.
    assert all(len(rows) == 1 for rows in by_size.values())
    # From one power of two to the next.
    assert sum(8192 < size <= 16384 for size in by_size) == 16


@pytest.mark.parametrize(
    "options",
    [{"gradient": "in_forward"}, {"invariant": True}, {"sequence_parallel": True}],
    ids=str,
)
def test_ways_that_need_all_rows(options: dict[str, Any]) -> None:
    assert Extension.of(inputs_of(200), LossOptions()) is not None
    assert Extension.of(inputs_of(200), LossOptions(**options)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"targets": torch.empty(199, dtype=torch.int64)},
        {"targets": torch.empty(200, dtype=torch.int32)},
        {"token_weight": torch.empty(200, 1)},
        {"hidden": torch.empty(200, 0)},
    ],
    ids=["tokens", "dtype", "token_weight", "no dims"],
)
def test_what_a_check_is_to_name(changes: dict[str, Tensor]) -> None:
    assert Extension.of(inputs_of(200, **changes), LossOptions()) is None


def test_the_hidden_gradient_has_few_rows_more() -> None:
    hidden, weight, targets = problem_of(TRITON_CPU, 200)
    grad = run((hidden, weight, targets))[-2]
    assert grad.untyped_storage().nbytes() == 208 * hidden.shape[1] * hidden.element_size()


def test_ignored_tokens_do_not_raise_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []

    def plan_of(hidden: Tensor, num_tokens: int, *others: Any, **named: Any) -> Any:
        numbers.append((num_tokens, named["ordered_tokens"]))
        return plan.plan_of(hidden, num_tokens, *others, **named)

    monkeypatch.setattr(prepare, "plan_of", plan_of)
    run(problem_of(TRITON_CPU, 200))
    run(problem_of(TRITON_CPU, 208))
    assert numbers == [(208, 192), (208, None)]
    hidden, shard = torch.empty(208, 8, dtype=torch.float16), VocabShard(0, 9999, 9999)
    of_call = hidden, 208, LossOptions(backend="triton"), None, shard
    few, many = plan.plan_of(*of_call, ordered_tokens=192), plan.plan_of(*of_call)
    assert 0 < few.threshold < many.threshold


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 2.0), (0.3, 1.0), (0.3, 2.0)])
def test_each_token_of_a_distillation(alpha: float, temperature: float, shift: int) -> None:
    """Two temperatures are two losses, of which one is extended."""
    hidden, weight, targets = (
        x.float() if x.is_floating_point() else x for x in problem_of(TRITON_CPU, 200)
    )
    shape, found = (4, 50), []
    hidden, targets = hidden.view(*shape, -1), targets.view(shape)
    teacher = hidden.flip(1), weight.flip(0)
    for backend in ("triton", "torch"):
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        result: Any = linear_distillation(
            *leaves, *teacher, targets if alpha else None, alpha=alpha, temperature=temperature,
            shift=shift, reduction="none", stats=("divergence",), filter=Filter(keep=0),
            backend=backend,
        )  # fmt: skip
        ramp = torch.arange(result.loss.numel()).view_as(result.loss)
        grads = torch.autograd.grad((result.loss * ramp).sum(), leaves)
        found.append((result.loss, result.divergence, *grads))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("number", [200, 208])
def test_results_can_be_written_and_detached_in_place(number: int) -> None:
    hidden, weight, targets = problem_of(TRITON_CPU, number)
    leaf = hidden.requires_grad_()
    options: dict[str, Any] = {**EXTENDED["each token"], "backend": "triton"}
    result: Any = linear_cross_entropy(leaf, weight, targets, **options)
    lse = result.lse.detach().clone()
    assert not result.lse.detach_().requires_grad
    result.loss.mul_(2).sum().backward()
    assert torch.equal(result.lse, lse) and leaf.grad is not None
