"""`cce-dist doctor` on several ranks: the mesh, what must be alike, the collectives, who hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cce_dist.doctor import ranks as job
from cce_dist.doctor.facts import RankFacts
from cce_dist.testing import fork_context
from tests.doctor.doctor_facts import row

ROOT = Path(__file__).parents[2]
# Sizes that take gloo no time.
SMALL = ("--seconds", "0", "--tokens", "256", "--dim", "64")
Spoil = Callable[[int], None]


def run_forked(
    size: int, folder: Path, *arguments: str, spoil: Spoil | None = None, hangs: int | None = None
) -> list[tuple[int | None, str]]:
    """Exit code and output of each rank of `cce-dist doctor`.

    Args:
        spoil: called in each process, with its rank, before the command.
        hangs: a rank that is not waited for, and has no exit code.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outputs = [folder / f"{rank}.out" for rank in range(size)]
    ranks = []
    for rank, output in enumerate(outputs):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        command = ("doctor", *SMALL, *arguments)
        started = fork_context().Process(target=_doctor, args=(place, output, command, spoil))
        started.start()
        ranks.append(started)
    deadline = time.monotonic() + 40
    try:
        for rank, process in enumerate(ranks):
            process.join(0 if rank == hangs else max(deadline - time.monotonic(), 0))
        return [
            (process.exitcode, output.read_text())
            for process, output in zip(ranks, outputs, strict=True)
        ]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _doctor(
    place: dict[str, Any], output: Path, arguments: tuple[str, ...], spoil: Spoil | None
) -> None:
    os.environ.update({name: str(value) for name, value in place.items()}, CUDA_VISIBLE_DEVICES="")
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    from cce_dist.cli.main import app
    from cce_dist.doctor import software

    # Another process for every rank.
    software.ASK_MPI = "raise RuntimeError"
    if spoil is not None:
        spoil(place["RANK"])
    app(list(arguments), prog_name="cce-dist")


def test_a_pipeline_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    ended = run_forked(4, tmp_path, "--pp", "2", "--json", str(path))
    assert [code for code, _ in ended] == [0] * 4, ended
    assert [bool(output) for _, output in ended] == [True, False, False, False]
    assert max(len(line) for line in ended[0][1].splitlines()) <= 80
    report = json.loads(path.read_text())
    assert report["mesh"] == {"dp": 1, "pp": 2, "tp": 2}
    assert (report["ranks"], len(report["by_rank"])) == (4, 4)
    assert "128,000 of 256,000 classes a rank" in row("mesh", report)["found"]
    for name in ("devices", "software"):
        assert row(name, report)["status"] == "ok"
    # What nccl-tests count for a ring: 4 bytes, two numbers a token, and 6 bytes an element.
    expected = {"latency": 4.0, "merge": 4 * (2 * 256 + 8), "sum": 6.0 * 256 * 64}
    for group, size in (("tp", 2), ("pp x tp", 4)):
        for kind, num_bytes in expected.items():
            numbers = row(f"{kind}, {group} {size}", report)["numbers"]
            rounds = size - 1 if kind != "sum" else (size - 1) / size
            assert numbers["bus_bytes"] == pytest.approx(rounds * num_bytes)
            assert 0 < numbers["seconds"] < 10


def _other_software(rank: int) -> None:
    """On rank 1 another torch, and a sum that is wrong."""
    from cce_dist.doctor import collectives, run

    gather, reduce = run.gather_facts, collectives.reduce_grad_hidden

    def other_facts(**keywords: Any) -> Any:
        facts = gather(**keywords)
        return replace(facts, versions={**facts.versions, "torch": "2.12.0"}, sources="abc")

    def wrong_sum(*args: Any, **keywords: Any) -> Any:
        return reduce(*args, **keywords) + 1

    if rank == 1:
        run.gather_facts, collectives.reduce_grad_hidden = other_facts, wrong_sum


