"""Ranks that find one another: in a store that others have used, over MPI, under a launcher."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.torchrun import Place, read_losses, run_forked_training, run_placed_training

from cce_dist import distributed
from cce_dist.distributed import choose_device, init, join, leave, split_ranks
from cce_dist.launchers import TORCH, Launch, LaunchError, read_launch
from cce_dist.rendezvous import JoinError, locate, meet, open_store, part
from cce_dist.testing.forks import fork_context

ROOT = Path(__file__).parent.parent

PATIENCE = timedelta(seconds=20)


@pytest.fixture(scope="module")
def server() -> Iterator[dist.TCPStore]:
    """One for all tests, as torchrun keeps one for all attempts."""
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def side_by_side(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results by rank, an exception being one."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def meetings(
    server: dist.TCPStore,
    facts: list[dict[str, Any]],
    *,
    world_size: int | None = None,
    patience: timedelta = PATIENCE,
) -> list[Any]:
    """What `meet` gives each rank; there are fewer than `world_size` if some stay away."""

    def call(rank: int) -> Callable[[], Any]:
        store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        size = world_size or len(facts)
        return lambda: meet(store, rank, size, facts[rank], patience)

    return side_by_side([call(rank) for rank in range(len(facts))])


def test_meet_gives_each_attempt_keys_of_its_own(server: dist.TCPStore) -> None:
    # Others of the same ranks have been here, as many, more and fewer of them, and left everything.
    for size in (4, 4, 2, 4):
        stores = meetings(server, [{"WORLD_SIZE": size}] * size)
        assert not stores[0].check(["x"])
        stores[0].set("x", str(size))
        assert [store.get("x") for store in stores] == [str(size).encode()] * size


def test_meet_ignores_those_who_died_while_joining(server: dist.TCPStore) -> None:
    left = dist.PrefixStore("cce_dist/join", server)
    left.set("hello/1", json.dumps({"number": "dead", "facts": {"tp": 3}}))
    stores = meetings(server, [{"tp": 1}, {"tp": 1}])
    stores[1].set("x", "1")
    assert stores[0].get("x") == b"1"


def test_meet_names_the_ranks_that_stay_away(server: dist.TCPStore) -> None:
    for error in meetings(server, [{}, {}], world_size=4, patience=timedelta(seconds=2)):
        assert isinstance(error, JoinError)
        assert str(error) == "of 4 ranks these have not come within 2 s: 2, 3"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        pytest.param(
            [{"tp": 1}, {"tp": 1}, {"tp": 2}],
            "tp must be the same on every rank, got 1 on rank 0 and 2 on rank 2",
            id="sizes",
        ),
        pytest.param(
            [{"gpu": "GPU a"}, {"gpu": "GPU b"}, {"gpu": "GPU a"}],
            "each rank needs a GPU of its own, but ranks 0 and 2 have both GPU a",
            id="a GPU of two ranks",
        ),
    ],
)
def test_meet_refuses_on_every_rank(
    server: dist.TCPStore, facts: list[dict[str, Any]], message: str
) -> None:
    for error in meetings(server, facts):
        assert isinstance(error, LaunchError) and message in str(error)


def test_meet_of_the_cpu_has_no_gpus_to_tell_apart(server: dist.TCPStore) -> None:
    assert all(isinstance(x, dist.Store) for x in meetings(server, [{"gpu": None}] * 2))


def test_part_waits_for_those_who_use_the_store(server: dist.TCPStore) -> None:
    order: list[int] = []

    def call(rank: int) -> Callable[[], None]:
        # A rank's client is its own: one shared by threads that waits keeps the others from setting
        # what it waits for.
        client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        store = dist.PrefixStore("parting", client)

        def ends() -> None:
            if rank:
                store.wait(["rank 0 is about to leave"], PATIENCE)
                order.append(rank)
            else:
                store.set("rank 0 is about to leave", "")
            part(store, rank, 3, host=True)
            if rank == 0:
                order.append(rank)

        return ends

    assert side_by_side([call(rank) for rank in range(3)]) == [None] * 3
    assert order[-1] == 0 and len(order) == 3


def launch_of(rank: int = 0, size: int = 1, *, launcher: Any = "mpich", **known: Any) -> Launch:
    names = read_launch({"PMI_RANK": "0", "PMI_SIZE": "1"}).variables
    names = names if launcher == "mpich" else TORCH
    return Launch(launcher, names, rank, size, None, None, **known)


def test_open_store_says_who_cannot_host_or_reach_it(server: dist.TCPStore) -> None:
    taken = launch_of(0, 2, address="127.0.0.1", port=server.port)
    with pytest.raises(JoinError, match=rf"rank 0 cannot host .* MASTER_PORT={server.port}: "):
        open_store(taken, PATIENCE)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = replace(taken, rank=1, port=unused.getsockname()[1])
        with pytest.raises(JoinError, match=r"rank 1 cannot reach .* MASTER_ADDR=127\.0\.0\.1"):
            open_store(nobody, timedelta(seconds=0.2))


class FakeComm:
    """Two ranks of COMM_WORLD on one host, or one of each of two hosts."""

    def __init__(self, rank: int, size: int, told: list[Any], hosts: int = 1) -> None:
        self.rank, self.size, self.told, self.hosts = rank, size, told, hosts

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Split_type(self, kind: str, key: int) -> FakeComm:
        return FakeComm(key % (self.size // self.hosts), self.size // self.hosts, self.told)

    def bcast(self, value: Any, root: int) -> Any:
        if self.rank == root:
            self.told.append(value)
        return self.told[0]


def fake_mpi(monkeypatch: pytest.MonkeyPatch, comm: FakeComm | None) -> None:
    package: Any = None
    if comm is not None:
        package = types.ModuleType("mpi4py")
        package.MPI = types.SimpleNamespace(
            COMM_WORLD=comm,
            COMM_TYPE_SHARED="shared",
            Get_library_version=lambda: "MPICH Version: 5\nmore",
        )
    monkeypatch.setitem(sys.modules, "mpi4py", package)


def test_locate_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    fake_mpi(monkeypatch, FakeComm(0, 2, told))
    first, server = locate(launch_of(0, 2), PATIENCE)
    fake_mpi(monkeypatch, FakeComm(1, 2, told))
    second, none = locate(launch_of(1, 2), PATIENCE)
    assert isinstance(server, dist.TCPStore) and none is None
    for launch in (first, second):
        assert (launch.address, launch.port) == ("127.0.0.1", server.port)
        assert (launch.local_rank, launch.local_world_size) == (launch.rank, 2)


@pytest.mark.parametrize("given", [{}, {"port": 7}, {"address": "ib0"}], ids=str)
def test_locate_over_mpi_of_two_hosts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    told: list[Any] = []
    fake_mpi(monkeypatch, FakeComm(0, 2, told, hosts=2))
    monkeypatch.setattr(socket, "gethostname", lambda: "first")
    hosted: list[str] = []

    def host(address: str, port: int, timeout: timedelta) -> Any:
        hosted.append(address)
        return types.SimpleNamespace(port=29)

    monkeypatch.setattr("cce_dist.rendezvous._host_store", host)
    launch, _ = locate(launch_of(0, 2, **given), PATIENCE)
    assert launch.address == given.get("address", "first")
    assert launch.port == given.get("port", 29)
    assert hosted == ([] if "port" in given else [launch.address])
    assert (launch.local_rank, launch.local_world_size) == (0, 1)


def test_locate_asks_mpi_only_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, None)
    whole = replace(launch_of(1, 2, address="h", port=7), local_rank=0, local_world_size=1)
    assert locate(whole, PATIENCE) == (whole, None)
    alone, _ = locate(launch_of(), PATIENCE)
    assert (alone.local_rank, alone.local_world_size) == (0, 1)


@pytest.mark.parametrize(
    ("comm", "message"),
    [
        (None, "MASTER_ADDR and MASTER_PORT must be set under mpirun if mpi4py cannot be imported"),
        (
            FakeComm(0, 1, []),
            "PMI_SIZE must be the size of mpi4py's COMM_WORLD, 1, got 2: mpi4py has loaded MPICH "
            "Version: 5, and mpirun is another MPI's",
        ),
    ],
    ids=["no mpi4py", "another MPI's mpirun"],
)
def test_locate_refuses(
    monkeypatch: pytest.MonkeyPatch, comm: FakeComm | None, message: str
) -> None:
    fake_mpi(monkeypatch, comm)
    with pytest.raises(LaunchError) as caught:
        locate(launch_of(0, 2), PATIENCE)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "how", "expected"),
    [
        (8, {"tp": 2}, (4, 2)),
        (8, {"tp": 2, "pp": 2, "dp": 2}, (2, 2)),
        (8, {"tp": "all"}, (1, 8)),
        (8, {"tp": "all", "pp": 4}, (1, 2)),
        (8, {"tp": 3}, "tp must divide the number of ranks, got tp=3 on 8 ranks"),
        (8, {"tp": "all", "pp": 3}, "pp x tp must divide the number of ranks, got pp=3 and tp=all"),
        (8, {"tp": 2, "dp": 2}, "dp must be 4, which pp=1 and tp=2 leave of 8 ranks, got 2"),
        (8, {"tp": 0}, "tp must divide the number of ranks, got tp=0"),
    ],
)
def test_split_ranks(world_size: int, how: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError) as caught:
            split_ranks(world_size, **how)
        assert expected in str(caught.value)
    else:
        assert split_ranks(world_size, **how) == expected


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Pretends that there are so many; the devices that are then chosen."""
    chosen: list[int] = []

    def pretend(count: int) -> list[int]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


