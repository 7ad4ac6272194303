"""Faults x phases on the training job: the message, its delay, the files left, the restart.

Two ranks, the vocabulary over both; docs/guide/faults.md is the table. Each test breaks one job a
phase, all of them at the same time, since they mostly wait. `pytest -rP` shows seconds and texts.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cce_dist.core.phases import watched_by
from cce_dist.testing.forks import fork_context
from cce_dist.train.checkpoint import Checkpoint, newest_checkpoint
from cce_dist.train.errors import ConfigError
from tests.support.faults import BEGINNING, Ending, Fault, Kind, finish_all, start_job
from tests.support.nodes import Node, two_nodes
from tests.support.torchrun import read_losses, run_agent, run_rank, write_config

pytestmark = pytest.mark.timeout(180)

TIMEOUT_S = 4.0
# docs/guide/faults.md promises that the last rank ends this soon after a fault.
BOUND_S = TIMEOUT_S + 30
STEPS, EVERY, AT = 6, 2, 4
MICROBATCHES = 4
# At each checkpoint the main rank flushes its tensors, their index, run.json and two folders to the
# disk. Before the first checkpoint it flushes a test file, to see that the folder can be written.
FLUSHES, PROBES = 5, 1
PHASES = ("forward", "merge", "backward", "reduce", "checkpoint")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "pp": {
        "pp": 2,
        "schedule": "vocab_1f1b",
        "vocab_over_pipeline": True,
        "microbatches": MICROBATCHES,
    },
}
LAYOUTS["served"] = {**LAYOUTS["pp"], "schedule": "1f1b"}


def number_of(phase: str, layout: str) -> int:
    """Returns the number of the phase in step AT; with microbatches, in its second microbatch."""
    if phase == "checkpoint":
        return AT // EVERY
    return AT if layout == "tp" else (AT - 1) * MICROBATCHES + 2


@dataclass(frozen=True)
class Reference:
    """A run without a fault, with all its checkpoints."""

    losses: list[float]
    checkpoints: Path


class Jobs:
    """Jobs on the same text, and a run of each layout without a fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The first run makes the tokenizer of all.
        self.references = {name: self._reference(name) for name in LAYOUTS}

    def config(self, name: str, layout: str, **changes: Any) -> Path:
        defaults = {
            "parallel": {"timeout_s": TIMEOUT_S, **LAYOUTS[layout]},
            "optimizer": {"lr": 0.01, "warmup": 3},
            "checkpoint": {"every": EVERY},
            "steps": STEPS,
        }
        return write_config(self.folder, name, defaults, **changes)

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _reference(self, layout: str) -> Reference:
        config = self.config(
            f"whole-{layout}", layout, parallel={"timeout_s": 60}, checkpoint={"keep": 9}
        )
        (ending,) = finish_all([start_job(2, config)], 60)
        assert ending.codes == [0, 0], ending.output
        run = self.folder / f"whole-{layout}"
        return Reference(read_losses(run), run / "checkpoints")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("faults"))


@dataclass(frozen=True)
class Scenario:
    fault: Fault
    layout: str = "tp"

    @property
    def name(self) -> str:
        fault = self.fault
        return f"{fault.kind}-{fault.phase}-{fault.number}-{self.layout}".replace(" ", "_")

    @property
    def leaves_more(self) -> bool:
        """True if the layout is no plain tp, or if the fault may leave a part of a checkpoint."""
        return self.layout != "tp" or self.fault.phase in ("merge", "checkpoint")


def scenarios(kind: Kind, *of_pipeline: str, phases: Sequence[str] = PHASES) -> list[Scenario]:
    both = [*((phase, "tp") for phase in phases), *((phase, "pp") for phase in of_pipeline)]
    return [Scenario(Fault(kind, phase, number_of(phase, at)), at) for phase, at in both]


