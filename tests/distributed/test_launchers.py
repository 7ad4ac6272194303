"""Which launcher an environment is of, which rank it gives, and what is refused in it."""

from __future__ import annotations

import pytest

from cce_dist.distributed.launchers import (
    FIRST_PORT,
    NUM_PORTS,
    LaunchError,
    expand_counts,
    expand_hosts,
    rank_from_environment,
    read_launch,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
BY_HAND = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
# Nine tasks: 4, 4 and 1 on three nodes. What srun sets for the sixth.
SRUN = {
    "SLURM_JOB_ID": "12345",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "9",
    "SLURM_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_NODELIST": "gpu[007-010]",
    "SLURM_STEP_NODELIST": "gpu[008-010]",
}
# A batch script, or a shell of salloc.
BATCH = {
    "SLURM_JOB_ID": "12345",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "9",
    "SLURM_TASKS_PER_NODE": "4(x2),1",
    "SLURM_NODELIST": "gpu[008-010]",
}
INTERACTIVE = BATCH | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "gpu008",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MVAPICH2 = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
# As srun starts hydra's proxies, one a node.
IN_PROXY = SRUN | {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
SRUN_PORT = FIRST_PORT + (12345 * 31 + 2) % NUM_PORTS


@pytest.mark.parametrize(
    ("environment", "launcher", "place", "meeting_point"),
    [
        pytest.param({}, "single", (0, 1, 0, 1), (None, None), id="nothing"),
        pytest.param({"MASTER_ADDR": "x"}, "single", (0, 1, 0, 1), (None, None), id="an address"),
        pytest.param(TORCHRUN, "torchrun", (5, 8, 1, 4), ("host", 29400), id="torchrun"),
        pytest.param(BY_HAND, "environment", (5, 8, 1, 4), ("host", 29400), id="by hand"),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"},
            "environment",
            (0, 1, 0, 1),
            (None, None),
            id="by hand, alone",
        ),
        pytest.param(SRUN, "slurm", (5, 9, 1, 4), ("gpu008", SRUN_PORT), id="srun"),
        pytest.param(
            SRUN | {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
            "slurm",
            (8, 9, 0, 1),
            ("gpu008", SRUN_PORT),
            id="srun, a smaller node",
        ),
        pytest.param(
            SRUN | {"MASTER_ADDR": "ib0", "MASTER_PORT": "7"},
            "slurm",
            (5, 9, 1, 4),
            ("ib0", 7),
            id="srun, a meeting point of the user's",
        ),
        pytest.param(OPEN_MPI, "openmpi", (5, 8, 1, 4), (None, None), id="Open MPI"),
        pytest.param(MVAPICH2, "mvapich2", (5, 8, 1, 4), (None, None), id="MVAPICH2"),
        pytest.param(HYDRA, "mpich", (5, 8, 1, 4), (None, None), id="MPICH, Intel MPI"),
        pytest.param(
            {"PMI_RANK": "5", "PMI_SIZE": "8", "MASTER_PORT": "7"},
            "mpich",
            (5, 8, None, None),
            (None, 7),
            id="PMI that says nothing of the host",
        ),
        # Several: the innermost.
        pytest.param(BATCH, "single", (0, 1, 0, 1), (None, None), id="python in sbatch"),
        pytest.param(INTERACTIVE, "slurm", (0, 1, 0, 1), (None, None), id="python in salloc"),
        pytest.param(
            IN_PROXY | TORCHRUN, "torchrun", (5, 8, 1, 4), ("host", 29400), id="torchrun in srun"
        ),
        pytest.param(
            OPEN_MPI | TORCHRUN, "torchrun", (5, 8, 1, 4), ("host", 29400), id="torchrun in mpirun"
        ),
        pytest.param(BATCH | HYDRA, "mpich", (5, 8, 1, 4), (None, None), id="mpirun in sbatch"),
        pytest.param(
            IN_PROXY | OPEN_MPI, "openmpi", (5, 8, 1, 4), (None, None), id="mpirun through srun"
        ),
        pytest.param(
            SRUN | {"PMI_RANK": "5", "PMI_SIZE": "9"},
            "slurm",
            (5, 9, 1, 4),
            ("gpu008", SRUN_PORT),
            id="srun --mpi=pmi2",
        ),
        pytest.param(
            SRUN | {"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "1"},
            "slurm",
            (5, 9, 1, 4),
            ("gpu008", SRUN_PORT),
            id="srun, the same by torch's names",
        ),
        pytest.param(
            INTERACTIVE | BY_HAND,
            "environment",
            (5, 8, 1, 4),
            ("host", 29400),
            id="another launcher in salloc",
        ),
        pytest.param(
            OPEN_MPI | {"WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "7"},
            "openmpi",
            (5, 8, 1, 4),
            ("h", 7),
            id="mpirun, a meeting point of the user's",
        ),
    ],
)
def test_read_launch(
    environment: dict[str, str],
    launcher: str,
    place: tuple[int | None, ...],
    meeting_point: tuple[str | None, int | None],
) -> None:
    launch = read_launch(environment)
    assert launch.launcher == launcher
    known = (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
    assert known == place
    assert (launch.address, launch.port) == meeting_point
    assert rank_from_environment(environment) == place[0]


@pytest.mark.parametrize("value", ["True", "False", None], ids=["True", "False", "not set"])
def test_read_launch_whose_store(value: str | None) -> None:
    environment = dict(TORCHRUN)
    del environment["TORCHELASTIC_USE_AGENT_STORE"]
    if value is not None:
        environment["TORCHELASTIC_USE_AGENT_STORE"] = value
    assert read_launch(environment).agent_store == (value == "True")
    assert not read_launch(SRUN | {"TORCHELASTIC": "True"}).agent_store


def test_read_launch_steps_of_a_job_have_other_ports() -> None:
    ports = {read_launch(SRUN | {"SLURM_STEP_ID": str(step)}).port for step in range(100)}
    assert len(ports) == 100
    assert all(port is not None and FIRST_PORT <= port < 32768 for port in ports)


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE must be set beside RANK, got none"),
        (without(TORCHRUN, "RANK"), "RANK must be set beside WORLD_SIZE, got none"),
        (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK must be set beside RANK, got none"),
        (without(BY_HAND, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE must be set beside RANK"),
        (without(BY_HAND, "MASTER_ADDR"), "MASTER_ADDR must be set beside RANK and WORLD_SIZE"),
        (BY_HAND | {"MASTER_PORT": ""}, "MASTER_PORT must be set beside RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "RANK must be set beside WORLD_SIZE, got WORLD_SIZE=4 and no RANK"),
        ({"LOCAL_RANK": "1"}, "RANK must be set beside LOCAL_RANK, got LOCAL_RANK=1 and no RANK"),
        (TORCHRUN | {"RANK": "8"}, "RANK must be below WORLD_SIZE, 8, got 8"),
        (TORCHRUN | {"RANK": "-1"}, "RANK must be an integer >= 0, got '-1'"),
        (TORCHRUN | {"RANK": "1_0"}, "RANK must be an integer >= 0, got '1_0'"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer >= 1, got '0'"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK must be below LOCAL_WORLD_SIZE, 4, got 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE must be at most WORLD_SIZE, 8"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT must be below the number of ports"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT must be an integer >= 1, got 'http'"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "9"}, "must be below OMPI_COMM_WORLD_SIZE, 8, got 9"),
        (without(HYDRA, "PMI_SIZE"), "PMI_SIZE must be set beside PMI_RANK, got none"),
        (without(HYDRA, "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS must be set beside PMI_RANK"),
        (SRUN | {"SLURM_LOCALID": "4"}, "SLURM_LOCALID must be below SLURM_STEP_TASKS_PER_NODE, 4"),
        (
            SRUN | {"SLURM_NODEID": "3"},
            "SLURM_NODEID must be below the number of nodes",
        ),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu[8-"}, "SLURM_STEP_NODELIST must be a list of nodes"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4x"}, "SLURM_STEP_TASKS_PER_NODE must be a list"),
        (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID must be set"),
        (
            without(SRUN, "SLURM_NODELIST", "SLURM_STEP_NODELIST"),
            "SLURM_STEP_NODELIST or SLURM_NODELIST must be set by srun",
        ),
        # What a launcher says and what somebody has exported.
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE must be what SLURM_STEP_NUM_TASKS says, 9, got 8"),
        (OPEN_MPI | {"LOCAL_RANK": "0"}, "LOCAL_RANK must be what OMPI_COMM_WORLD_LOCAL_RANK says"),
        (
            # Of a pod, inherited by all that mpirun starts in it.
            HYDRA | {"RANK": "0", "WORLD_SIZE": "1"},
            "RANK must be what PMI_RANK says, 5, got 0: unset RANK, which mpich does not need",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:45],
)
def test_read_launch_refuses(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_launch(environment)
    assert message in str(caught.value)
    # Each such rank says so itself.
    assert rank_from_environment(environment) == 0


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("one", ["one"]),
        ("node-1.x,node-2.x", ["node-1.x", "node-2.x"]),
        ("node[003-005,7],other", ["node003", "node004", "node005", "node7", "other"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("a[099-101]", ["a099", "a100", "a101"]),
        ("r[1-2]n[01-02]-ib,z", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib", "z"]),
    ],
)
def test_expand_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a[", "a]", "a[]", "a[1-]", "a[2-1]", "a[x]", "a,,b", "a[[1]]"]
)
def test_expand_hosts_refuses(text: str) -> None:
    with pytest.raises(LaunchError, match=r"text must be a list of nodes such as"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("3", [3]), ("4(x2),3", [4, 4, 3]), ("1,2(x1)", [1, 2])]
)
def test_expand_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(2)", "4(x2", "4,,3", "-1"])
def test_expand_counts_refuses(text: str) -> None:
    with pytest.raises(LaunchError, match=r"text must be a list such as 4\(x2\),3, got"):
        expand_counts(text)
