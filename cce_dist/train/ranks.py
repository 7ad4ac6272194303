"""The ranks of a job: process groups, device, who is beside whom."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .config import ParallelConfig
from .errors import ConfigError

# A collective fails this long after parallel.timeout_s.
COLLECTIVE_MARGIN_S = 3.0


@dataclass(frozen=True)
class Ranks:
    """World = dp x pp x tp; the tp ranks of a stage are neighbours, then those of a pipeline.

    Args:
        store: of the rendezvous; a launcher's agent hosts it, so it outlives any worker.
        dp_group: ranks with the same parameters and other sequences.
        tp_group: ranks that share the vocabulary and see the same sequences; with a pipeline those
            of a stage.
        pp_group: the pipeline; None: there is none.
        stage_group: ranks with the same layers, dp x tp.
        vocab_group: all ranks of a data-parallel one, pp x tp.
        mesh: axes "tp" and "dp" over the same groups, for FSDP and checkpoints. In this order
            nested Shard(0) says who holds which rows: tp splits them first, FSDP each part.
        vocab_mesh: "vocab" and "dp", where rows are over vocab_group.
        timeout: of every group.
    """

    rank: int
    world_size: int
    dp: int
    pp: int
    tp: int
    device: torch.device
    store: dist.Store
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup | None
    stage_group: dist.ProcessGroup
    vocab_group: dist.ProcessGroup
    mesh: DeviceMesh
    vocab_mesh: DeviceMesh
    timeout: timedelta

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.pp * self.tp)

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp % self.pp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    def largest_of_pp(self, values: list[int]) -> list[int]:
        """Of a value of each rank the largest at each place of the pipelines."""
        width = self.pp * self.tp
        return [
            max(x for rank, x in enumerate(values) if rank % width // self.tp == place)
            for place in range(self.pp)
        ]

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def rank_from_environment() -> int:
    """Known before anything is initialised; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def connect(config: ParallelConfig) -> Ranks:
    """Join the ranks that torchrun started, or stand alone without it.

    NCCL with one GPU a rank where there are GPUs, gloo on the CPU otherwise. Every group gets
    an explicit timeout: new groups would fall back to gloo's half an hour.

    Raises:
        ConfigError: the number of ranks is no multiple of parallel.pp x parallel.tp, or GPUs are
            too few.
    """
    rank = rank_from_environment()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _check_world(config, world_size)
    device = _choose_device(int(os.environ.get("LOCAL_RANK", "0")), local_world_size)
    # The heartbeat speaks first: it can name the rank, and NCCL aborts without a word.
    timeout = timedelta(seconds=config.timeout_s + COLLECTIVE_MARGIN_S)
    if "MASTER_ADDR" in os.environ:
        store = next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
    else:
        store = dist.HashStore()
    # torchrun keeps its store when it restarts the ranks; what the last attempt left must not
    # be mistaken for this one's.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return _make_ranks(config, rank, device, store, timeout)


def _check_world(config: ParallelConfig, world_size: int) -> None:
    size = config.tp * config.pp
    if world_size % size == 0:
        return
    rule, got = "parallel.tp must", f"tp={config.tp}"
    if config.pp > 1:
        rule, got = "parallel.pp x parallel.tp must", f"pp={config.pp} and {got}"
    raise ConfigError(
        f"{rule} divide the number of ranks, got {got} on {world_size} "
        f"ranks: start with torchrun --nproc-per-node {size}, or a multiple"
    )


def _make_ranks(
    config: ParallelConfig, rank: int, device: torch.device, store: dist.Store, timeout: timedelta
) -> Ranks:
    world_size, tp, pp = dist.get_world_size(), config.tp, config.pp
    dp = world_size // (tp * pp)
    grid = torch.arange(world_size).view(dp, pp, tp)

    def mine(members: torch.Tensor) -> dist.ProcessGroup:
        group = own_group(rank, members.flatten(0, -2).tolist(), timeout)
        assert group is not None
        return group

    def mesh(group: dist.ProcessGroup, members: torch.Tensor, name: str) -> DeviceMesh:
        groups = [group, dp_group]
        return DeviceMesh.from_group(groups, device.type, mesh=members, mesh_dim_names=(name, "dp"))

    dp_group, tp_group = mine(grid.permute(1, 2, 0)), mine(grid)
    my_stage = rank // tp % pp
    stage_mesh = mesh(tp_group, grid[:, my_stage].T, "tp")
    pp_group, stage_group, vocab_group, vocab_mesh = None, dist.group.WORLD, tp_group, stage_mesh
    if pp > 1:
        pp_group = mine(grid.permute(0, 2, 1))
        stage_group = mine(grid.transpose(0, 1).flatten(1))
        vocab_group = mine(grid.flatten(1))
        vocab_mesh = mesh(vocab_group, grid.flatten(1).T, "vocab")
    assert stage_group is not None
    return Ranks(
        rank=rank,
        world_size=world_size,
        dp=dp,
        pp=pp,
        tp=tp,
        device=device,
        store=store,
        dp_group=dp_group,
        tp_group=tp_group,
        pp_group=pp_group,
        stage_group=stage_group,
        vocab_group=vocab_group,
        mesh=stage_mesh,
        vocab_mesh=vocab_mesh,
        timeout=timeout,
    )


def own_group(rank: int, members: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """The group that this rank is in, if it is in one of them."""
    # Every rank must take part in making every group, also those of others.
    own = None
    for ranks in members:
        made = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            assert isinstance(made, dist.ProcessGroup)
            own = made
    return own


def _choose_device(local_rank: int, local_world_size: int) -> torch.device:
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, _num_cores() // local_world_size))
        return torch.device("cpu")
    if local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"each rank needs a GPU of its own, got {local_world_size} ranks and "
            f"{torch.cuda.device_count()} GPUs: start fewer ranks, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
