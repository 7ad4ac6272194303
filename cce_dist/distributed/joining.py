"""Joining the ranks of a job: device, process groups, device mesh."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cce_dist.distributed.launchers import MAX_SECONDS, Launch, LaunchError, read_launch
from cce_dist.distributed.rendezvous import OWN_GPU, leave_store, locate, open_attempt

DeviceChoice = Literal["auto", "cuda", "cpu"]
# Limit of a collective. torch's defaults are half an hour, and ten minutes with NCCL.
TIMEOUT_S = 120.0
# A cold file system may keep some ranks importing for minutes.
JOIN_TIMEOUT_S = 300.0
# For gloo's threads to free the last collective's tensors, under Python's lock: torch 2.13 aborts a
# process that ends before, where a mesh or a DTensor still holds the group.
LAST_FREED_S = 0.1


@dataclass(frozen=True)
class World:
    """All ranks of the job, which are torch's default group.

    Args:
        launch: who started the ranks, and this rank's place on its host.
        store: a store whose keys belong to this attempt alone; launch.agent_store tells its host.
        timeout: limit of a collective, in every group.
    """

    launch: Launch
    device: torch.device
    store: dist.Store
    timeout: timedelta

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size


@dataclass(frozen=True)
class Ranks:
    """World = dp x pp x tp; the tp ranks of a stage are neighbours, then those of a pipeline.

    Args:
        store: the store of the rendezvous. With launch.agent_store a launcher's agent hosts it, so
            that it outlives any worker; otherwise it ends with rank 0.
        dp_group: ranks with the same parameters and other sequences.
        tp_group: ranks that share the vocabulary and see the same sequences; with a pipeline, the
            ranks of a stage.
        pp_group: the ranks of the pipeline; None: there is no pipeline.
        stage_group: ranks with the same layers, dp x tp.
        vocab_group: the pp x tp ranks that together hold a model.
        mesh: axes "tp" and "dp" over the same groups, for FSDP and checkpoints. In this order
            nested Shard(0) gives each rank its rows: tp splits them first, then FSDP splits again.
        vocab_mesh: axes "vocab" and "dp", for rows that are split over vocab_group.
        timeout: limit of a collective, in every group.
        launch: who started the ranks, and this rank's place on its host.
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
    launch: Launch

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
        """Returns the largest of the ranks' values at each place of the pipelines."""
        width = self.pp * self.tp
        return [
            max(x for rank, x in enumerate(values) if rank % width // self.tp == place)
            for place in range(self.pp)
        ]

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init(
    *,
    tp: int | Literal["all"] = 1,
    pp: int = 1,
    dp: int | None = None,
    device: DeviceChoice = "auto",
    timeout: float = TIMEOUT_S,
    join_timeout: float = JOIN_TIMEOUT_S,
) -> Ranks:
    """Joins the ranks that torchrun, srun or mpirun started; makes groups and meshes.

    Without a launcher this process is the only rank.

    Args:
        tp: ranks that share the vocabulary; "all": as many as pp leaves.
        pp: ranks of a pipeline.
        dp: data-parallel ranks, which are checked; None: as many as pp and tp leave.
        device, timeout, join_timeout: as in `join`.
    Raises:
        ValueError: tp, pp and dp do not make up the number of ranks.
        LaunchError, JoinError: see `join`.
    Collectives: those that make groups.
    """
    world_size = read_launch(os.environ).world_size
    dp, tp = split_ranks(world_size, tp=tp, pp=pp, dp=dp)
    world = join(device=device, timeout=timeout, join_timeout=join_timeout, sizes=(dp, pp, tp))
    return _make_ranks(world, dp, pp, tp)


def join(
    *,
    device: DeviceChoice = "auto",
    timeout: float = TIMEOUT_S,
    join_timeout: float = JOIN_TIMEOUT_S,
    sizes: tuple[int, int, int] | None = None,
) -> World:
    """Makes torch's default group of all ranks of the job, and nothing else.

    With GPUs, one for each rank, the group has NCCL, and gloo for tensors on the CPU. Without GPUs
    it has gloo, and the ranks of a host share its cores: torch's number of threads is set.

    Args:
        device: "auto": GPUs if torch finds any.
        timeout: seconds that a collective may take, in every group.
        join_timeout: seconds to wait for ranks that have not come.
        sizes: dp, pp and tp; ranks that disagree on them are refused.
    Raises:
        ValueError: a timeout is not above 0, or above MAX_SECONDS.
        LaunchError: a ValueError. The environment's variables are incomplete, or contradict one
            another or another rank's; there are too few GPUs; or mpi4py is needed and missing.
        JoinError: ranks have not come within join_timeout, or rank 0 cannot be reached.
    """
    patience, limit = _limit("join_timeout", join_timeout), _limit("timeout", timeout)
    launch, store = locate(read_launch(os.environ), patience)
    chosen = choose_device(launch, device)
    facts: dict[str, object] = {"device": chosen.type}
    if sizes is not None:
        facts |= zip(("dp", "pp", "tp"), sizes, strict=True)
    if chosen.type == "cuda":
        facts[OWN_GPU] = f"GPU {torch.cuda.get_device_properties(chosen).uuid}"
    store = open_attempt(launch, store, facts, patience)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit
    )
    return World(launch, chosen, store, limit)