@pytest.mark.parametrize(
    ("count", "local", "index"),
    [(4, (3, 4), 3), (8, (1, 4), 1), (1, (0, 1), 0), (1, (3, 4), 0)],
    ids=["a GPU each", "more GPUs", "alone", "each sees its own alone"],
)
def test_choose_device(
    gpus: Callable[[int], list[int]], count: int, local: tuple[int, int], index: int
) -> None:
    launch = replace(launch_of(), local_rank=local[0], local_world_size=local[1])
    chosen = gpus(count)
    assert choose_device(launch) == torch.device("cuda", index)
    assert chosen == [index]
    assert choose_device(launch, "cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("launcher", "local_size", "said", "threads"),
    [
        ("single", 1, None, 6),
        ("single", 1, "3", None),
        ("single", 1, "1", None),
        ("torchrun", 2, "1", 3),
        ("torchrun", 2, "2", None),
        ("openmpi", 2, "1", None),
        ("openmpi", 4, None, 1),
    ],
)
def test_threads_of_a_rank_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    launcher: Any,
    local_size: int,
    said: str | None,
    threads: int | None,
) -> None:
    """None: as torch has them, by OMP_NUM_THREADS."""
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(distributed, "_num_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    launch = replace(launch_of(), launcher=launcher, local_rank=0, local_world_size=local_size)
    choose_device(launch, "cpu")
    assert found == ([] if threads is None else [threads])


def test_choose_device_refuses(gpus: Callable[[int], list[int]]) -> None:
    gpus(2)
    launch = replace(launch_of(), local_rank=0, local_world_size=4)
    with pytest.raises(LaunchError, match=r"got 4 ranks on this host \(MPI_LOCALNRANKS\) and 2 GP"):
        choose_device(launch)
    gpus(0)
    with pytest.raises(ValueError, match="device must be auto or cpu where torch finds no GPU"):
        choose_device(launch, "cuda")
    wrong: Any = "tpu"
    with pytest.raises(ValueError, match="device must be auto, cuda or cpu, got 'tpu'"):
        choose_device(launch, wrong)


def slurm_place(rank: int, size: int, port: int) -> Place:
    return {
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0,
        "SLURM_NTASKS": size,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        # Other jobs on this machine would have other ids; other runs of this test have not.
        "MASTER_PORT": port,
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def sizes_of_groups(place: Place, results: Any) -> None:
    """A process that has never heard of pytest."""
    os.environ.update({name: str(value) for name, value in place.items()})
    ranks = init(tp=2, pp=2, device="cpu", timeout=20, join_timeout=20)
    value = torch.tensor([2.0**ranks.rank])
    assert ranks.pp_group is not None
    groups = (ranks.dp_group, ranks.tp_group, ranks.pp_group, ranks.stage_group, ranks.vocab_group)
    sums = []
    for group in groups:
        total = value.clone()
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    meshes = {mesh.mesh_dim_names: mesh.mesh.tolist() for mesh in (ranks.mesh, ranks.vocab_mesh)}
    at = (ranks.dp_rank, ranks.pp_rank, ranks.tp_rank)
    results.put((ranks.rank, at, sums, meshes, ranks.launch.launcher))
    leave(ranks)


def test_init_makes_groups_and_meshes() -> None:
    context = fork_context()
    results = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=sizes_of_groups, args=(slurm_place(rank, 8, port), results))
        for rank in range(8)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(50)
        assert [process.exitcode for process in processes] == [0] * 8
    finally:
        for process in processes:
            process.kill()
    for rank, at, sums, meshes, launcher in sorted(results.get() for _ in processes):
        dp_rank, pp_rank, tp_rank = at
        assert (launcher, rank) == ("slurm", dp_rank * 4 + pp_rank * 2 + tp_rank)

        def members(*, dp: Any = dp_rank, pp: Any = pp_rank, tp: Any = tp_rank) -> int:
            """Bits of the ranks at these places; None: at any."""
            places = [(r // 4, r // 2 % 2, r % 2) for r in range(8)]
            wanted = (dp, pp, tp)
            return sum(
                2**r
                for r, place in enumerate(places)
                if all(w in (None, x) for w, x in zip(wanted, place, strict=True))
            )

        assert sums == [
            members(dp=None),
            members(tp=None),
            members(pp=None),
            members(dp=None, tp=None),
            members(pp=None, tp=None),
        ]
        first = 2 * pp_rank
        assert meshes["tp", "dp"] == [[first, first + 4], [first + 1, first + 5]]
        assert meshes["vocab", "dp"] == [[r, r + 4] for r in range(4)]


def test_join_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCH, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    world = join(device="cpu", timeout=7)
    assert (world.rank, world.world_size, world.launch.launcher) == (0, 1, "single")
    assert world.timeout == timedelta(seconds=7)
    leave(world)
    assert not dist.is_initialized()


def test_init_checks_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm_place(1, 2, 1).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed, "join", None)
    with pytest.raises(ValueError, match="tp must divide the number of ranks, got tp=4 on 2 ranks"):
        init(tp=4)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two ranks and four steps."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "text.txt").write_text(Path(json.__file__).read_text())
    values = {
        "run": {"name": "run", "out": str(folder)},
        "data": {
            "paths": [str(folder / "text.txt")],
            "vocab_size": 301,
            "sequence_length": 16,
            "cache": str(folder / "cache"),
        },
        "model": {"dim": 16, "layers": 1, "heads": 2},
        "parallel": {"tp": "all", "timeout_s": 20},
        "checkpoint": {"every": 0},
        "steps": 4,
        "batch": 4,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def by_torchrun(config: Path) -> list[float]:
    code, output = run_forked_training(2, config, "--run.name", "torchrun")
    assert code == 0, output
    return read_losses(config.parent / "torchrun")


def test_train_under_srun(config: Path, by_torchrun: list[float]) -> None:
    port = free_port()
    places = [slurm_place(rank, 2, port) for rank in range(2)]
    code, output = run_placed_training(places, config, "--run.name", "slurm")
    assert code == 0, output
    assert read_losses(config.parent / "slurm") == by_torchrun


def test_train_says_what_contradicts_in_the_environment(config: Path) -> None:
    place = {**slurm_place(1, 2, 1), "WORLD_SIZE": 4}
    code, output = run_placed_training([place], config)
    assert code == 2
    assert output.startswith("error: WORLD_SIZE must be what SLURM_STEP_NUM_TASKS says, 2, got 4")
    assert "Traceback" not in output


@pytest.mark.timeout(120)
def test_train_under_mpirun(config: Path, by_torchrun: list[float]) -> None:
    pytest.importorskip("mpi4py")
    # A wheel's, beside the interpreter; another MPI's may come first on the PATH.
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("needs mpirun in the environment of mpi4py: pip install mpich")
    train = ["-m", "mpi4py", "-m", "cce_dist", "train", str(config), "--run.name", "mpi"]
    done = subprocess.run(
        [mpirun, "-n", "2", sys.executable, *train],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert read_losses(config.parent / "mpi") == by_torchrun


def run_example(place: Place, source: str, output: Path) -> None:
    os.environ.update({name: str(value) for name, value in place.items()}, CUDA_VISIBLE_DEVICES="")
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        exec(compile(source, "docs/ranks.md", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()


def test_the_example_gives_one_loss(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/ranks.md").read_text(), re.S)
    said = []
    for size in (1, 3):
        output = tmp_path / str(size)
        port = free_port()
        places: list[Place] = [slurm_place(rank, size, port) for rank in range(size)]
        processes = [
            fork_context().Process(target=run_example, args=(place, source, output))
            for place in places
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
        assert [process.exitcode for process in processes] == [0] * size
        said.append(output.read_text())
    assert said[0].startswith("1 ranks by slurm: ")
    assert said[1] == said[0].replace("1 ranks", "3 ranks")


def sum_over_gpus(place: Place, results: Any) -> None:
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        ranks = init(tp=2, timeout=60, join_timeout=60)
    except LaunchError as error:
        results.put((str(error), None))
        return
    values = [torch.ones(1, device=device) for device in (ranks.device, "cpu")]
    for value in values:
        dist.all_reduce(value, group=ranks.tp_group)
    results.put((str(ranks.device), [float(value) for value in values]))
    leave(ranks)


@pytest.mark.multigpu
@pytest.mark.parametrize("shared", [False, True], ids=["a GPU each", "one for both"])
def test_init_on_gpus(shared: bool) -> None:
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    port = free_port()
    places = [slurm_place(rank, 2, port) for rank in range(2)]
    if shared:
        places = [{**place, "CUDA_VISIBLE_DEVICES": 0} for place in places]
    processes = [context.Process(target=sum_over_gpus, args=(x, results)) for x in places]
    for process in processes:
        process.start()
    found = sorted(results.get() for _ in processes)
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    if shared:
        assert all("ranks 0 and 1 have both GPU " in message for message, _ in found)
    else:
        assert found == [("cuda:0", [2.0, 2.0]), ("cuda:1", [2.0, 2.0])]
