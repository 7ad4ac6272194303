"""Messages that say what to do instead, and that it gives the loss and the gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from cce_dist import (
    Filter,
    LossOptions,
    Screen,
    TeacherLogprobs,
    largest_logits,
    linear_cross_entropy,
    linear_distillation,
    listed_distillation,
    token_logprobs,
)
from cce_dist.testing import RankPool, shared_pool

# What forward-mode derivatives of torch 2.13 start with.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
V, D, N = 40, 16, 10


class Model(nn.Module):
    def __init__(self, around: Callable[[nn.Module, str], None] = lambda head, when: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, V, bias=False)
        self.around = around

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        hidden = self.body(x)
        self.around(self.head, "before")
        loss = linear_cross_entropy(hidden, self.head.weight, targets)
        self.around(self.head, "after")
        return loss


class Head(nn.Linear):
    def forward(self, hidden: Tensor, targets: Tensor) -> Any:  # pyright: ignore
        return linear_cross_entropy(hidden, self.weight, targets)


class WithHead(Model):
    """Whose loss is in the head's forward."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.head.weight.detach().clone()
        self.head = Head(D, V, bias=False)
        self.head.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        return self.head(self.body(x), targets)


def batch(rank: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1 + rank)
    return torch.randn(N, D, generator=made), torch.randint(0, V, (N,), generator=made)


def golden(size: int) -> dict[str, Tensor]:
    """Gradients of the mean over the ranks' losses, densely."""
    model = Model()
    for rank in range(size):
        x, targets = batch(rank)
        (F.cross_entropy(model.head(model.body(x)), targets) / size).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def outcome(run: Callable[[], object]) -> str:
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "right"


# -- FSDP ---------------------------------------------------------------------------------------


def of_fsdp2(group: dist.ProcessGroup, kind: str) -> str:
    def around(head: Any, when: str) -> None:
        if kind != "alone" and when == "before":
            head.unshard()
        if kind == "resharded" and when == "after":
            head.reshard()

    model: Any = WithHead() if kind == "in_head" else Model(around)
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def scale(factor: float) -> None:
        with torch.no_grad():
            for x in model.parameters():
                x.mul_(factor)

    def train() -> None:
        expected = golden(dist.get_world_size(group))
        for _ in range(2):
            if kind == "evaluated":
                scale(2)
                model(*batch(dist.get_rank(group)))
                model.reshard()
                model.head.reshard()
                scale(0.5)
            model.zero_grad()
            model(*batch(dist.get_rank(group))).backward()
            for name, x in model.named_parameters():
                torch.testing.assert_close(x.grad.full_tensor(), expected[name])

    return outcome(train)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("alone", "call head.unshard() before the loss in the forward of the root"),
        ("unsharded", "right"),
        ("evaluated", "right"),
        ("in_head", "right"),
        ("resharded", "RuntimeError: weight must stay in memory until the backward"),
    ],
)
def test_fsdp2_with_the_head_in_a_group_of_its_own(kind: str, said: str) -> None:
    for message in shared_pool().run(2, of_fsdp2, kind):
        assert said in message, message


