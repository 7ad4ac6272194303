"""DTensor arguments on meshes of 1 to 4 ranks: values of one rank, placements, refusals; FSDP2."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from cce_dist import VocabShard, linear_cross_entropy, token_logprobs
from cce_dist.reference import linear_cross_entropy_reference
from cce_dist.testing import shared_pool

BATCH, LENGTH, DIM = 8, 12, 16


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def place(tensor: Tensor, mesh: DeviceMesh, placement: Any) -> Tensor:
    """Every rank has the whole tensor: nothing needs to be sent."""
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(num_classes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(num_classes, (BATCH, LENGTH), generator=generator)
    targets[torch.rand(BATCH, LENGTH, generator=generator) < 0.2] = -100
    return {
        "hidden": randn(BATCH, LENGTH, DIM),
        "weight": randn(num_classes, DIM),
        "targets": targets,
        "bias": randn(num_classes),
        "token_weight": randn(BATCH, LENGTH).abs(),
        "class_weight": randn(num_classes).abs(),
    }


LEAVES = ("hidden", "weight", "bias", "token_weight")
HIDDEN = {"plain": None, "replicated": Replicate(), "batch": Shard(0), "sequence": Shard(-2)}
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "mean": ((), {}),
    "everything": (
        ("bias", "token_weight", "class_weight"),
        {"shift": 2, "reduction": "none", "label_smoothing": 0.1, "stats": ("lse", "correct")},
    ),
    "in_forward": (("bias",), {"gradient": "in_forward", "shift": 1}),
}


def loss_of(tensors: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Tensor]:
    """The result, and a scalar that weighs what is in it."""
    result = linear_cross_entropy(**tensors, backend="torch", **{"gradient": "exact", **options})
    if isinstance(result, Tensor):
        return result, result
    assert result.lse is not None
    return result, result.loss.sum() + (result.lse * result.loss).sum()


def on_one_rank(num_classes: int, option: str) -> dict[str, Tensor]:
    names, options = OPTIONS[option]
    given = made(num_classes)
    tensors = {name: given[name] for name in ("hidden", "weight", "targets", *names)}
    leaves = [name for name in LEAVES if name in tensors and name != "token_weight"]
    for name in leaves:
        tensors[name].requires_grad_()
    result, scalar = loss_of(tensors, options)
    scalar.backward()
    loss = result if isinstance(result, Tensor) else result.loss
    out = {"loss": loss.detach(), **{f"grad_{name}": tensors[name].grad for name in leaves}}
    if not isinstance(result, Tensor):
        out |= {"lse": result.lse.detach(), "correct": result.correct}
    return out  # pyright: ignore[reportReturnType]


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


# -- parallelize_module -------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, num_classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.embedding(ids))


def model_of(num_classes: int) -> Model:
    torch.manual_seed(0)
    return Model(num_classes).double()


def beside_loss_parallel(group: Any, sequence_parallel: bool) -> None:
    """The recipe of torch's own loss_parallel, and ours, on the same parallelized model."""
    mesh, targets = mesh_of(group), made(601)["targets"]
    ids = targets.clamp_min(0)
    results = []
    for ours in (False, True):
        model = model_of(601)
        plan: dict[str, Any] = {"head": ColwiseParallel(use_local_output=False)}
        if sequence_parallel:
            plan["embedding"] = RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            )
            plan["norm"] = SequenceParallel()
            plan["head"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        parallelize_module(model, mesh, plan)
        hidden = model(ids)
        assert isinstance(hidden, DTensor) == sequence_parallel
        if ours:
            how = {} if sequence_parallel else {"group": mesh["tp"]}
            loss = linear_cross_entropy(hidden, model.head.weight, targets, gradient="exact", **how)
            loss.backward()
        else:
            with loss_parallel():
                logits = model.head(hidden)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                loss.backward()
        grads = {name: x.grad for name, x in model.named_parameters()}
        results.append({"loss": loss, **grads})
    torchs, ours_ = results
    for name, value in ours_.items():
        assert value is not None
        torch.testing.assert_close(whole(value), whole(torchs[name]), msg=name)
        if isinstance(torchs[name], DTensor) and sequence_parallel:
            assert value.placements == torchs[name].placements, name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_parallelized_module_as_with_loss_parallel(sequence_parallel: bool) -> None:
    shared_pool().run(4, beside_loss_parallel, sequence_parallel)


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


# -- FSDP2 --------------------------------------------------------------------------------------


class Head(nn.Linear):
    """The loss where the weight is whole: in the forward of the module that holds it."""

    group: Any = None
    sequence_parallel = False

    def forward(self, hidden: Tensor, targets: Tensor) -> Any:  # pyright: ignore
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.sequence_parallel:
            hidden = hidden.chunk(self.group.size())[self.group.get_local_rank()]
        how: dict[str, Any] = {"group": self.group, "sequence_parallel": self.sequence_parallel}
        return linear_cross_entropy(
            hidden, self.weight, targets, gradient="exact", reduction="sum", **how
        )


class LossModel(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = Head(DIM, num_classes, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)), targets)


