"""What GPUs and NCCL add to groups: streams that run ahead, graphs, compilers, dead ranks."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cce_dist import Filter, linear_cross_entropy
from cce_dist.testing import nccl_pool

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.timeout(280)]
TOKENS, CLASSES, DIM = 700, 6000, 64
SOME = Filter(keep=0.02)
WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": SOME},
    "tail_mass": {"filter": SOME, "stats": ("lse", "tail_mass")},
    "stats": {"stats": ("lse", "entropy", "sum_p2", "correct", "logit_moments")},
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward", "label_smoothing": 0.1},
    "chunks": {"gradient": "in_forward", "filter": Filter(keep=0), "workspace_bytes": 2**20},
    "sequence_parallel": {"filter": SOME, "sequence_parallel": True},
}
Tensors = dict[str, Tensor]


def tensors(seed: int, rank: int = 0, size: int = 1, ignored: float = 0.3) -> Tensors:
    """The same tokens on every rank; of 4, the last rank's rows are fewer."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, DIM, generator=generator)
    weight = torch.randn(CLASSES, DIM, generator=generator)
    targets = torch.randint(CLASSES, (TOKENS,), generator=generator)
    targets[torch.rand(TOKENS, generator=generator) < ignored] = -100
    mine = weight.chunk(size)[rank].clone()
    return {
        "hidden": hidden.bfloat16().cuda(),
        "weight": mine.bfloat16().cuda(),
        "targets": targets.cuda(),
    }


def step(made: Tensors, group: Any, how: dict[str, Any]) -> Tensors:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hidden = made["hidden"]
    if how.get("sequence_parallel"):
        hidden = hidden.chunk(size)[rank]
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, made["weight"]))
    result = linear_cross_entropy(
        hidden, weight, made["targets"], group=group, backend="triton", **how
    )
    found = {} if isinstance(result, Tensor) else {"lse": result.lse}
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward()
    found |= {"loss": loss, "hidden": hidden.grad, "weight": weight.grad}
    return {name: value.detach() for name, value in found.items() if value is not None}


def without_waiting(group: Any, way: str) -> None:
    made = tensors(0, dist.get_rank(group), dist.get_world_size(group))
    expected = step(made, group, WAYS[way])  # compiles
    torch.cuda.synchronize()
    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step(made, group, WAYS[way])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("way", WAYS)
def test_ranks_never_wait_for_the_device(way: str) -> None:
    nccl_pool().run(2, without_waiting, way)


def in_a_graph(group: Any, way: str) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    static = tensors(0, rank, size)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, connects, lets libraries allocate
        for _ in range(2):
            step(static, group, WAYS[way])
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, group, WAYS[way])
    for seed, ignored in ((0, 0.3), (1, 0.0), (2, 0.8), (3, 1.0)):
        fresh = tensors(seed, rank, size, ignored)
        for name, tensor in fresh.items():
            static[name].copy_(tensor)
        graph.replay()
        expected = step(fresh, group, WAYS[way])
        for name, value in expected.items():
            assert torch.equal(captured[name], value), (way, seed, name)


@pytest.mark.parametrize("way", WAYS)
def test_a_cuda_graph_on_ranks(way: str) -> None:
    nccl_pool().run(2, in_a_graph, way)


def compiled(group: Any, backend: str) -> None:
    """Tensor parallel, sequence parallel and DTensors, compiled into one graph, as eager."""
    # The compiler's own imports.
    warnings.simplefilter("ignore", DeprecationWarning)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    made = tensors(0, rank, size)
    hidden, weight, targets = made["hidden"], made["weight"], made["targets"]
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("tp",))
    whole = distribute_tensor(hidden, mesh, [Replicate()], src_data_rank=None)
    split = DTensor.from_local(weight, mesh, [Shard(0)])
    cases: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        "tensor parallel": (hidden, weight, {"group": group}),
        "sequence parallel": (
            hidden.chunk(size)[rank],
            weight,
            {"group": group, "sequence_parallel": True},
        ),
        "dtensor": (whole, split, {}),
        "all columns": (hidden, weight, {"group": group, "gradient": "exact"}),
    }
    for name, (given, rows, how) in cases.items():
        torch._dynamo.reset()
        if "gradient" not in how:
            how["filter"] = SOME

        def run(hidden: Tensor, weight: Tensor, how: dict[str, Any] = how) -> Any:
            return linear_cross_entropy(2 * hidden, weight, targets, backend="triton", **how)

        got = []
        functions: list[Any] = [run, torch.compile(run, fullgraph=True, backend=backend)]
        for function in functions:
            leaves = [x.clone().detach().requires_grad_() for x in (given, rows)]
            loss = function(*leaves)
            loss.backward()
            values = [loss.detach(), *(leaf.grad for leaf in leaves)]
            got.append([x.to_local() if isinstance(x, DTensor) else x for x in values])
        torch.testing.assert_close(got[1], got[0], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_on_ranks(backend: str) -> None:
    nccl_pool().run(2, compiled, backend)


class Model(nn.Module):
    """A layer and a head, which FSDP makes whole in this forward."""

    def __init__(self, made: Tensors) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM, bias=False, device="cuda")
        self.weight = nn.Parameter(made["weight"].float())
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(DIM))

    def forward(self, hidden: Tensor, targets: Tensor) -> Any:
        return linear_cross_entropy(self.layer(hidden), self.weight, targets, backend="triton")