def of_fsdp1(group: dist.ProcessGroup, kind: str, keeps: bool) -> str:
    warnings.simplefilter("ignore", FutureWarning)

    def wrap(module: nn.Module) -> Any:
        how = {"use_orig_params": keeps, "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(module, process_group=group, **how)

    model: Any = WithHead() if kind == "in_head" else Model()
    expected = golden(dist.get_world_size(group))
    weight, (x, targets) = model.head.weight.detach().clone(), batch(dist.get_rank(group))
    if kind in ("own", "in_head"):
        model.head = wrap(model.head)
    model = wrap(model)

    def run() -> None:
        if kind == "outside":
            linear_cross_entropy(x, model.head.weight, targets)
        elif kind == "summoned":
            with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
                found = linear_cross_entropy(x, model.head.weight, targets)
            torch.testing.assert_close(found, F.cross_entropy(x @ weight.T, targets))
        else:
            model(x, targets).backward()
            if keeps:
                with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                    for name, each in model.named_parameters():
                        plain = name.replace("_fsdp_wrapped_module.", "")
                        torch.testing.assert_close(each.grad, expected[plain])

    return outcome(run)


@pytest.mark.parametrize("keeps", [True, False], ids=["orig_params", "flat_params"])
@pytest.mark.parametrize("kind", ["root", "in_head", "summoned", "own", "outside"])
def test_fsdp1(kind: str, keeps: bool, pools: dict[int, RankPool]) -> None:
    for message in pools[2].run(2, of_fsdp1, kind, keeps):
        if kind in ("root", "in_head", "summoned"):
            assert message == "right"
            continue
        assert message.startswith("ValueError: weight must"), message
        for word in ("FSDP", "within the forward", "summon_full_params", "unshard()"):
            assert word in message


# -- a head placed Replicate() ------------------------------------------------------------------


def of_replicated(group: dist.ProcessGroup) -> None:
    """Each rank's own tokens, and the same tokens on each."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    plain = torch.randn(V, D, generator=torch.Generator().manual_seed(0))
    for own in (True, False):
        weight = distribute_tensor(plain, mesh, [Replicate()], src_data_rank=None)
        weight.requires_grad_()
        dense = plain.clone().requires_grad_()
        for each in range(size) if own else (0,):
            F.cross_entropy(batch(each)[0] @ dense.T, batch(each)[1]).backward()
        local = weight.to_local(grad_placements=[Partial()]) if own else weight.to_local()
        x, targets = batch(rank if own else 0)
        linear_cross_entropy(x, local, targets).backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad.full_tensor(), dense.grad)


def test_to_local_of_a_replicated_head() -> None:
    shared_pool().run(3, of_replicated)


# -- DDP ----------------------------------------------------------------------------------------


def under_ddp(group: dist.ProcessGroup) -> None:
    """The buffer has this rank's own gradient; its mean over the ranks is that of the others."""
    into = torch.zeros(V, D)

    class Accumulating(Model):
        def forward(self, x: Tensor, targets: Tensor) -> Any:
            hidden, weight = self.body(x), self.head.weight
            return linear_cross_entropy(hidden, weight, targets, grad_weight_into=into)

    model = Accumulating()
    replica = DistributedDataParallel(model, process_group=group)
    x, targets = batch(dist.get_rank(group))
    for step in range(2):
        into.zero_()
        model.zero_grad()
        replica(x, targets).backward()
        assert step == 0 or model.head.weight.grad is None or not model.head.weight.grad.any()
    alone = Model()
    F.cross_entropy(alone.head(alone.body(x)), targets).backward()
    torch.testing.assert_close(into, alone.head.weight.grad)
    dist.all_reduce(into, group=group)
    expected = golden(dist.get_world_size(group))
    torch.testing.assert_close(into / dist.get_world_size(group), expected["head.weight"])
    torch.testing.assert_close(model.body.weight.grad, expected["body.weight"])


def test_grad_weight_into_stays_a_ranks_own_under_ddp() -> None:
    shared_pool().run(2, under_ddp)


# -- transforms ---------------------------------------------------------------------------------


def loss_of(hidden: Tensor, weight: Tensor) -> Any:
    return linear_cross_entropy(hidden, weight, torch.arange(N))


TRANSFORMS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "grad": lambda h, w: torch.func.grad(loss_of, (0, 1))(h, w),
    "vjp": lambda h, w: torch.func.vjp(loss_of, h, w),
    "jvp": lambda h, w: torch.func.jvp(loss_of, (h, w), (h, w)),
    "jacrev": lambda h, w: torch.func.jacrev(loss_of)(h, w),
    "hessian": lambda h, w: torch.func.hessian(loss_of)(h, w),
    "vmap": lambda h, w: torch.vmap(loss_of, (0, None))(torch.stack([h, h]), w),
    "logprobs": lambda h, w: torch.func.grad(
        lambda h: token_logprobs(h, w, torch.arange(N)).logprobs.sum()
    )(h),
    "largest": lambda h, w: torch.vmap(lambda h: largest_logits(h, w).value)(h[:, None]),
    "functional_call": lambda h, w: torch.func.grad(
        lambda p: torch.func.functional_call(Model(), p, batch(0))
    )(dict(Model().named_parameters())),
    "in_forward": lambda h, w: torch.func.grad(
        lambda h: linear_cross_entropy(h, w, torch.arange(N), gradient="in_forward")  # pyright: ignore
    )(h),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(transform: str) -> None:
    hidden, weight = torch.randn(N, D), torch.randn(V, D)
    with pytest.raises(ValueError, match=r"outside of torch.func's transforms.*autograd.grad"):
        TRANSFORMS[transform](hidden, weight)


FORWARD_MODE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "filtered": loss_of,
    "in_forward": lambda h, w: linear_cross_entropy(h, w, torch.arange(N), gradient="in_forward"),
    "logprobs": lambda h, w: token_logprobs(h, w, torch.arange(N)),
    "largest": lambda h, w: largest_logits(h, w),
    "distillation": lambda h, w: linear_distillation(h, w, h.detach(), w.detach()),
    "teacher": lambda h, w: linear_distillation(h.detach(), w.detach(), h, w),
    "list": lambda h, w: listed_distillation(h.detach(), w.detach(), listed_by(h @ w.T)),
}