def break_and_restart(
    jobs: Jobs, planned: list[Scenario], nodes: Sequence[Sequence[Node]] = ()
) -> list[Ending]:
    """Runs and restarts the jobs, checks the promises for every fault, and returns the endings."""
    places: Sequence[Sequence[Node]] = nodes or [()] * len(planned)
    configs = [jobs.config(each.name, each.layout) for each in planned]
    endings = finish_all(
        [
            start_job(2, config, fault=each.fault, nodes=at)
            for each, config, at in zip(planned, configs, places, strict=True)
        ],
        BOUND_S + 20,
    )
    for each, ending in zip(planned, endings, strict=True):
        assert all(ending.codes), (each, ending.codes, ending.output)
        assert max(ending.seconds) < BOUND_S, (each, ending.seconds)
        checkpoint = newest_checkpoint(jobs.folder / each.name / "checkpoints")
        assert checkpoint is not None and checkpoint.step == AT - EVERY, (each, ending.output)
        assert same_files(checkpoint, jobs.references[each.layout])
        # For docs/guide/faults.md, by pytest -rP.
        print(each.name, *(f"{seconds:.1f} s" for seconds in ending.seconds), *ending.messages)
    # Other faults leave the same files bit by bit, so their restart would be the same.
    restarted = [each for each in planned if each.fault.kind == "dies" or each.leaves_more]
    # The restart has a long timeout, so that it does not fail on a busy host.
    resumed = ("--resume", "--parallel.timeout_s", "60")
    again = finish_all([start_job(2, jobs.path(each.name), *resumed) for each in restarted], 90)
    for each, ending in zip(restarted, again, strict=True):
        assert ending.codes == [0, 0], (each, ending.output)
        assert f"after step {AT - EVERY}" in ending.output
        folder = jobs.folder / each.name
        assert read_losses(folder) == jobs.references[each.layout].losses, each
        assert not list(folder.glob("checkpoints/partial_*"))
    return endings


def same_files(checkpoint: Checkpoint, reference: Reference) -> bool:
    whole = reference.checkpoints / checkpoint.folder.name
    names = sorted(path.name for path in whole.glob("*.distcp"))
    assert len(names) == 2
    return all(
        (checkpoint.folder / name).read_bytes() == (whole / name).read_bytes() for name in names
    )


def place_of(scenario: Scenario) -> str:
    return f"step {AT} ({scenario.fault.phase})"


def test_a_rank_that_is_killed(jobs: Jobs) -> None:
    planned = scenarios("dies", "merge")
    for each, ending in zip(planned, break_and_restart(jobs, planned), strict=True):
        assert ending.codes == [1, -9]
        (message,) = ending.messages
        assert re.match(r"error: rank 1 \(pid \d+ on \S+\) has died; last seen in ", message)
        assert message.endswith(place_of(each))
        # torch writes its whole schedule where a pass fails.
        assert "Full Schedule" not in ending.output


def test_a_rank_that_is_stopped(jobs: Jobs) -> None:
    planned = scenarios("stops", "reduce")
    for each, ending in zip(planned, break_and_restart(jobs, planned), strict=True):
        # The survivor kills the stopped rank, which nobody else would end.
        assert ending.codes == [1, -9]
        (message,) = ending.messages
        assert "error: rank 1 (pid " in message and " has not responded for 4 s; " in message
        assert f"last seen in {place_of(each)}, stopped by a signal" in message


def test_a_rank_that_raises(jobs: Jobs) -> None:
    planned = scenarios("raises", "merge")
    # This error is on another thread than torch's schedule, which waits for the other rank.
    planned.append(Scenario(Fault("raises", "merge", number_of("merge", "pp")), "served"))
    for each, ending in zip(planned, break_and_restart(jobs, planned), strict=True):
        assert ending.codes == [1, 1]
        (message,) = ending.messages
        assert message == f"error: rank 1 failed in {place_of(each)}: PlantedError: planted"
        # torch's schedules raise another error from it.
        assert ending.output.count("Traceback") == (2 if each.layout == "served" else 1)