def _limit(name: str, seconds: float) -> timedelta:
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{name} must be > 0 and at most {MAX_SECONDS} seconds, got {seconds}")
    return timedelta(seconds=seconds)


def leave(ranks: Ranks | World) -> None:
    """Ends the process groups. Rank 0 stays a moment if it hosts a store that others still use."""
    dist.destroy_process_group()
    time.sleep(LAST_FREED_S)
    leave_store(ranks.store, ranks.rank, ranks.world_size, host=not ranks.launch.agent_store)


def split_ranks(
    world_size: int,
    *,
    tp: int | Literal["all"],
    pp: int = 1,
    dp: int | None = None,
    prefix: str = "",
) -> tuple[int, int]:
    """Returns dp and tp of `world_size` ranks.

    Args:
        prefix: text before the names of sizes in messages.
    Raises:
        ValueError: dp, pp and tp do not make up the number of ranks.
    """
    size = pp if tp == "all" else pp * tp
    if size < 1 or world_size % size:
        rule, got = f"{prefix}tp must", f"tp={tp}"
        if pp != 1:
            rule, got = f"{prefix}pp x {prefix}tp must", f"pp={pp} and {got}"
        raise ValueError(
            f"{rule} divide the number of ranks, got {got} on {world_size} "
            f"ranks: start with torchrun --nproc-per-node {max(size, 1)}, or a multiple"
        )
    if tp == "all":
        tp = world_size // pp
    remaining = world_size // (pp * tp)
    if dp is not None and dp != remaining:
        raise ValueError(
            f"{prefix}dp must be {remaining}, which pp={pp} and tp={tp} leave of {world_size} "
            f"ranks, got {dp}"
        )
    return remaining, tp


def _make_ranks(world: World, dp: int, pp: int, tp: int) -> Ranks:
    rank = world.rank
    grid = torch.arange(world.world_size).view(dp, pp, tp)

    def mine(members: torch.Tensor) -> dist.ProcessGroup:
        group = own_group(rank, members.flatten(0, -2).tolist(), world.timeout)
        assert group is not None
        return group

    def mesh(group: dist.ProcessGroup, members: torch.Tensor, name: str) -> DeviceMesh:
        groups = [group, dp_group]
        return DeviceMesh.from_group(
            groups, world.device.type, mesh=members, mesh_dim_names=(name, "dp")
        )

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
        world_size=world.world_size,
        dp=dp,
        pp=pp,
        tp=tp,
        device=world.device,
        store=world.store,
        dp_group=dp_group,
        tp_group=tp_group,
        pp_group=pp_group,
        stage_group=stage_group,
        vocab_group=vocab_group,
        mesh=stage_mesh,
        vocab_mesh=vocab_mesh,
        timeout=world.timeout,
        launch=world.launch,
    )


def own_group(rank: int, members: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Makes a group of each list of ranks; returns this rank's group, if there is one.

    Collectives: all ranks must call this, also those in no group.
    """
    rank_group = None
    for ranks in members:
        group = dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            rank_group = group
    return rank_group


def choose_device(launch: Launch, device: DeviceChoice = "auto") -> torch.device:
    """Chooses this rank's device and makes it current.

    A rank on the CPU takes its share of the cores, unless OMP_NUM_THREADS gives a number.

    Raises:
        ValueError: device is none of the choices, or it is "cuda" and torch finds no GPU.
        LaunchError: this host has more ranks than GPUs.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device must be auto, cuda or cpu, got {device!r}")
    local_rank, local_world_size = launch.local_rank, launch.local_world_size
    assert local_rank is not None and local_world_size is not None
    num_gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if num_gpus == 0:
        if device == "cuda":
            raise ValueError("device must be auto or cpu where torch finds no GPU, got cuda")
        # For several ranks torchrun sets OMP_NUM_THREADS to 1, unless the user has set it.
        threads = os.environ.get("OMP_NUM_THREADS")
        is_default = threads == "1" and launch.launcher == "torchrun" and local_world_size > 1
        if not threads or is_default:
            torch.set_num_threads(max(1, num_cores() // local_world_size))
        return torch.device("cpu")
    if 1 < num_gpus < local_world_size:
        name = launch.variables.local_world_size
        raise LaunchError(
            f"each rank needs a GPU of its own, got {local_world_size} ranks on this host ({name}) "
            f"and {num_gpus} GPUs: start fewer ranks, or hide the GPUs with CUDA_VISIBLE_DEVICES= "
            "to use the CPU"
        )
    # A launcher may show each rank its own GPU alone; `meet` refuses ranks that share one.
    index = 0 if num_gpus == 1 else local_rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def num_cores() -> int:
    """Returns the number of this host's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
