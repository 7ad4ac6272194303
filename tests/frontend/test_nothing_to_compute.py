"""Batches in which no token has a target: loss 0, gradients 0, results of the shifted shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cce_dist import LossOutput, largest_logits, linear_cross_entropy, token_logprobs
from cce_dist.options import LossOptions
from cce_dist.pipeline.head import PipelineHead
from cce_dist.testing import PLACES, Place, RankPool, grid, shared_pool

# Several tiles of columns.
V, D = 300, 8
# Shape of targets, and shift.
NOTHING: dict[str, tuple[tuple[int, ...], int]] = {
    "one_token": ((4, 1), 1),
    "one_token_of_one": ((1,), 1),
    "shift_beyond": ((2, 3), 5),
    "no_sequence": ((0, 5), 0),
    "no_sequence_shifted": ((0, 5), 1),
    "no_token": ((2, 0), 0),
    "no_token_shifted": ((2, 0), 1),
    "nothing": ((0,), 2),
    "ignored": ((260,), 0),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 0.1},
    "statistics": {
        "stats": ("lse", "entropy", "correct", "tail_mass", "logit_moments", "screened", "sum_p2")
    },
    "softcap": {"softcap": 5.0},
}
MODES = {
    f"{gradient}_{reduction}": {"gradient": gradient, "reduction": reduction}
    for gradient in ("filtered", "exact", "in_forward")
    for reduction in ("mean", "sum", "none")
    if (gradient, reduction) != ("in_forward", "none")
}


def made(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made).to(device, dtype).requires_grad_()

    return {
        "hidden": leaf(*shape, D),
        "weight": leaf(V, D),
        "bias": leaf(V),
        "targets": targets_of(shape).to(device),
    }


def targets_of(shape: tuple[int, ...]) -> Tensor:
    if shape == NOTHING["ignored"][0]:
        return torch.full(shape, -100)
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(1))


def require_nothing(result: Any, shape: tuple[int, ...], shift: int, reduction: str) -> None:
    left = (*shape[:-1], max(shape[-1] - shift, 0))
    loss = result.loss if isinstance(result, LossOutput) else result
    assert loss.shape == (left if reduction == "none" else ()), loss.shape
    assert bool((loss == 0).all())
    for field in result[1:] if isinstance(result, LossOutput) else ():
        for values in field if isinstance(field, tuple) else (field,):
            assert values.shape == left and not values.any(), values


def require_zeros(*leaves: Tensor) -> None:
    """Ready for a sum over data-parallel ranks."""
    for leaf in leaves:
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape
        grad = leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad
        assert bool((grad == 0).all())


@pytest.mark.parametrize(**grid(places=PLACES, kind=NOTHING, mode=MODES, option=OPTIONS))
def test_a_batch_without_targets(
    place: Place, kind: tuple[tuple[int, ...], int], mode: dict[str, Any], option: dict[str, Any]
) -> None:
    shape, shift = kind
    given = made(shape, torch.float32, place.device)
    how = {**mode, **option, "backend": place.backend, "shift": shift}
    result = linear_cross_entropy(**given, **how)
    require_nothing(result, shape, shift, mode["reduction"])
    (result.loss if isinstance(result, LossOutput) else result).sum().backward()
    require_zeros(given["hidden"], given["weight"], given["bias"])
    with torch.no_grad():
        require_nothing(linear_cross_entropy(**given, **how), shape, shift, mode["reduction"])


@pytest.mark.parametrize(**grid(places=PLACES, kind=NOTHING, mode=MODES))
def test_tensors_of_a_batch_without_targets(
    place: Place, kind: tuple[tuple[int, ...], int], mode: dict[str, Any]
) -> None:
    shape, shift = kind
    given = made(shape, torch.float32, place.device)
    into = torch.zeros(V, D, device=place.device)
    weights = torch.ones(shape, device=place.device)
    weights.requires_grad_(mode["gradient"] != "in_forward")
    loss = linear_cross_entropy(
        **given,
        **mode,
        backend=place.backend,
        shift=shift,
        token_weight=weights,
        class_weight=torch.rand(V, device=place.device),
        grad_weight_into=into,
    )
    assert isinstance(loss, Tensor)
    require_nothing(loss, shape, shift, mode["reduction"])
    loss.sum().backward()
    require_zeros(given["hidden"], given["bias"], *[weights] * weights.requires_grad)
    assert given["weight"].grad is None and bool((into == 0).all())


@pytest.mark.parametrize("kind", NOTHING)
def test_other_functions_of_a_batch_without_targets(kind: str) -> None:
    shape, shift = NOTHING[kind]
    left = (*shape[:-1], max(shape[-1] - shift, 0))
    given = made(shape, torch.float32)
    mask = given["targets"] != -100
    found = token_logprobs(**given, shift=shift, entropy=True, mask=mask)
    assert found.entropy is not None and found.logprobs.shape == found.entropy.shape == left
    (found.logprobs.sum() + found.entropy.sum()).backward()
    require_zeros(given["hidden"], given["weight"])
    largest = largest_logits(given["hidden"], given["weight"])
    assert largest.value.shape == largest.index.shape == shape


# -- over ranks ---------------------------------------------------------------------------------


def over_ranks(group: dist.ProcessGroup, kind: str, place: str) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    backends = ("torch", "triton") if place == "plain" else ("torch",)
    shape, shift = NOTHING[kind]
    first = list(NOTHING).index(kind)
    for number, mode in enumerate(MODES.values(), first):
        # Each mode with one option of a kind: over all kinds each pair occurs.
        option = list(OPTIONS.values())[number % len(OPTIONS)]
        for backend in backends:
            given: dict[str, Any] = made(shape, torch.float32)
            for name in ("weight", "bias"):
                rows = given[name].detach().chunk(size)[rank].clone()
                given[name] = rows.requires_grad_()
            if place == "slices":
                given["targets"] = given["targets"].repeat(size, *[1] * (len(shape) - 1))
                given["sequence_parallel"] = True
            leaves = [given[name] for name in ("hidden", "weight", "bias")]
            how = {**mode, **option, "backend": backend, "shift": shift, "group": group}
            result = linear_cross_entropy(**given, **how)
            require_nothing(result, tuple(given["targets"].shape), shift, mode["reduction"])
            (result.loss if isinstance(result, LossOutput) else result).sum().backward()
            require_zeros(*leaves)


# One token of each rank has a target on the next.
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (kind, place)
        for kind in NOTHING
        for place in ("plain", "slices")
        if (kind, place) != ("one_token_of_one", "slices")
    ],
)
def test_a_batch_without_targets_over_ranks(kind: str, place: str) -> None:
    shared_pool().run(3, over_ranks, kind, place)


def of_dtensors(group: dist.ProcessGroup, shape: tuple[int, ...], shift: int) -> None:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    placements: list[Any] = [Replicate()]
    placements += [Shard(dim) for dim, size in enumerate(shape) if size % mesh.size() == 0]
    for placement in placements:
        given: dict[str, Any] = made(shape, torch.float32)
        for name, where in {"hidden": placement, "weight": Shard(0), "bias": Shard(0)}.items():
            whole = given[name].detach()
            given[name] = distribute_tensor(whole, mesh, [where], src_data_rank=None)
            given[name].requires_grad_()
        for reduction in ("mean", "none"):
            loss = linear_cross_entropy(**given, shift=shift, reduction=reduction)
            assert isinstance(loss, DTensor)
            require_nothing(loss.full_tensor(), shape, shift, reduction)
            loss.full_tensor().sum().backward()
            require_zeros(given["hidden"], given["weight"], given["bias"])


@pytest.mark.parametrize("kind", NOTHING)
def test_dtensors_of_a_batch_without_targets(kind: str) -> None:
    shared_pool().run(2, of_dtensors, *NOTHING[kind])


def over_stages(group: dist.ProcessGroup, shape: tuple[int, ...], shift: int) -> None:
    rank = dist.get_rank(group)
    weight = made(shape, torch.float32)["weight"].detach().chunk(2)[rank].clone().requires_grad_()
    given = made(shape, torch.float32)
    for reduction in ("mean", "none"):
        options = LossOptions(shift=shift, reduction=reduction)
        head = PipelineHead(weight, group=group, hidden_shape=(*shape, D), options=options)
        is_last = rank == 1
        head.start_step()
        head.post(0, 1, *((given["hidden"], given["targets"]) if is_last else ()))
        head.statistics(0)
        if reduction == "none":
            losses = head.losses(0)
            require_nothing(losses, shape, shift, reduction)
            head.weigh(0, 1, torch.ones_like(losses) if is_last else None)
        loss = head.gradients(0, 1)
        require_nothing(loss, shape, shift, reduction)
        grad = head.take(0)
        assert not is_last or (grad.shape == (*shape, D) and bool((grad == 0).all()))
        head.finish_step()
        require_zeros(weight)
        head.close()


@pytest.mark.parametrize("kind", ["one_token", "shift_beyond"])
def test_microbatches_without_targets_over_pipeline_ranks(
    kind: str, pools: dict[int, RankPool]
) -> None:
    # Every rank of the job makes a head.
    pools[2].run(2, over_stages, *NOTHING[kind])