def under_fsdp(_: Any, tp: int, own_group: bool, sequence_parallel: bool) -> None:
    """Two steps of gradient accumulation, against the whole batch on one rank."""
    mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    data = mesh["dp"]
    torch.manual_seed(0)
    model, reference = LossModel(601).double(), LossModel(601).double()
    reference.load_state_dict(model.state_dict())
    if tp > 1:
        parallelize_module(model.head, mesh["tp"], _split_rows())
        model.head.group = mesh["tp"]
        model.head.sequence_parallel = sequence_parallel
    if own_group:
        fully_shard(model.head, mesh=data)
    fully_shard(model, mesh=data)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(601, (BATCH, LENGTH), generator=generator)
        ids = targets.roll(1, -1)
        mine = slice(data.get_local_rank(), BATCH, data.size())
        model.set_requires_gradient_sync(seed == 1)
        loss = model(ids[mine], targets[mine])
        assert type(loss) is Tensor
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=data.get_group())
        expected = reference(ids, targets)
        expected.backward()
        torch.testing.assert_close(total, expected.detach())
    for (name, got), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(got.grad, DTensor) and got.grad.placements == got.placements, name
        assert wanted.grad is not None
        grad = got.grad.full_tensor()
        if sequence_parallel and "head" not in name:
            # Of this rank's tokens: whoever splits them sums it.
            dist.all_reduce(grad, group=mesh["tp"].get_group())
        # FSDP averages over data-parallel ranks.
        torch.testing.assert_close(grad * data.size(), wanted.grad, msg=name)


def _split_rows() -> ColwiseParallel:
    # As it splits a Linear, but the module's own forward takes plain tensors.
    from torch.distributed.tensor.parallel import ParallelStyle

    class SplitRows(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            assert isinstance(module, nn.Linear)
            placed = distribute_tensor(module.weight, device_mesh, [Shard(0)])
            module.weight = nn.Parameter(placed)
            return module

    return SplitRows()  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("own_group", [False, True], ids=["root_group", "own_group"])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["dp", "tp", "sp"]
)
def test_fsdp(tp: int, sequence_parallel: bool, own_group: bool) -> None:
    shared_pool().run(4, under_fsdp, tp, own_group, sequence_parallel)


# -- refusals -----------------------------------------------------------------------------------


