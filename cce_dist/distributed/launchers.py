"""The launcher of this process and its rank, from environment variables alone.

docs/guide/ranks.md has the table of variables, and says which launcher wins if several set some.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

LauncherName = Literal["torchrun", "openmpi", "mvapich2", "mpich", "slurm", "environment", "single"]
MPI_LAUNCHERS: tuple[LauncherName, ...] = ("openmpi", "mvapich2", "mpich")
# Ports for the ranks' store: below those that Linux assigns, above those of services.
FIRST_PORT, NUM_PORTS = 10000, 20000


class LaunchError(ValueError):
    """An error in a launcher's variables; its text names the variable and what to do."""


class Variables(NamedTuple):
    """The environment variables in which a launcher states a rank's place."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


TORCH = Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI: dict[LauncherName, Variables] = {
    "openmpi": Variables(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich2": Variables(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH, Intel MPI and others that start ranks by hydra.
    "mpich": Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class Launch:
    """This process among those of its job.

    Args:
        variables: the launcher's names, for messages.
        local_rank, local_world_size: place among the ranks of this host; None: MPI must tell.
        address, port: place of the store in which ranks meet; None: ranks agree on it over MPI.
        agent_store: the launcher hosts that store; otherwise rank 0 does, and it ends with rank 0.
    """

    launcher: LauncherName
    variables: Variables
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    address: str | None = None
    port: int | None = None
    agent_store: bool = False


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Reads the variables of the launcher; of several launchers the innermost counts.

    Raises:
        LaunchError: a variable is missing, is no number, or contradicts another one.
    """
    if "TORCHELASTIC_RUN_ID" in environment or "TORCHELASTIC_USE_AGENT_STORE" in environment:
        return _read_torch(environment, "torchrun")
    other = _read_mpi(environment) or _read_slurm(environment)
    if TORCH.rank not in environment:
        if other is not None:
            _require_no_contradiction(environment, other)
            return other
        return _read_single(environment)
    if other is None:
        return _read_torch(environment, "environment")
    world_size = _integer(environment, TORCH.world_size, 1, companion=TORCH.rank)
    if world_size > other.world_size:
        # Each of the other launcher's tasks has started several ranks.
        return _read_torch(environment, "environment")
    _require_no_contradiction(environment, other)
    return other


def rank_from_environment(environment: Mapping[str, str] | None = None) -> int:
    """Returns the rank before anything is initialised; 0 without a launcher.

    With wrong variables the rank is 0, too: every rank then reports the error.
    """
    try:
        return read_launch(os.environ if environment is None else environment).rank
    except LaunchError:
        return 0


def _read_torch(environment: Mapping[str, str], launcher: LauncherName) -> Launch:
    rank, world_size = _place(environment, TORCH)
    local_rank, local_world_size = 0, 1
    if world_size > 1 or TORCH.local_rank in environment:
        local_rank, local_world_size = _local_place(environment, TORCH, world_size)
    address, port = _meeting_point(environment)
    if world_size > 1 and (address is None or port is None):
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise LaunchError(
            f"{missing} must be set beside RANK and WORLD_SIZE, got none: the host of rank 0 and a "
            "free port on it, the same on every rank; torchrun sets both"
        )
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(
        launcher, TORCH, rank, world_size, local_rank, local_world_size, address, port, hosted
    )


def _read_mpi(environment: Mapping[str, str]) -> Launch | None:
    for launcher, variables in MPI.items():
        if variables.rank not in environment:
            continue
        has_local_rank = variables.local_rank in environment
        if launcher == "mpich" and not has_local_rank and _is_slurm_step(environment):
            # srun --mpi=pmi2 sets rank and size, too, but no place on the host.
            return None
        rank, world_size = _place(environment, variables)
        local_rank, local_world_size = None, None
        if has_local_rank:
            local_rank, local_world_size = _local_place(environment, variables, world_size)
        address, port = _meeting_point(environment)
        return Launch(
            launcher, variables, rank, world_size, local_rank, local_world_size, address, port
        )
    return None


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Tells whether srun has started this process; a batch script has most variables, too."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment


