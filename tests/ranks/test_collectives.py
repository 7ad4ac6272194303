"""all_reduce_logaddexp against torch.logsumexp in float64; the phases that each entry tells of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import (
    all_reduce_logaddexp,
    linear_cross_entropy,
    linear_distillation,
    listed_distillation,
    teacher_topk,
    token_logprobs,
)
from cce_dist.core.phases import watched_by
from cce_dist.pipeline.schedules.last_stage import LastStageLoss
from cce_dist.rl import grpo_loss
from cce_dist.testing import TORCH_CPU, TRITON_CPU, CollectiveCounter, Place, shared_pool

INF = torch.inf
WORLD_SIZES = (1, 2, 3, 4)


def reduce_rows(group: dist.ProcessGroup, parts: Tensor) -> tuple[Tensor, int]:
    mine = parts[dist.get_rank(group)]
    before = mine.clone()
    with CollectiveCounter() as counter:
        found = all_reduce_logaddexp(mine, group)
    assert torch.equal(mine.nan_to_num(), before.nan_to_num()), "the input must not change"
    return found, len(counter.calls)


VALUES = {
    "gaussian": torch.randn(4, 50, generator=torch.Generator().manual_seed(0)),
    "large": 1e4 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0)),
    "far_below_zero": torch.full((4, 3), -1e30),
    "one_rank_empty": torch.tensor([[1.0, 2.0], [-INF, -INF], [0.5, -3.0], [1.0, 1.0]]),
    "all_empty": torch.full((4, 3), -INF),
    "mixed": torch.tensor([[-INF, 1.0], [2.0, -INF], [-INF, -INF], [-INF, 100.0]]),
    "infinite": torch.tensor([[INF, 1.0], [2.0, INF], [-INF, -INF], [INF, 1.0]]),
    "matrix": torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)),
    "scalar": torch.arange(4.0),
    "no_elements": torch.empty(4, 0),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES, ids=lambda size: f"{size}_ranks")
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_reduce_logaddexp(dtype: torch.dtype, values: str, world_size: int) -> None:
    parts = VALUES[values].to(dtype)
    results = shared_pool().run(world_size, reduce_rows, parts)
    golden = parts[:world_size].double().logsumexp(0)
    for found, num_calls in results:
        # On the CPU the sizes go ahead; a group of one still gathers.
        assert num_calls == (1 if world_size == 1 else 2)
        assert found.dtype == dtype and found.shape == golden.shape
        torch.testing.assert_close(
            found.double(), golden, rtol=4 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps
        )
        assert torch.equal(found, results[0][0]), "not the same bits on every rank"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_reduce_logaddexp_sums_16_bit_wide(dtype: torch.dtype) -> None:
    parts = VALUES["gaussian"].to(dtype)
    golden = parts.double().logsumexp(0)
    for found, _ in shared_pool().run(4, reduce_rows, parts):
        assert found.dtype == dtype and torch.equal(found, golden.to(dtype))


def strided(group: dist.ProcessGroup, parts: Tensor) -> Tensor:
    return all_reduce_logaddexp(parts[dist.get_rank(group)].T, group)


def test_all_reduce_logaddexp_non_contiguous() -> None:
    parts = VALUES["matrix"]
    for found in shared_pool().run(3, strided, parts):
        torch.testing.assert_close(found, parts[:3].logsumexp(0).T)


def test_all_reduce_logaddexp_refuses_a_sparse_tensor() -> None:
    with pytest.raises(ValueError, match=r"^tensor must be dense, got layout torch\.sparse_coo"):
        all_reduce_logaddexp(torch.eye(2).to_sparse())


def test_all_reduce_logaddexp_without_a_group() -> None:
    values = VALUES["one_rank_empty"]
    assert torch.equal(all_reduce_logaddexp(values), values)
    assert torch.equal(all_reduce_logaddexp(values, None), values)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(3), id="int64"),
        pytest.param(torch.tensor([True]), id="bool"),
        pytest.param(torch.ones(2, dtype=torch.complex64), id="complex"),
    ],
)
def test_all_reduce_logaddexp_refuses_what_is_no_float(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"tensor must .*float.*{tensor.dtype}"):
        all_reduce_logaddexp(tensor)


def test_all_reduce_logaddexp_refuses_a_gradient_that_it_would_lose() -> None:
    tensor = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"tensor must not require grad.*detach"):
        all_reduce_logaddexp(tensor)
    with torch.no_grad():
        assert torch.equal(all_reduce_logaddexp(tensor), tensor)


def uneven(group: dist.ProcessGroup) -> str:
    try:
        all_reduce_logaddexp(torch.zeros(3 + dist.get_rank(group)), group)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_all_reduce_logaddexp_refuses_uneven_tensors_on_every_rank() -> None:
    for message in shared_pool().run(3, uneven):
        assert "tensors of the same sizes, got by rank elements [3, 4, 5]" in message


@pytest.mark.parametrize("group", ["tp", 3, object()], ids=["str", "int", "object"])
def test_all_reduce_logaddexp_refuses_a_bad_group(group: object) -> None:
    with pytest.raises(ValueError, match=r"group must be a ProcessGroup"):
        all_reduce_logaddexp(torch.ones(2), group)


def loss(*tensors: Tensor, **options: Any) -> Any:
    return linear_cross_entropy(*tensors, **options)


def logprobs(*tensors: Tensor, **options: Any) -> Any:
    return token_logprobs(*tensors, **options).logprobs.sum()


def candidates(*tensors: Tensor, **options: Any) -> Any:
    found = token_logprobs(*tensors, candidates=tensors[2][:, None], top_k=3, **options)
    assert found.candidates is not None
    return found.logprobs.sum() + found.candidates.sum()


def policy(*tensors: Tensor, **options: Any) -> Any:
    now = token_logprobs(*tensors, **options)
    everywhere = torch.ones_like(now.logprobs, dtype=torch.bool)
    before = now.logprobs.detach()
    return grpo_loss(now, before, torch.ones_like(before), mask=everywhere).loss


def distillation(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
    teacher = hidden.detach().flip(0), weight.detach().flip(0)
    return linear_distillation(hidden, weight, *teacher, targets, alpha=0.2, **options)


def listed(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
    with torch.no_grad():
        teacher = teacher_topk(hidden, weight, 3, **options)
    return listed_distillation(hidden, weight, teacher, targets, **options)


def last_stage(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
    return LastStageLoss(weight, **options)(hidden, targets)


# An entry, its options, and the phases that it begins on two ranks. `in_forward` merges each chunk.
ENTRIES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "loss": (loss, {}, ["merge", "reduce"]),
    "exact loss": (loss, {"gradient": "exact"}, ["merge", "reduce"]),
    "loss in_forward": (loss, {"gradient": "in_forward"}, ["merge", "reduce"]),
    "invariant loss": (loss, {"invariant": True}, ["merge", "reduce"]),
    "split tokens": (loss, {"sequence_parallel": True}, ["merge", "reduce"]),
    "log-probabilities": (logprobs, {}, ["merge", "reduce"]),
    "candidates": (candidates, {}, ["merge", "merge", "reduce", "reduce"]),
    "GRPO": (policy, {}, ["merge", "reduce"]),
    "forward KL": (distillation, {}, ["merge", "reduce"]),
    "exact KL": (distillation, {"gradient": "exact"}, ["merge", "reduce"]),
    "Jensen-Shannon": (distillation, {"divergence": "jsd"}, ["merge", "reduce"]),
    "total variation": (distillation, {"divergence": "tvd"}, ["merge", "reduce"]),
    "KL in_forward": (distillation, {"gradient": "in_forward"}, ["merge", "reduce"]),
    "listed": (listed, {}, ["merge", "merge", "merge", "reduce", "reduce"]),
    "last stage": (last_stage, {}, ["merge", "reduce"]),
}
# By kernels every third call of a kind plays a recording.
CALLS = {TORCH_CPU: 1, TRITON_CPU: 3}


class Teller:
    """A watcher that notes phases as they begin, and waits within them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open: list[str] = []

    def enter(self, phase: str, begins: bool) -> None:
        self.begun += [phase] * (begins and phase not in self.open)
        self.open.append(phase)

    def leave(self, phase: str, error: BaseException | None) -> None:
        assert self.open.pop() == phase and error is None


