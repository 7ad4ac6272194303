"""The recipes of docs/guide as they stand there, also with a bias, a softcap, a scale, a shift."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cce_dist import linear_cross_entropy, token_logprobs
from cce_dist.reference import Reference, linear_cross_entropy_reference
from cce_dist.testing import shared_pool
from tests.docs.recipe_cases import (
    BATCH,
    CLASSES,
    DIM,
    LENGTH,
    VARIANTS,
    close,
    dense,
    grads_of,
    head_of,
    made,
    recipes,
)

# -- guide/parallelism.md: Recipes ----------------------------------------------------------------


class Model(nn.Module):
    """On each data-parallel rank, with tokens of its own."""

    def __init__(self, head: nn.Linear, options: dict[str, Any]) -> None:
        super().__init__()
        self.head, self.options = head, options

    def forward(self, inputs: Tensor, ids: Tensor) -> Any:
        head = self.head
        how = {"bias": head.bias, "reduction": "sum", **self.options}
        return linear_cross_entropy(inputs, head.weight, ids, **how)


def names_of(group: Any, variant: str) -> dict[str, Any]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given, options = made(), VARIANTS[variant]
    rows = slice(rank * CLASSES // size, (rank + 1) * CLASSES // size)
    bias = None if variant == "plain" else given["bias"]
    model = Model(head_of(given["weight"], bias), options)
    mine = range(rank * BATCH // size, (rank + 1) * BATCH // size)
    own = [(given["hidden"][i], given["targets"][i]) for i in mine]
    return {
        "torch": torch,
        "linear_cross_entropy": functools.partial(linear_cross_entropy, **options),
        "token_logprobs": functools.partial(token_logprobs, **options),
        "DistributedDataParallel": DistributedDataParallel,
        "all_reduce": dist.all_reduce,
        "nullcontext": nullcontext,
        "checkpoint": checkpoint,
        "tp_group": group,
        "dp_group": group,
        "head": head_of(given["weight"][rows], None if bias is None else bias[rows]),
        "norm": nn.Identity(),
        "model": model,
        "hidden": given["hidden"].clone().requires_grad_(),
        "targets": given["targets"],
        "ids": given["targets"],
        "microbatches": own,
        "response": given["targets"] != -100,
        "temperature": given["temperature"],
        "old_logprobs": torch.full((BATCH, LENGTH), -4.0),
        "advantage": given["advantage"],
    }


def policy_loss(found: Reference) -> Tensor:
    given = made()
    response = given["targets"] != -100
    ratio = (4.0 - found.nll).exp()
    gain = torch.minimum(ratio * given["advantage"], ratio.clamp(0.8, 1.2) * given["advantage"])
    return -((gain + 0.01 * found.entropy) * response).sum() / response.sum()


def run(group: Any, recipe: str, variant: str) -> None:
    rank = dist.get_rank(group)
    names = names_of(group, variant)
    if "autocast" in recipe:
        # Which leaves float64 alone.
        names["head"].float()
        names["hidden"] = names["hidden"].detach().float().requires_grad_()
    exec(recipe, names)
    if "replica" in names:
        _, grads = dense(variant)
        del grads["hidden"]
        close(grads_of(names["model"].head), grads)
        return
    names["loss"].backward()
    how: dict[str, Any] = {}
    if "token_logprobs" in recipe:
        how = {"by": policy_loss, "reduction": "none", "temperature": names["temperature"]}
    wanted, grads = dense(variant, **how)
    head, hidden = names["head"], names["hidden"]
    rows = {name: grads[name].chunk(2)[rank] for name in ("weight", "bias") if name in grads}
    # In the sequence-parallel recipe both calls stand in one block, of which the second is `loss`.
    part = grads["hidden"]
    if "sequence_parallel" in recipe:
        part = torch.zeros_like(part)
        part.chunk(2)[rank].copy_(grads["hidden"].chunk(2)[rank])
    found = {"loss": names["loss"].detach(), "hidden": hidden.grad, **grads_of(head)}
    close(found, {"loss": wanted, "hidden": part, **rows}, 2e-2 if "autocast" in recipe else 1e-9)


COUNT = 5


# The last is of log-probabilities, which guide/options.md has shifted.
EACH = [(n, v) for n in range(COUNT) for v in VARIANTS if (n, v) != (COUNT - 1, "shifted")]


@pytest.mark.parametrize(("number", "variant"), EACH, ids=[f"{n}-{v}" for n, v in EACH])
def test_recipe(number: int, variant: str) -> None:
    found = recipes("guide/parallelism.md", "Recipes")
    assert len(found) == COUNT and "token_logprobs" in found[-1]
    recipe = found[number]
    if variant == "shifted":
        # As its text says.
        recipe = recipe.replace("(ids != -100)", "(ids[..., 1:] != -100)")
    shared_pool().run(2, run, recipe, variant)


# -- guide/parallelism.md: DTensor, FSDP2 ---------------------------------------------------------


class Layered(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        given = made()
        self.embedding = nn.Embedding(CLASSES, DIM, dtype=torch.float64)
        self.layers = nn.Identity()
        self.norm = nn.LayerNorm(DIM, dtype=torch.float64)
        self.head = head_of(given["weight"], given["bias"] if bias else None)


def split_by_parallelize_module(group: Any, recipe: str, variant: str) -> None:
    options, targets = VARIANTS[variant], made()["targets"]
    torch.manual_seed(0)
    model = Layered(variant != "plain")
    tokens = targets.clamp_min(0)
    hidden = model.norm(model.embedding(tokens)).detach()
    how: dict[str, Any] = {"bias": model.head.bias, **options}
    wanted = linear_cross_entropy_reference(hidden, model.head.weight, targets, **how).loss
    parameters = dict(model.head.named_parameters())
    grads = dict(zip(parameters, torch.autograd.grad(wanted, [*parameters.values()]), strict=True))
    names: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)),
        "model": model,
        "tokens": tokens,
        "targets": targets,
        "parallelize_module": parallelize_module,
        "RowwiseParallel": RowwiseParallel,
        "SequenceParallel": SequenceParallel,
        "Replicate": Replicate,
        "Shard": Shard,
        "ColwiseParallel": ColwiseParallel,
        "linear_cross_entropy": functools.partial(linear_cross_entropy, **options),
    }
    exec(recipe, names)
    found = {name: x.grad.full_tensor() for name, x in model.head.named_parameters()}
    found["loss"] = names["loss"].full_tensor().detach()
    close(found, {"loss": wanted.detach(), **grads})


@pytest.mark.parametrize("variant", VARIANTS)
def test_dtensor_recipe(variant: str) -> None:
    (recipe,) = recipes("guide/parallelism.md", "DTensor")
    shared_pool().run(2, split_by_parallelize_module, recipe, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fsdp_recipes_head(variant: str) -> None:
    (recipe,) = recipes("guide/parallelism.md", "FSDP2")
    options = VARIANTS[variant]
    names = {"nn": nn, "linear_cross_entropy": functools.partial(linear_cross_entropy, **options)}
    # The class alone: what shards it is tests/frontend/dtensor/test_dtensor_modules.py's.
    exec(recipe.partition("\n\n\n")[0], names)
    given, wanted = made(), dense(variant)
    head = names["Head"](DIM, CLASSES, bias=variant != "plain", dtype=torch.float64)
    head.load_state_dict({name: given[name] for name in head.state_dict()})
    loss = head(given["hidden"], given["targets"])
    loss.backward()
    del wanted[1]["hidden"]
    close({"loss": loss.detach(), **grads_of(head)}, {"loss": wanted[0], **wanted[1]})


# -- guide/recipes.md: LoRA on the head -----------------------------------------------------------


def lora_on_ranks(group: Any, variant: str) -> None:
    rank, given, options, s = dist.get_rank(group), made(), VARIANTS[variant], 1.5
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(3, DIM, generator=generator, dtype=torch.float64).requires_grad_()
    b = torch.randn(CLASSES, 3, generator=generator, dtype=torch.float64)
    rows = slice(rank * CLASSES // 2, (rank + 1) * CLASSES // 2)
    bias = None if variant == "plain" else given["bias"]
    hidden, own = given["hidden"].requires_grad_(), b[rows].clone().requires_grad_()
    loss = linear_cross_entropy(
        torch.cat([hidden, s * hidden @ a.T], -1),
        torch.cat([given["weight"][rows], own], 1),
        given["targets"],
        bias=None if bias is None else bias[rows],
        group=group,
        **options,
    )
    assert isinstance(loss, Tensor)
    names = ("hidden", "a", "b")
    found = dict(zip(names, torch.autograd.grad(loss, (hidden, a, own)), strict=True))
    b.requires_grad_()
    merged = given["weight"] + s * b @ a
    how: dict[str, Any] = {"bias": bias, **options}
    wanted = linear_cross_entropy_reference(hidden, merged, given["targets"], **how).loss
    grads = dict(zip(names, torch.autograd.grad(wanted, (hidden, a, b)), strict=True))
    grads["b"] = grads["b"][rows]
    close({"loss": loss.detach(), **found}, {"loss": wanted.detach(), **grads})


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_recipe_over_ranks(variant: str) -> None:
    shared_pool().run(2, lora_on_ranks, variant)
