"""The launcher of this process and its rank, from environment variables alone.

docs/guide/ranks.md has the table of variables, and says which launcher wins if several set some.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

LauncherName = Literal["torchrun", "openmpi", "mvapich2", "mpich", "slurm", "environment", "single"]
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


def _comm_world(prefix: str) -> Variables:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    return Variables(*(f"{prefix}_COMM_WORLD_{name}" for name in names))


# The longest timeout: torch counts its nanoseconds in an int64.
MAX_SECONDS = 10**9

TORCH = Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Not SLURM_NTASKS, which may count the tasks of the allocation.
SLURM = Variables(
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"
)
MPI: dict[LauncherName, Variables] = {
    "openmpi": _comm_world("OMPI"),
    "mvapich2": _comm_world("MV2"),
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
    if TORCH.rank in environment:
        world_size = _integer(environment, TORCH.world_size, 1, beside=TORCH.rank)
        # Each of the other launcher's tasks may have started several ranks.
        if other is None or world_size > other.world_size:
            return _read_torch(environment, "environment")
    if other is None:
        return _read_single(environment)
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


def _read(
    environment: Mapping[str, str],
    launcher: LauncherName,
    variables: Variables,
    *,
    has_local_place: bool = True,
) -> Launch:
    """Reads a rank's place and, as far as it is set, the meeting point."""
    rank, world_size = _place(environment, variables.rank, variables.world_size)
    local_place = None, None
    if has_local_place:
        name = variables.local_world_size
        local_place = _place(environment, variables.local_rank, name, beside=variables.rank)
        if local_place[1] > world_size:
            limit = f"{variables.world_size}, {world_size}"
            raise LaunchError(f"{name} must be at most {limit}, got {local_place[1]}")
    address, port = environment.get("MASTER_ADDR") or None, None
    if environment.get("MASTER_PORT"):
        port = _integer(environment, "MASTER_PORT", 1)
        _require_below("MASTER_PORT", port, "the number of ports", 2**16)
    return Launch(launcher, variables, rank, world_size, *local_place, address, port)


def _read_torch(environment: Mapping[str, str], launcher: LauncherName) -> Launch:
    if environment.get(TORCH.world_size) == "1" and TORCH.local_rank not in environment:
        environment = {**environment, TORCH.local_rank: "0", TORCH.local_world_size: "1"}
    launch = _read(environment, launcher, TORCH)
    for name, value in {"MASTER_ADDR": launch.address, "MASTER_PORT": launch.port}.items():
        if launch.world_size > 1 and value is None:
            raise LaunchError(
                f"{name} must be set beside RANK and WORLD_SIZE, got none: the host of rank 0 and "
                "a free port on it, the same on every rank; torchrun sets both"
            )
    is_agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(launch, agent_store=is_agents)


def _read_mpi(environment: Mapping[str, str]) -> Launch | None:
    for launcher, variables in MPI.items():
        if variables.rank not in environment:
            continue
        has_local_place = variables.local_rank in environment
        if launcher == "mpich" and not has_local_place and _is_slurm_step(environment):
            # srun --mpi=pmi2 sets rank and size, too, but no place on the host.
            return None
        return _read(environment, launcher, variables, has_local_place=has_local_place)
    return None


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Tells whether srun has started this process; a batch script has most variables, too."""
    return SLURM.rank in environment and SLURM.world_size in environment


def _read_slurm(environment: Mapping[str, str]) -> Launch | None:
    if not _is_slurm_step(environment):
        return None
    if _place(environment, SLURM.rank, SLURM.world_size)[1] == 1:
        return Launch("slurm", SLURM, 0, 1, 0, 1)
    known = {SLURM.local_world_size: str(_slurm_tasks_here(environment))}
    if not environment.get("MASTER_ADDR"):
        name = _first_set(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
        known["MASTER_ADDR"] = expand_hosts(environment[name], name)[0]
    if not environment.get("MASTER_PORT"):
        job = _integer(environment, "SLURM_JOB_ID", 0)
        step = _integer(environment, "SLURM_STEP_ID", 0) if "SLURM_STEP_ID" in environment else 0
        # Another job may share the host, and other steps of this job do.
        known["MASTER_PORT"] = str(FIRST_PORT + (job * 31 + step) % NUM_PORTS)
    return _read({**environment, **known}, "slurm", SLURM)


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


def _place(
    environment: Mapping[str, str], rank_name: str, size_name: str, *, beside: str | None = None
) -> tuple[int, int]:
    """Reads a rank and a number of ranks; `beside` is a variable that is set, for messages."""
    size = _integer(environment, size_name, 1, beside=beside or rank_name)
    rank = _integer(environment, rank_name, 0, beside=beside or size_name)
    _require_below(rank_name, rank, size_name, size)
    return rank, size


def _integer(
    environment: Mapping[str, str], name: str, least: int, *, beside: str | None = None
) -> int:
    text = environment.get(name)
    if text is None:
        rule = "be set" if beside is None else f"be set beside {beside}"
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