def test_a_disk_that_is_full(jobs: Jobs) -> None:
    """The disk of one rank is full at the second checkpoint."""
    planned = [
        Scenario(Fault("fills the disk", "checkpoint", AT // EVERY, rank), layout)
        for rank, layout in ((1, "tp"), (0, "pp"))
    ]
    for each, ending in zip(planned, break_and_restart(jobs, planned), strict=True):
        assert ending.codes == [1, 1]
        (message,) = ending.messages
        folder = jobs.folder / each.name / "checkpoints"
        start = f"error: the checkpoint of step {AT}, about "
        middle = f" could not be written in {folder}: File too large (rank {each.fault.rank}); "
        assert message.startswith(start) and middle in message, message
        assert " are free there. To do: free space" in message and "--resume" in message
        assert "Traceback" not in ending.output and "CheckpointException" not in ending.output


def test_a_disk_that_is_full_from_the_beginning(jobs: Jobs) -> None:
    """The job is refused before it trains a vocabulary, also if only one rank cannot write."""
    planned = [Scenario(Fault("fills the disk", BEGINNING, rank, rank)) for rank in (0, 1)]
    data = {"cache": str(jobs.folder / "other-cache")}
    configs = [
        jobs.config(each.name, "tp", data={**data, "vocab_size": 300 - each.fault.rank})
        for each in planned
    ]
    pairs = zip(configs, planned, strict=True)
    jobs_of = [start_job(2, config, fault=each.fault) for config, each in pairs]
    for each, ending in zip(planned, finish_all(jobs_of, 60), strict=True):
        assert all(ending.codes) and ending.codes[each.fault.rank] == 2, ending.output
        (message,) = ending.messages
        assert "run.out must be in a folder that can be written, got " in message
        assert "Traceback" not in ending.output
        if each.fault.rank == 0:
            assert "training a byte-level BPE" not in ending.output


@pytest.fixture
def nodes() -> Iterator[list[tuple[Node, Node]]]:
    with ExitStack() as stack:
        try:
            yield [stack.enter_context(two_nodes()) for _ in range(len(PHASES) + 1)]
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")


def test_a_link_that_goes_down(jobs: Jobs, nodes: list[tuple[Node, Node]]) -> None:
    planned = scenarios("loses its link", "merge")
    for each, ending in zip(planned, break_and_restart(jobs, planned, nodes), strict=True):
        assert ending.codes == [1, 1]
        # Each side knows only that it does not hear the other side.
        first, second = sorted(ending.messages)
        assert "error: rank 1 (pid " in first and "has not responded for 4 s" in first
        assert f", while this rank is in step {AT} (" in first and "not on this host" in first
        assert second.startswith("error: rank 1: rank 0, which holds the store, has died, or the ")
        # In the backward no rank waits for another. In the merge this rank may go on, if the other
        # rank's message came before the link went down.
        phases = {"backward": ("reduce",), "merge": ("merge", "reduce")}.get(each.fault.phase)
        phases = phases or (each.fault.phase,)
        assert second.endswith(tuple(f"this rank is in step {AT} ({phase})" for phase in phases))


def test_a_rank_that_skips(jobs: Jobs) -> None:
    planned = scenarios("skips", phases=("forward", "merge", "reduce", "checkpoint"))
    number = number_of("merge", "pp")
    planned.append(Scenario(Fault("skips", "pipelined merge", number), "pp"))
    # The skipped step is not before a checkpoint: ranks meet in the updates of different steps.
    planned.append(Scenario(Fault("skips", "step", AT - 1)))
    for each, ending in zip(planned, break_and_restart(jobs, planned), strict=True):
        assert ending.codes == [1, 1]
        (message,) = ending.messages
        if each.fault.phase == "step":
            assert message.endswith(f"must be in the same step, got by rank: [{AT - 1}, {AT}]")
            continue
        if each.fault.phase == "forward":
            # The skipped collective, of the embedding, is no phase: the message names both ranks.
            assert f"step {AT} (forward)" in message and f"step {AT} (merge)" in message
            assert "rank 0 " in message and "rank 1 " in message
            continue
        what = each.fault.phase.removeprefix("pipelined ")
        assert message.startswith(f"error: rank 1 has skipped a {what}: it is in step "), message
        assert f"while rank 0 is in step {AT} (" in message


def test_the_main_rank_is_killed(jobs: Jobs) -> None:
    """The main rank is killed after each file of its second checkpoint."""
    before = PROBES + FLUSHES
    planned = [Scenario(Fault("dies", "fsync", before + number, rank=0)) for number in (1, 2, 3)]
    for ending in break_and_restart(jobs, planned):
        assert ending.codes == [-9, 1]
        (message,) = ending.messages
        assert message.startswith("error: rank 0 (pid ") and " has died; " in message
        assert message.endswith(f"step {AT} (checkpoint)")


def test_the_rank_that_holds_the_store_is_killed(jobs: Jobs) -> None:
    """A rank holds the store under mpirun and srun."""
    config = jobs.config("holder", "tp")
    fault = Fault("dies", "merge", AT, rank=0)
    (ending,) = finish_all([start_job(2, config, fault=fault, by_launcher=False)], BOUND_S)
    assert ending.codes == [-9, 1]
    (message,) = ending.messages
    assert message.startswith("error: rank 0 (pid ") and " has died; " in message
    assert message.endswith(f"step {AT} (merge)")
    # At the end of a whole run no rank takes the holder's leaving for a death.
    (ending,) = finish_all([start_job(2, config, "--resume", by_launcher=False)], 60)
    assert ending.codes == [0, 0], ending.output
    assert read_losses(jobs.folder / "holder") == jobs.references["tp"].losses
    assert not ending.messages


class Killer:
    """A watcher that kills rank 1 in a merge of the first attempt."""

    count = 0

    def enter(self, phase: str, begins: bool) -> None:
        self.count += phase == "forward"
        if self.count == AT and phase == "merge" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, phase: str, error: BaseException | None) -> None:
        pass


def run_faulty(arguments: tuple[str, ...]) -> None:
    """Runs a rank that torchrun's agent has started; rank 1 dies in the first attempt."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with watched_by(Killer()) if first else nullcontext():
        run_rank(arguments)


def test_torchrun_restarts(jobs: Jobs) -> None:
    """The restart has the same command, without --resume, and the failed attempt's store."""
    config, output = jobs.config("restarted", "tp"), jobs.folder / "restarted.out"
    settings = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "max_restarts": 1}
    arguments = (settings, ("train", str(config)), output)
    agent = fork_context().Process(target=run_agent, args=arguments, kwargs={"run": run_faulty})
    agent.start()
    agent.join(120)
    said = output.read_text()
    assert agent.exitcode == 0, said
    assert re.search(rf"rank 1 .* has died; last seen in step {AT} \(merge\)", said)
    assert f"resuming {jobs.folder}/restarted after step {AT - EVERY}" in said
    assert read_losses(jobs.folder / "restarted") == jobs.references["tp"].losses
    assert not list(jobs.folder.glob("restarted.previous-*"))


def test_a_checkpoint_that_lost_a_part_is_refused(jobs: Jobs) -> None:
    folder = jobs.folder / "lost" / "checkpoints"
    shutil.copytree(jobs.references["tp"].checkpoints, folder)
    newest = newest_checkpoint(folder)
    assert newest is not None and newest.step == STEPS
    part = newest.folder / "__1_0.distcp"
    size = part.stat().st_size
    os.truncate(part, size - 1)
    rule = rf"must have the file __1_0\.distcp of {size} bytes, got {size - 1} bytes: .* remove"
    with pytest.raises(ConfigError, match=rule):
        newest_checkpoint(folder)
    part.unlink()
    with pytest.raises(ConfigError, match=r"got none: restore"):
        newest_checkpoint(folder)
    shutil.rmtree(newest.folder)
    before = newest_checkpoint(folder)
    assert before is not None and before.step == STEPS - EVERY