def sharded_fully(group: Any) -> None:
    """FSDP2 on two ranks with tokens of their own, against one model with all tokens."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    made = tensors(0, ignored=0.0)
    reference, model = Model(made), Model(made)
    mesh = DeviceMesh.from_group(group, "cuda", mesh_dim_names=("dp",))
    fully_shard(model, mesh=mesh)
    hidden, targets = made["hidden"].float(), made["targets"]
    model(hidden.chunk(size)[rank], targets.chunk(size)[rank]).backward()
    reference(hidden, targets).backward()
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor) and expected.grad is not None
        # Blocks of other tokens keep other columns.
        error = (mine.grad.full_tensor() - expected.grad).norm() / expected.grad.norm()
        assert error < 5e-3, error


def test_fsdp2_on_gpus() -> None:
    nccl_pool().run(2, sharded_fully)


# -- a rank that dies ---------------------------------------------------------------------------

TIMEOUT = 15.0
# Beside the timeout: how often NCCL's watchdog looks, and the end of a process.
SLACK = 30.0
START = 100.0
# "" is a run in which nobody dies.
PHASES = ("", "before", "forward", "backward")


def die_at(phase: str) -> None:
    """SIGKILL just before this process's part of a collective."""
    from cce_dist.ranks import gather, hidden_sum

    def die(*_: Any, **__: Any) -> Any:
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)

    if phase == "before":
        die()
    if phase == "forward":
        gather.all_gather = die
    else:
        hidden_sum._reduction = die


def train(rank: int, folder: Path, phase: str) -> None:
    """Three steps, their losses in a file; in the second one rank 1 dies."""
    # The watchdog leaves ranks four times as long to write down what they did: by default a minute.
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(str(folder / "store"), 2),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=START),
    )
    group, made = dist.group.WORLD, tensors(0, rank, 2)
    step(made, group, WAYS["filtered"])  # compiles
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=TIMEOUT))
    with (folder / f"losses.{rank}").open("w") as file:
        for number in range(3):
            if phase and rank == 1 and number == 1:
                (folder / "killed").write_text(str(time.time()))
                die_at(phase)
            loss = float(step(made, group, WAYS["filtered"])["loss"])
            torch.cuda.synchronize()
            file.write(f"{loss!r}\n")
            file.flush()
    dist.destroy_process_group()


def test_the_other_rank_ends_when_one_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    # Side by side, since each takes the whole timeout.
    workers: dict[str, list[Any]] = {}
    for phase in PHASES:
        folder = tmp_path / f"phase-{phase}"
        folder.mkdir()
        workers[phase] = [
            context.Process(target=train, args=(rank, folder, phase)) for rank in range(2)
        ]
    for pair in workers.values():
        for worker in pair:
            worker.start()
    try:
        check_all(tmp_path, workers)
    finally:
        for pair in workers.values():
            for worker in pair:
                worker.kill()
                worker.join()


def check_all(tmp_path: Path, workers: dict[str, list[Any]]) -> None:
    whole: dict[int, list[str]] = {}
    for phase, pair in workers.items():
        folder = tmp_path / f"phase-{phase}"
        pair[1].join(START)
        pair[0].join(TIMEOUT + SLACK)
        codes = [worker.exitcode for worker in pair]
        assert None not in codes, f"{phase}: hangs, {codes}"
        losses = {rank: (folder / f"losses.{rank}").read_text().split() for rank in range(2)}
        if not phase:
            assert codes == [0, 0] and [len(x) for x in losses.values()] == [3, 3]
            assert losses[0] == losses[1]
            whole = losses
            continue
        seconds = time.time() - float((folder / "killed").read_text())
        assert codes[1] == -signal.SIGKILL, phase
        assert codes[0] != 0, f"{phase}: rank 0 ended as if nothing had happened"
        assert seconds < TIMEOUT + SLACK, (phase, seconds)
        # Nobody finished the step that rank 1 had no part in; those before it were right.
        assert all(mine == whole[rank][:1] for rank, mine in losses.items()), (phase, losses)
