"""DTensor arguments on meshes of 1 to 4 ranks: the values of one rank, placements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from cce_dist import VocabShard, linear_cross_entropy, token_logprobs
from cce_dist.reference import linear_cross_entropy_reference
from cce_dist.testing import shared_pool
from tests.frontend.dtensor.dtensor_cases import (
    DIM,
    OPTIONS,
    loss_of,
    made,
    mesh_of,
    on_one_rank,
    place,
    whole,
)

HIDDEN = {"plain": None, "replicated": Replicate(), "batch": Shard(0), "sequence": Shard(-2)}


def on_a_mesh(group: Any, num_classes: int, option: str) -> None:
    """Each placement of hidden, against one rank; asserts values and placements."""
    mesh = mesh_of(group)
    expected = on_one_rank(num_classes, option)
    names, options = OPTIONS[option]
    for way, placement in HIDDEN.items():
        given = made(num_classes)
        tensors: dict[str, Any] = {"targets": given["targets"]}
        tensors["weight"] = place(given["weight"], mesh, Shard(0)).requires_grad_()
        if "bias" in names:
            tensors["bias"] = place(given["bias"], mesh, Shard(0)).requires_grad_()
        if "token_weight" in names:
            tensors["token_weight"] = place(given["token_weight"], mesh, Replicate())
            tensors["class_weight"] = given["class_weight"]
        hidden = given["hidden"]
        if placement is not None:
            hidden = place(hidden, mesh, placement)
        tensors["hidden"] = hidden.requires_grad_()
        more = {"group": group} if placement is None else {}
        result, scalar = loss_of({**tensors, **more}, options)
        scalar.backward()
        values = {"loss": result} if isinstance(result, Tensor) else dict(result._asdict())
        for name, value in values.items():
            if value is not None:
                assert isinstance(value, DTensor) == (placement is not None), (way, name)
                if placement is not None:
                    assert value.placements == (Replicate(),), (way, name, value.placements)
                torch.testing.assert_close(whole(value), expected[name], rtol=1e-11, atol=1e-12)
        for name in ("hidden", "weight", "bias"):
            if name in tensors:
                got, leaf = tensors[name].grad, tensors[name]
                assert type(got) is type(leaf), (way, name)
                if isinstance(leaf, DTensor):
                    assert got.placements == leaf.placements, (way, name, got.placements)
                    assert got.to_local().shape == leaf.to_local().shape
                torch.testing.assert_close(
                    whole(got), expected[f"grad_{name}"], rtol=1e-11, atol=1e-12, msg=way
                )


# 600 rows are as many on each rank, of 601 the last one has fewer, of 5 on 4 none.
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("world_size", "num_classes"), [(1, 600), (2, 601), (4, 601), (4, 5), (4, 600)]
)
def test_dtensors(world_size: int, num_classes: int, option: str) -> None:
    shared_pool().run(world_size, on_a_mesh, num_classes, option)


def padded_and_accumulated(group: Any) -> None:
    mesh, given = mesh_of(group), made(600)
    expected = on_one_rank(600, "mean")
    more = 8
    padded = torch.cat([given["weight"], torch.full((more, DIM), 1e9, dtype=torch.float64)])
    weight = place(padded, mesh, Shard(0)).requires_grad_()
    own = VocabShard.chunked(600 + more, mesh.get_local_rank(), mesh.size())
    shard = VocabShard(own.start, own.stop, 600)
    buffer = place(torch.ones_like(padded), mesh, Shard(0))
    loss = linear_cross_entropy(
        place(given["hidden"], mesh, Replicate()),
        weight,
        place(given["targets"], mesh, Replicate()),
        vocab_shard=shard,
        gradient="exact",
        grad_weight_into=buffer,
    )
    assert isinstance(loss, DTensor)
    loss.backward()
    torch.testing.assert_close(loss.to_local(), expected["loss"])
    assert weight.grad is None
    wanted = torch.cat([expected["grad_weight"], torch.zeros(more, DIM, dtype=torch.float64)])
    torch.testing.assert_close(buffer.full_tensor(), 1 + wanted)


def test_dtensor_weight_with_padded_rows_and_a_buffer() -> None:
    shared_pool().run(4, padded_and_accumulated)


def logprobs(group: Any) -> None:
    mesh, given = mesh_of(group), made(600)
    targets = given["targets"].clamp_min(0)
    mask = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    logits = given["hidden"] @ given["weight"].T / 0.7
    wanted = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0].masked_fill(~mask, 0)
    for placement in (Replicate(), Shard(1)):
        got = token_logprobs(
            place(given["hidden"], mesh, placement),
            place(given["weight"], mesh, Shard(0)),
            targets,
            mask=mask,
            temperature=0.7,
            entropy=True,
        )
        for value in (got.logprobs, got.entropy):
            assert isinstance(value, DTensor) and value.placements == (Replicate(),)
        torch.testing.assert_close(whole(got.logprobs), wanted)
    got = token_logprobs(
        place(given["hidden"], mesh, Replicate()),
        place(given["weight"], mesh, Shard(0)),
        place(targets, mesh, Replicate()),
        mask=place(mask, mesh, Replicate()),
        temperature=0.7,
    )
    torch.testing.assert_close(whole(got.logprobs), wanted)


def test_token_logprobs_of_dtensors() -> None:
    shared_pool().run(2, logprobs)


def temperatures(group: Any) -> None:
    mesh, given = mesh_of(group), made(600)
    targets = given["targets"]
    whole_one = 0.5 + torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)).double()
    leaf = whole_one.clone().requires_grad_()
    wanted = -linear_cross_entropy_reference(
        given["hidden"],
        given["weight"],
        targets,
        reduction="none",
        shift=1,
        softcap=5.0,
        temperature=leaf,
    ).loss
    (grad,) = torch.autograd.grad(wanted.sum(), leaf)
    for placement in (Replicate(), Shard(0), Shard(1)):
        for temperature in (whole_one, place(whole_one, mesh, Replicate())):
            own = temperature.detach().requires_grad_()
            got = token_logprobs(
                place(given["hidden"], mesh, placement),
                place(given["weight"], mesh, Shard(0)),
                targets,
                shift=1,
                softcap=5.0,
                temperature=own,
            )
            torch.testing.assert_close(whole(got.logprobs), wanted)
            whole(got.logprobs).sum().backward()
            assert own.grad is not None and type(own.grad) is type(own)
            torch.testing.assert_close(whole(own.grad), grad)
    with pytest.raises(ValueError, match=r"temperature must be placed Replicate\(\)"):
        token_logprobs(
            place(given["hidden"], mesh, Replicate()),
            place(given["weight"], mesh, Shard(0)),
            targets,
            temperature=place(whole_one, mesh, Shard(0)),
        )


def test_token_logprobs_temperature_of_dtensors() -> None:
    shared_pool().run(2, temperatures)


def collective_under_way(group: Any) -> None:
    mesh, given = mesh_of(group), made(600)
    expected = {name: value.float() for name, value in on_one_rank(600, "mean").items()}
    given |= {name: given[name].float() for name in ("hidden", "weight")}
    # hidden is what an all-reduce makes of each rank's part of a product.
    linear = nn.Linear(DIM, DIM, bias=False)
    nn.init.eye_(linear.weight)
    linear = parallelize_module(linear, mesh, RowwiseParallel(input_layouts=Replicate()))
    before = given["hidden"].requires_grad_()
    hidden = linear(before)
    assert type(hidden) is not Tensor and not isinstance(hidden, DTensor)
    weight = place(given["weight"], mesh, Shard(0)).requires_grad_()
    # A kernel reads memory by its address.
    how: dict[str, Any] = {"gradient": "exact", "backend": "triton"}
    loss = linear_cross_entropy(hidden, weight, given["targets"], group=group, **how)
    assert type(loss) is Tensor
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected["loss"])
    torch.testing.assert_close(before.grad, expected["grad_hidden"])


@pytest.mark.interpreter
def test_hidden_whose_collective_is_under_way() -> None:
    shared_pool().run(2, collective_under_way)
