"""all_reduce_logaddexp against torch.logsumexp in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import all_reduce_logaddexp, linear_cross_entropy
from cce_dist.core.phases import watched_by
from cce_dist.testing import CollectiveCounter, shared_pool

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


def phases_of_a_loss(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []

    class Teller:
        def enter(self, phase: str, begins: bool) -> None:
            if begins:
                told.append(("enter", phase))

        def leave(self, phase: str, error: BaseException | None) -> None:
            told.append(("leave", phase))

    hidden = torch.randn(8, 4, requires_grad=True)
    weight = torch.randn(16, 4).chunk(2)[dist.get_rank(group)].clone().requires_grad_()
    with watched_by(Teller()):
        linear_cross_entropy(hidden, weight, torch.arange(8), group=group).backward()
    return told


def test_a_loss_tells_each_phase_once() -> None:
    """Whoever counts them, as a heartbeat does, counts calls."""
    for told in shared_pool().run(2, phases_of_a_loss):
        assert [phase for what, phase in told if what == "enter"] == ["merge", "reduce"]