def refusals(group: Any) -> dict[str, str]:
    """What each call says."""
    mesh, given = mesh_of(group), made(600)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = place(given["weight"], mesh, Shard(0))
    hidden = place(given["hidden"], mesh, Replicate())
    sharded = nn.Linear(DIM, 600, bias=False).double()
    fully_shard(sharded, mesh=square["dp"])
    rows = distribute_tensor(given["weight"], square, [Replicate(), Shard(0)], src_data_rank=None)
    mean = DTensor.from_local(given["hidden"], mesh, [Partial()], run_check=False)
    replicated = place(given["weight"], mesh, Replicate())
    on_both = distribute_tensor(given["weight"], square, [Replicate()] * 2, src_data_rank=None)
    whole_vocabulary = VocabShard(0, 600, 600)
    calls: dict[str, dict[str, Any]] = {
        "no group": {"hidden": given["hidden"]},
        "fsdp": {"hidden": given["hidden"], "weight": sharded.weight},
        "other group": {"group": square["tp"]},
        "plain weight": {"weight": given["weight"], "group": group},
        "two dims": {"weight": rows},
        "replicated weight": {"weight": replicated},
        "replicated weight, group": {"weight": replicated, "group": group},
        "replicated weight, plain hidden": {"weight": replicated, "hidden": given["hidden"]},
        "replicated on two dims": {"weight": on_both},
        "columns": {"weight": place(given["weight"], mesh, Shard(1))},
        "split dim": {"hidden": place(given["hidden"], mesh, Shard(2))},
        "partial": {"hidden": mean},
        "uneven tokens": {"hidden": place(given["hidden"][:, :10], mesh, Shard(1))},
        "other mesh": {"hidden": place(given["hidden"], square["tp"], Replicate())},
        "option": {"sequence_parallel": True},
        "targets": {"targets": place(given["targets"], mesh, Shard(0))},
        "bias": {"bias": place(given["bias"], mesh, Replicate())},
        "vocab_shard": {"vocab_shard": whole_vocabulary},
    }
    said = {}
    for name, call in calls.items():
        arguments = {"hidden": hidden, "weight": weight, "targets": given["targets"], **call}
        try:
            linear_cross_entropy(**arguments)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


REFUSALS = {
    "no group": r"group must be given where weight is a DTensor.*'tp'.*fully_shard",
    "fsdp": r"group must be given where weight is a DTensor.*within the forward.*head.unshard\(\)",
    "other group": r"group must be that of weight's mesh, ranks \[0, 1, 2, 3\].*got ranks",
    "plain weight": r"weight must be a DTensor too, placed Shard\(0\), where hidden is one",
    "two dims": r"weight must be a DTensor on a mesh of one dim, got .*'dp', 'tp'.*fully_shard",
    "replicated weight": r"weight must be placed Shard\(0\), got \[Replicate\(\)\].*to_local\(\)",
    "replicated weight, group": r"weight must be placed Shard\(0\), got \[Replicate.*to_local",
    "replicated weight, plain hidden": r"got \[Replicate\(\)\].*weight.to_local\(\) without group",
    "replicated on two dims": r"got \[Replicate\(\), Replicate\(\)\].*weight.to_local\(\)",
    "columns": r"weight must be placed Shard\(0\) on its mesh, got Shard\(dim=1\)",
    "split dim": r"hidden must be placed Replicate\(\), or Shard\(d\).*got Shard\(dim=2\) of 3",
    "partial": r"hidden must be placed Replicate\(\), or Shard\(d\).*got Partial",
    "uneven tokens": r"hidden's dim 1 must be a multiple of the mesh's 4 ranks.*got 10",
    "other mesh": r"hidden must be on weight's mesh .*got a DTensor on",
    "option": r"sequence_parallel must be left out where hidden is a DTensor",
    "targets": r"targets must be placed Replicate\(\) on its mesh, got Shard\(dim=0\)",
    "bias": r"bias must be placed Shard\(0\) on its mesh, got Replicate",
    "vocab_shard": r"vocab_shard must have the rows of weight's DTensor on this rank, \[0, 150\)",
}


def test_dtensor_placements_that_are_refused() -> None:
    said, *_ = shared_pool().run(4, refusals)
    assert said.keys() == REFUSALS.keys()
    for name, pattern in REFUSALS.items():
        assert re.search(pattern, said[name], re.DOTALL), (name, said[name])