def listed_by(logits: Tensor) -> TeacherLogprobs:
    return TeacherLogprobs(torch.arange(V).expand(N, V), logits.log_softmax(-1))


# Without a gradient, too: kernels would return a loss that has lost its tangent.
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("of", ["hidden", "weight"])
@pytest.mark.parametrize("function", FORWARD_MODE)
def test_forward_mode_is_refused(function: str, of: str, needs_grad: bool) -> None:
    hidden, weight = torch.randn(N, D), torch.randn(V, D)
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=r"no forward-mode derivative.*torch.autograd.grad"),
    ):
        if of == "hidden":
            hidden = forward_ad.make_dual(hidden, hidden)
            weight.requires_grad_(needs_grad)
        else:
            weight = forward_ad.make_dual(weight, weight)
            hidden.requires_grad_(needs_grad)
        FORWARD_MODE[function](hidden, weight)


def test_functional_call_without_a_transform() -> None:
    model = Model()
    names = dict(model.named_parameters())
    found = torch.func.functional_call(model, names, batch(0))
    grads = torch.autograd.grad(found, list(names.values()))
    for name, grad in zip(names, grads, strict=True):
        torch.testing.assert_close(grad, golden(1)[name])


# -- numbers of other kinds ---------------------------------------------------------------------


NUMBERS: dict[str, Callable[[float], Any]] = {
    "float32": np.float32,
    "float64": np.float64,
    "tensor": torch.tensor,
    "tensor_float64": lambda x: torch.tensor(x, dtype=torch.float64),
    "array": np.array,
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_options_that_are_numbers_of_another_kind(kind: str) -> None:
    make = NUMBERS[kind]
    values = {"softcap": 30.5, "logit_scale": 0.5, "label_smoothing": 0.0, "z_loss": 0.25}
    given: dict[str, Any] = {name: make(value) for name, value in values.items()}
    found, expected = LossOptions(**given), LossOptions(**values)
    assert found == expected and repr(found) == repr(expected)
    assert all(type(getattr(found, name)) is float for name in values)
    assert Filter(keep=make(0.5)) == Filter(keep=0.5) and Filter(eps=make(0.5)) == Filter(eps=0.5)
    screen = Screen(max_kept=make(0.5), max_error=make(0.25))
    assert repr(screen) == repr(Screen(max_kept=0.5, max_error=0.25))
    hidden, weight, targets = torch.randn(N, D), torch.randn(V, D), torch.arange(N)
    assert torch.equal(
        linear_cross_entropy(hidden, weight, targets, **given),  # pyright: ignore
        linear_cross_entropy(hidden, weight, targets, **values),  # pyright: ignore
    )
    logprobs = token_logprobs(
        hidden, weight, targets, temperature=make(0.5), logit_scale=make(2.0)
    ).logprobs
    wanted = token_logprobs(hidden, weight, targets, temperature=0.5, logit_scale=2.0).logprobs
    assert torch.equal(logprobs, wanted)


@pytest.mark.parametrize("one", [np.int64(1), np.uint8(1), torch.tensor(1), np.array(1)], ids=repr)
def test_options_that_are_ints_of_another_kind(one: Any) -> None:
    options = LossOptions(shift=one, ignore_index=one, workspace_bytes=np.int64(2**20))
    assert type(options.shift) is type(options.ignore_index) is type(options.workspace_bytes) is int


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (torch.tensor([1.0]), "softcap must be a finite number"),
        (np.array([1.0]), "softcap must be a finite number"),
        (np.float32("nan"), "softcap must be a finite number, got nan"),
        (torch.tensor(torch.inf), "softcap must be a finite number, got inf"),
        (np.bool_(True), "softcap must be a finite number"),
        (torch.tensor(True), "softcap must be a finite number"),
        (np.complex64(1), "softcap must be a finite number"),
        (torch.tensor(1.0, requires_grad=True), "softcap must not require grad.*detached"),
    ],
    ids=repr,
)
def test_options_that_are_no_numbers(value: Any, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        LossOptions(softcap=value)
