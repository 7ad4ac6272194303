"""The loss over MPI ranks: one job of four ranks does all of mpi_jobs.py, and three jobs end
by a failure. With the MPI library that pip installs, and Open MPI where it is there."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import linear_cross_entropy
from cce_dist.ranks import mpi
from cce_dist.testing import check_outputs, join_ranks, run_case, shared_pool
from tests.ranks.mpi_jobs import CASE_NAMES, WORLD_SIZES, cases, jobs
from tests.ranks.mpi_operator import LARGE, SIZES, VALUES, merged, parts_of

JOBS = Path(__file__).with_name("mpi_jobs.py")
# The mpirun of an Open MPI; its library is looked for beside it.
OPEN_MPI = "CCE_DIST_OPENMPI"
INF = torch.inf
pytestmark = pytest.mark.timeout(250)


def open_mpi() -> str | None:
    return os.environ.get(OPEN_MPI) or shutil.which("mpirun.openmpi")


LAUNCHERS = ("mpich", "openmpi") if open_mpi() else ("mpich",)


def command(launcher: str, num_ranks: int) -> tuple[list[str], dict[str, str]]:
    """mpirun with its arguments, and the environment that it needs."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if launcher == "mpich":
        # More ranks than cores: one that waits is not to keep others from working.
        environment["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
        mpirun = Path(sys.executable).with_name("mpirun")
        assert mpirun.exists(), "needs the test extra: pip install mpi4py mpich"
        return [str(mpirun), "-n", str(num_ranks)], environment
    mpirun = open_mpi()
    assert mpirun is not None
    library = Path(mpirun).resolve().parent.parent / "lib" / "libmpi.so.40"
    environment |= {
        "MPI4PY_MPIABI": "openmpi",
        "MPI4PY_LIBMPI": str(library) if library.exists() else library.name,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    return [mpirun, "--oversubscribe", "-n", str(num_ranks)], environment


def mpirun(launcher: str, num_ranks: int, *arguments: str, timeout: float) -> tuple[int, str]:
    """Exit status and all output; a job that takes longer is ended, and the test fails."""
    start, environment = command(launcher, num_ranks)
    job = subprocess.Popen(
        [*start, sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # It ends its ranks first.
        job.terminate()
        try:
            output, _ = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
        pytest.fail(f"the job did not end within {timeout} s:\n{output}")
    return job.returncode, output


class Results:
    """What every rank has found in every job."""

    def __init__(self, by_rank: Sequence[dict[str, Any]]) -> None:
        self.by_rank = by_rank

    def of(self, name: str) -> list[Any]:
        """By rank, of those that did the job."""
        found = [results[name] for results in self.by_rank if name in results]
        assert found, name
        for rank, result in enumerate(found):
            assert not isinstance(result, Exception), f"{name}, rank {rank}: {result!r}"
        return found


@pytest.fixture(scope="module", params=LAUNCHERS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("mpi")
    arguments = ("-m", "mpi4py", str(JOBS), str(folder))
    status, output = mpirun(request.param, 4, *arguments, timeout=200)
    assert status == 0, output
    return Results([torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)])


def test_open_mpi_is_tested_too() -> None:
    if open_mpi() is None:
        pytest.skip(f"no mpirun.openmpi; {OPEN_MPI} may name Open MPI's mpirun")


def test_every_job_was_done(results: Results) -> None:
    for name, (size, _, _) in jobs().items():
        assert len(results.of(name)) == size, name
    for rank, found in enumerate(results.by_rank):
        assert found["size"] == 4, f"rank {rank} believes that there are others: {found['library']}"
        assert not found["torch.distributed"]


# -- the operator -------------------------------------------------------------------------------


def require_same_bits(found: Sequence[Tensor]) -> None:
    for other in found:
        assert torch.equal(other.nan_to_num(nan=1e38), found[0].nan_to_num(nan=1e38))
        assert torch.equal(other.isnan(), found[0].isnan())


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_all_reduce_logaddexp(results: Results, dtype: torch.dtype, values: str) -> None:
    for size in WORLD_SIZES:
        found = results.of(f"reduce {values} {dtype} {size}")
        golden = VALUES[values].to(dtype)[:size].double().logsumexp(0)
        assert found[0].dtype == dtype and found[0].shape == golden.shape
        torch.testing.assert_close(
            found[0].double(),
            golden,
            rtol=4 * torch.finfo(dtype).eps,
            atol=2 * torch.finfo(dtype).eps,
            equal_nan=True,
        )
        require_same_bits(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merge_has_the_same_bits_whatever_the_size(results: Results, dtype: torch.dtype) -> None:
    sizes = {*SIZES, LARGE} if dtype == torch.float32 else set(SIZES)
    for size in WORLD_SIZES:
        found = results.of(f"bits {dtype} {size}")
        for num_tokens in sizes:
            digests = {rank[num_tokens][0] for rank in found}
            assert len(digests) == 1, f"{num_tokens} tokens differ between {size} ranks"
            # An lse of 128 is the largest.
            assert found[0][num_tokens][1] <= 4 * 128 * torch.finfo(dtype).eps
        assert {len(rank) for rank in found} == {len(sizes)}


@pytest.mark.parametrize("name", ["plain", "smooth", "entropy", "count"])
def test_merge_stats_as_over_gloo(results: Results, name: str) -> None:
    parts = parts_of(64, torch.float32)
    for size in WORLD_SIZES:
        found = results.of(f"merge {name} {size}")
        expected = shared_pool().run(size, merged, name)[0]
        assert found[0].keys() == expected.keys()
        for field, values in found[0].items():
            require_same_bits([rank[field] for rank in found])
            torch.testing.assert_close(
                values, expected[field], rtol=5e-7, atol=1e-6, equal_nan=True
            )
        golden = parts.lse[:size].double().logsumexp(0)
        if name == "count":
            golden[50:] = 0
        torch.testing.assert_close(found[0]["lse"].double(), golden, rtol=5e-7, atol=1e-6)


def test_logaddexp_op_on_the_callers_own_communicator(results: Results) -> None:
    parts = parts_of(1000, torch.float64)
    golden = torch.stack([parts.lse.logsumexp(0), parts.target_logit.sum(0)])
    found = results.of("operator")
    torch.testing.assert_close(found[0], golden, rtol=1e-14, atol=1e-14)
    require_same_bits(found)


def records(seed: int) -> Tensor:
    """Bases of every kind, with sums that fit them."""
    generator = torch.Generator().manual_seed(seed)
    bases = torch.tensor([-INF, -0.0, 0.0, 1.0, -200.0, 3e38, -3e38, 1e-40])
    base = bases[torch.randint(len(bases), (5000,), generator=generator)]
    near = 9 * torch.randn(5000, generator=generator)
    base = torch.where(torch.rand(5000, generator=generator) < 0.5, base, near)
    total = (base != -INF).float() * (1 + 3 * torch.rand(5000, generator=generator))
    return torch.stack([base, total, torch.randn(5000, generator=generator)], 1)


def test_merge_records_has_the_same_bits_either_way() -> None:
    one, other = records(0), records(1)
    nothing = [rows[:, 0] == -INF for rows in (one, other)]
    assert (nothing[0] & nothing[1]).any() and (nothing[0] & ~nothing[1]).any()
    there, back = mpi.merge_records(one, other), mpi.merge_records(other, one)
    assert torch.equal(there, back) and not there.isnan().any()
    of_nothing = torch.tensor([-INF, 0, 0]).expand_as(one)
    assert torch.equal(mpi.merge_records(one, of_nothing), one)


def test_merge_records_keeps_what_is_not_a_number() -> None:
    good, bad = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[torch.nan, 1.0, 0.0]])
    for pair in ((good, bad), (bad, good)):
        assert mpi.merge_records(*pair)[0, :2].isnan().all()


# -- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASE_NAMES)
def test_linear_cross_entropy(results: Results, name: str) -> None:
    for size in WORLD_SIZES:
        case = cases(size)[name]
        joined = join_ranks(case, results.of(f"case {name} {size}"))
        check_outputs(case, joined)
        if size not in (2, 4):
            continue
        gloo = join_ranks(case, shared_pool().run(size, run_case, case))
        assert joined.keys() == gloo.keys()
        for output, values in joined.items():
            unit = 16 * torch.finfo(values.dtype).eps if values.is_floating_point() else 0
            largest = float(gloo[output].abs().max()) if values.numel() and unit else 0
            torch.testing.assert_close(values, gloo[output], rtol=unit, atol=unit * largest)


def test_the_merge_is_one_all_reduce(results: Results) -> None:
    agree, bf16 = ["Iallgather"], ["Reduce_scatter_block", "Iallgather", "Allgather"]
    for forward, backward in results.of("collectives_of"):
        assert forward == [*agree, "Allreduce"]
        assert backward == [*agree, *bf16]


def test_the_same_bits_from_run_to_run(results: Results) -> None:
    assert results.of("twice") == [True] * 3


def test_other_functions(results: Results) -> None:
    for found in results.of("by_other_functions"):
        for name, difference in found.items():
            assert difference.abs().max() < 5e-6, name


def test_not_a_number_reaches_every_rank(results: Results) -> None:
    for token, rank in results.of("not_a_number"):
        assert token.isnan().nonzero().flatten().tolist() == [3]
        assert rank.isnan().all()


def test_the_example(results: Results) -> None:
    for found in results.of("example"):
        assert found["size"] == 4 and len(found["seen"]) == 2
        assert found["loss"].isfinite() and found == results.of("example")[0]


# -- what goes wrong ----------------------------------------------------------------------------


def test_a_skipped_merge_is_told_to_all(results: Results) -> None:
    for rank, (message, again) in enumerate(results.of("one_skips")):
        assert message == (
            "RuntimeError: ranks must make the same calls in the same order, got by rank [0, 1]: "
            "collective 1, log-add-exp all-reduce of 24 records of 3 torch.float32; [2]: "
            f"collective 1, all-gather of 3 torch.int64. This is rank {rank}"
        )
        assert again.startswith("RuntimeError: this MPIGroup has failed before, make a new one: ")


def test_merges_of_different_sizes_are_told_to_all(results: Results) -> None:
    for message in results.of("one_has_fewer_tokens"):
        assert "[0]: collective 1, log-add-exp all-reduce of 24 records of 3" in message
        assert "[1]: collective 1, log-add-exp all-reduce of 5 records of 3" in message


def test_check_ranks(results: Results) -> None:
    for message in results.of("one_has_another_option"):
        assert "got different softcap by rank: [0] | [1]" in message


def test_a_whole_head_on_every_rank(results: Results) -> None:
    for message in results.of("whole_head"):
        assert "a whole head on each of them counts 3 times" in message, message


def test_shards_that_overlap(results: Results) -> None:
    for message in results.of("shards_overlap"):
        assert "ValueError: vocab_shard of the ranks must tile" in message
        assert "[(0, 20, 60), (0, 20, 60), (0, 20, 60)]" in message


def test_refusals(results: Results) -> None:
    expected = {
        "raw": "ValueError: group must be cce_dist.ranks.mpi.MPIGroup(comm) to run over MPI",
        "null": "ValueError: comm must be an MPI.Intracomm with the calling rank, got COMM_NULL",
        "type": "ValueError: comm must be an MPI.Intracomm with the calling rank, got <class 'str'",
        "timeout": "ValueError: timeout must be positive, in seconds, got 0",
        "pipeline": "ValueError: group must be a ProcessGroup of a pipeline, got <class 'cce_dist",
        "device": "ValueError: tensors must be on the CPU with an MPIGroup, got meta",
        "dtype": "ValueError: dtype must be float32 or float64 to be summed over MPI, got torch.b",
    }
    for found in results.of("refusals"):
        assert found.keys() == expected.keys()
        for name, message in found.items():
            assert message.startswith(expected[name]), message


def test_errors_of_mpi_are_raised(results: Results) -> None:
    assert results.of("errors_return") == [True]
    assert results.of("leaves_in_order") == ["still here"]


FAULTS = {
    "exception": "MemoryError: as if there were no more",
    "killed": "",
    "absent": "TimeoutError: rank 0 waited 1 s for the other ranks to come to collective 1, "
    "log-add-exp all-reduce of 24 records of 3 torch.float32",
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_ends_the_job(fault: str, launcher: str, tmp_path: Path) -> None:
    # "absent" is started without it, and asks for the end of the job itself.
    runner = () if fault == "absent" else ("-m", "mpi4py")
    status, output = mpirun(launcher, 2, *runner, str(JOBS), str(tmp_path), fault, timeout=90)
    seconds = time.time() - (tmp_path / "failed").stat().st_mtime
    assert status != 0
    assert FAULTS[fault] in output
    assert seconds < 15, output


# -- without MPI --------------------------------------------------------------------------------


def test_mpi4py_is_imported_when_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for call in (mpi.MPIGroup, functools.partial(mpi.logaddexp_op, torch.float64)):
        with pytest.raises(ImportError, match=r"needs mpi4py.*pip install mpi4py, and mpich"):
            call()


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_an_mpirun_of_another_library_is_refused(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(Get_size=lambda: 1),
        Get_library_version=lambda: "MPICH Version: 5\nmore",
    )
    mpi._require_its_launcher(alone)
    monkeypatch.setenv(variable, "4")
    with pytest.raises(ValueError, match=r"MPICH Version: 5, which knows 1 rank.*started 4"):
        mpi._require_its_launcher(alone)


class OnGpus:
    """As much of a `RankGroup` as a check of devices looks at."""

    device_type = "cuda"
    rank = size = all_gather = all_reduce = reduce_scatter = all_reduce_logaddexp = min


def test_tensors_elsewhere_are_refused() -> None:
    hidden, weight, targets = torch.ones(4, 8), torch.ones(10, 8), torch.tensor([0, 1, 2, 3])
    group: Any = OnGpus()
    with pytest.raises(ValueError, match=r"hidden must be on the cuda with group=OnGpus.*got cpu"):
        linear_cross_entropy(hidden, weight, targets, group=group)
