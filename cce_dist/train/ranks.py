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
    """World = dp x tp; the tp ranks of one data-parallel rank are neighbours.

    Args:
        store: of the rendezvous; a launcher's agent hosts it, so it outlives any worker.
        dp_group: ranks with the same vocabulary shard and other sequences.
        tp_group: ranks that share the vocabulary and see the same sequences.
        mesh: axes "tp" and "dp" over the same groups, for FSDP and checkpoints. In this order
            nested Shard(0) says who holds which rows: tp splits them first, FSDP each part.
    """

    rank: int
    world_size: int
    dp: int
    tp: int
    device: torch.device
    store: dist.Store
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    mesh: DeviceMesh

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

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
        ConfigError: the number of ranks is no multiple of parallel.tp, or GPUs are too few.
    """
    rank = rank_from_environment()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if world_size % config.tp:
        raise ConfigError(
            f"parallel.tp must divide the number of ranks, got tp={config.tp} on {world_size} "
            f"ranks: start with torchrun --nproc-per-node {config.tp}, or a multiple"
        )
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
    tp, dp = config.tp, world_size // config.tp
    grid = torch.arange(world_size).view(dp, tp)
    dp_group = _own_group(rank, grid.T.tolist(), timeout)
    tp_group = _own_group(rank, grid.tolist(), timeout)
    mesh = DeviceMesh.from_group(
        [tp_group, dp_group], device.type, mesh=grid.T, mesh_dim_names=("tp", "dp")
    )
    return Ranks(rank, world_size, dp, tp, device, store, dp_group, tp_group, mesh)


def _own_group(rank: int, members: list[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    # Every rank must take part in making every group, also those of others.
    groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]
    own = groups[next(i for i, ranks in enumerate(members) if rank in ranks)]
    assert isinstance(own, dist.ProcessGroup)
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