def test_ranks_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    arguments = ("--sequence-parallel", "--json", str(path))
    ended = run_forked(2, tmp_path, *arguments, spoil=_other_software)
    assert [code for code, _ in ended] == [1, 1], ended
    report = json.loads(path.read_text())
    software = row("software", report)
    assert software["status"] == "failure"
    assert "2.12.0 on rank 1" in software["found"]
    assert "abc on rank 1" in software["found"]
    assert "python" not in software["found"]
    assert row("sum, tp 2", report)["status"] == "failure"
    assert row("merge, tp 2", report)["status"] != "failure"


def _silent(rank: int) -> None:
    """Rank 1 joins and says nothing more; rank 0 waits for half a second."""
    join = job.join

    def join_and_wait(*how: Any) -> Any:
        ranks = join(*how)
        if rank == 1:
            ranks.store.wait(["never"])
        return replace(ranks, timeout=0.5)

    job.join = join_and_wait


def test_a_rank_that_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    started = time.monotonic()
    (ended, _) = run_forked(2, tmp_path, "--json", str(path), spoil=_silent, hangs=1)
    assert ended[0] == 1, ended
    assert time.monotonic() - started < 20
    check = row("ranks", json.loads(path.read_text()))
    assert check["status"] == "failure"
    assert "rank 1 did not come to the beginning within 0.5 s" in check["found"]


def _hang(rank: int) -> None:
    """Rank 0 hangs where no exception gets out; rank 1 is not there yet."""
    from cce_dist.doctor import run

    def hang(*args: Any) -> Any:
        threading.Event().wait()

    if rank == 0:
        run.LONGEST_TRIAL_S = 0.5
        run._numerics = hang
    else:
        job.ends_within = hang


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    (ended, _) = run_forked(2, tmp_path, spoil=_hang, hangs=1)
    assert ended[0] == 1, ended
    assert "rank 0 on" in ended[1]
    assert "hung in the numerics for 0.5 s; rank 1 never came to it" in ended[1]


def _other_arguments(rank: int) -> None:
    from cce_dist.cli import doctor as cli_doctor

    real = cli_doctor.examine
    if rank == 1:
        cli_doctor.examine = lambda request: real(replace(request, tokens=512))


def test_ranks_with_other_arguments(tmp_path: Path) -> None:
    ended = run_forked(2, tmp_path, spoil=_other_arguments)
    assert [code for code, _ in ended] == [2, 2], ended
    assert "--tokens must be the same on every rank, got 256 on rank 0 and 512" in ended[0][1]


def test_devices() -> None:
    def one(gpu: str | None, has_gpus: bool = True) -> RankFacts:
        return RankFacts(host="node1", gpu=gpu, has_gpus=has_gpus)

    check = job.check_devices
    assert check([one("a"), one("b")]).status == "ok"
    assert check([one(None, False), one(None, False)]).status == "ok"
    shared = check([one("a"), one("b"), one("a")])
    assert (shared.status, shared.observed) == ("failure", "ranks 0, 2 share a GPU")
    too_many = check([one("a"), one(None), one(None)])
    assert (too_many.status, too_many.observed) == ("failure", "ranks 1-2 without one")
    assert check([one("a"), one(None, False)]).status == "failure"


def test_clocks() -> None:
    def at(host: str, clock: float) -> RankFacts:
        return RankFacts(host=host, clock=clock)

    assert job.check_clocks([at("a", 1.0), at("a", 9.0)]) == []
    for clock, status in ((1.5, "ok"), (4.0, "warning")):
        (check,) = job.check_clocks([at("a", 1.0), at("b", clock)])
        assert check.status == status


# Three processes import torch, on a machine that may be busy.
@pytest.mark.timeout(180)
def test_under_torchrun() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, *launch, "-m", "cce_dist", "doctor", *SMALL, "--json", "-"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mesh"] == {"dp": 1, "pp": 1, "tp": 2}
    assert row("sum, tp 2", report)["status"] in ("ok", "warning")