def _read_slurm(environment: Mapping[str, str]) -> Launch | None:
    if not _is_slurm_step(environment):
        return None
    # Not SLURM_NTASKS, which may count the tasks of the allocation.
    variables = Variables(
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
    )
    rank, world_size = _place(environment, variables)
    if world_size == 1:
        return Launch("slurm", variables, 0, 1, 0, 1)
    local_rank = _integer(environment, variables.local_rank, 0)
    local_world_size = _slurm_tasks_here(environment)
    _require_below(variables.local_rank, local_rank, variables.local_world_size, local_world_size)
    address, port = _meeting_point(environment)
    if address is None:
        name = _first_set(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
        address = expand_hosts(environment[name], name)[0]
    if port is None:
        job = _integer(environment, "SLURM_JOB_ID", 0)
        step = _integer(environment, "SLURM_STEP_ID", 0) if "SLURM_STEP_ID" in environment else 0
        # Another job may share the host, and other steps of this job do.
        port = FIRST_PORT + (job * 31 + step) % NUM_PORTS
    return Launch("slurm", variables, rank, world_size, local_rank, local_world_size, address, port)


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    name = _first_set(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = expand_counts(environment[name], name)
    node = _integer(environment, "SLURM_NODEID", 0)
    _require_below("SLURM_NODEID", node, f"the number of nodes in {name}", len(counts))
    return counts[node]


def _read_single(environment: Mapping[str, str]) -> Launch:
    for name, alone in zip(TORCH, ("0", "1", "0", "1"), strict=True):
        if environment.get(name, alone) != alone:
            raise LaunchError(
                f"RANK must be set beside {name}, got {name}={environment[name]} and no RANK: "
                f"start the ranks with torchrun, or unset {name}"
            )
    return Launch("single", TORCH, 0, 1, 0, 1)


def _require_no_contradiction(environment: Mapping[str, str], launch: Launch) -> None:
    """Raises LaunchError if torch's variables contradict those of another launcher."""
    known = (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
    for name, theirs, value in zip(TORCH, launch.variables, known, strict=True):
        if name in environment and value is not None and _integer(environment, name, 0) != value:
            raise LaunchError(
                f"{name} must be what {theirs} says, {value}, got {environment[name]}: unset "
                f"{name}, which {launch.launcher} does not need"
            )


def _place(environment: Mapping[str, str], variables: Variables) -> tuple[int, int]:
    world_size = _integer(environment, variables.world_size, 1, companion=variables.rank)
    rank = _integer(environment, variables.rank, 0, companion=variables.world_size)
    _require_below(variables.rank, rank, variables.world_size, world_size)
    return rank, world_size


def _local_place(
    environment: Mapping[str, str], variables: Variables, world_size: int
) -> tuple[int, int]:
    size_name, rank_name = variables.local_world_size, variables.local_rank
    local_world_size = _integer(environment, size_name, 1, companion=variables.rank)
    local_rank = _integer(environment, rank_name, 0, companion=variables.rank)
    if local_world_size > world_size:
        raise LaunchError(
            f"{size_name} must be at most {variables.world_size}, {world_size}, got "
            f"{local_world_size}"
        )
    _require_below(rank_name, local_rank, size_name, local_world_size)
    return local_rank, local_world_size


def _meeting_point(environment: Mapping[str, str]) -> tuple[str | None, int | None]:
    address = environment.get("MASTER_ADDR") or None
    if not environment.get("MASTER_PORT"):
        return address, None
    port = _integer(environment, "MASTER_PORT", 1)
    _require_below("MASTER_PORT", port, "the number of ports", 2**16)
    return address, port


def _integer(
    environment: Mapping[str, str], name: str, least: int, *, companion: str | None = None
) -> int:
    text = environment.get(name)
    if text is None:
        rule = "be set" if companion is None else f"be set beside {companion}"
        raise LaunchError(f"{name} must {rule}, got none: the launcher sets it on every rank")
    # int() also takes " 1" and "1_0".
    if not re.fullmatch(r"[0-9]+", text, flags=re.ASCII) or int(text) < least:
        raise LaunchError(f"{name} must be an integer >= {least}, got {text!r}")
    return int(text)


def _require_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise LaunchError(f"{name} must be below {limit_name}, {limit}, got {value}")


def _first_set(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return name
    raise LaunchError(f"{' or '.join(names)} must be set by srun, got neither")


def expand_counts(text: str, name: str = "text") -> list[int]:
    """Expands Slurm's tasks of each node: "4(x2),3" gives [4, 4, 3].

    Raises:
        LaunchError: text is no such list.
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", entry)
        if match is None:
            raise LaunchError(f"{name} must be a list such as 4(x2),3, got {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_hosts(text: str, name: str = "text") -> list[str]:
    """Expands Slurm's list of nodes: "node[003-004,7],other" gives node003, node004, node7, other.

    Raises:
        LaunchError: text is no such list.
    """
    entries = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    try:
        if not entries or ",".join(entries) != text:
            raise ValueError(text)
        return [host for entry in entries for host in _expand_entry(entry)]
    except ValueError:
        raise LaunchError(
            f"{name} must be a list of nodes such as node[003-005,7],other, got {text!r}"
        ) from None


def _expand_entry(entry: str) -> list[str]:
    # Text outside brackets alternates with the contents of brackets.
    pieces = re.split(r"\[(.*?)\]", entry)
    choices = [
        [item for span in piece.split(",") for item in _expand_span(span)] if place % 2 else [piece]
        for place, piece in enumerate(pieces)
    ]
    return ["".join(items) for items in product(*choices)]


def _expand_span(span: str) -> list[str]:
    first, _, last = span.partition("-")
    if not re.fullmatch(r"[0-9]+(-[0-9]+)?", span) or int(last or first) < int(first):
        raise ValueError(span)
    return [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