def phases_of(group: dist.ProcessGroup | None, backend: str, calls: int) -> Any:
    told: dict[str, list[list[str]]] = {}
    for name, (entry, options, _) in ENTRIES.items():
        told[name] = []
        for seed in range(calls):
            generator = torch.Generator().manual_seed(seed)
            weight = torch.randn(64, 16, generator=generator)
            # Few: a phase is the same of more.
            hidden = torch.randn(8, 16, generator=generator)
            if group is not None:
                weight = weight.chunk(2)[dist.get_rank(group)].clone()
                if "sequence_parallel" in options:
                    hidden = hidden.chunk(2)[dist.get_rank(group)].clone()
            leaves = hidden.half().requires_grad_(), weight.half().requires_grad_()
            if "invariant" in options:
                # Kernels refuse fp16 there.
                leaves = tuple(x.detach().float().requires_grad_() for x in leaves)
            teller = Teller()
            with watched_by(teller):
                targets = torch.arange(8)
                entry(*leaves, targets, group=group, backend=backend, **options).backward()
            assert not teller.open
            told[name].append(teller.begun)
    return told


@pytest.mark.parametrize("place", CALLS, ids=str)
def test_each_entry_tells_of_its_phases(place: Place) -> None:
    """Whoever counts them, as a heartbeat does, counts calls, whether they play a recording or not;
    one rank waits for nobody."""
    calls = CALLS[place]
    alone = phases_of(None, place.backend, calls)
    assert alone == {name: [[]] * calls for name in ENTRIES}
    for told in shared_pool().run(2, phases_of, place.backend, calls):
        assert told == {name: [begun] * calls for name, (_, _, begun) in ENTRIES.items()}
