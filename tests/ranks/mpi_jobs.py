"""What tests/ranks/test_mpi.py has MPI ranks do.

mpirun -n 4 python -m mpi4py tests/ranks/mpi_jobs.py FOLDER    every job, results in FOLDER
mpirun -n 2 python [-m mpi4py] tests/ranks/mpi_jobs.py FOLDER FAULT
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cce_dist import LinearCrossEntropy, VocabShard, linear_cross_entropy, token_logprobs
from cce_dist.pipeline.head import PipelineHead
from cce_dist.ranks.gather import gather_numbers
from cce_dist.ranks.mpi import MPIGroup, abort_on_exception
from cce_dist.testing import Case, gaussian_inputs, run_case, zipf_inputs
from tests.ranks.mpi_operator import VALUES, bits_of_every_size, by_mpi_alone, made, merged, reduced

WORLD_SIZES = (1, 2, 3, 4)
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2")
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "ranks.md"


# -- the loss -----------------------------------------------------------------------------------

UNEVEN = {
    1: ((0, 60),),
    2: ((0, 20), (20, 60)),
    3: ((0, 7), (7, 7), (7, 60)),
    4: ((0, 0), (0, 31), (31, 59), (59, 60)),
}


def cases(world: int) -> dict[str, Case]:
    given = gaussian_inputs(24, 60, 16, generator=made())
    weighted = given.with_options(made(5), "bias", "token_weight", "class_weight").ignoring(made(6))
    skewed = zipf_inputs((12, 16), 480, 24, generator=made())
    exact = {"gradient": "exact"}
    return {
        "exact": Case(given, exact),
        "filtered": Case(skewed, {"gradient": "filtered", "shift": 1}),
        "in_forward": Case(weighted, {"gradient": "in_forward", "label_smoothing": 0.1}),
        "in_forward_chunks": Case(
            gaussian_inputs(700, 60, 8, generator=made()),
            {"gradient": "in_forward", "reduction": "sum"},
        ),
        "sequence_parallel": Case(skewed, {"sequence_parallel": True}),
        "sequence_parallel_in_forward": Case(
            given, {"sequence_parallel": True, "gradient": "in_forward"}
        ),
        "stats": Case(
            weighted,
            {**exact, "stats": EVERY_STAT, "softcap": 5.0, "z_loss": 0.1},
            upstream={"lse": 0.5, "entropy": -0.25},
        ),
        "none": Case(weighted, {**exact, "reduction": "none", "label_smoothing": 0.2}),
        "uneven": Case(weighted, {**exact, "check_ranks": True}, bounds=UNEVEN[world]),
        "padded": Case(given, {"logit_scale": 0.5}, vocab_size=58, main_grad=True),
        "bf16": Case(zipf_inputs(96, 240, 24, generator=made(), dtype=torch.bfloat16), exact),
        "bf16_sequence_parallel": Case(
            zipf_inputs(96, 240, 24, generator=made(), dtype=torch.bfloat16),
            {"sequence_parallel": True},
        ),
        "float64": Case(
            gaussian_inputs(24, 60, 16, generator=made(), dtype=torch.float64), {**exact}
        ),
        "no_tokens": Case(gaussian_inputs(0, 60, 16, generator=made()), exact),
        "all_ignored": Case(given.ignoring(made(), 1.0), exact),
    }


CASE_NAMES = tuple(cases(1))


def twice(group: Any) -> bool:
    """Whether the filtered loss and its gradients have the same bits from run to run."""
    case = cases(group.size())["filtered"]
    one, other = run_case(group, case), run_case(group, case)
    return all(torch.equal(one[name], other[name]) for name in one)


def by_other_functions(group: Any) -> dict[str, Tensor]:
    """The module, and log-probabilities, beside dense logits."""
    inputs = gaussian_inputs(24, 60, 16, generator=made())
    rows = inputs.weight.chunk(group.size())[group.rank()]
    loss = LinearCrossEntropy(group=group)(inputs.hidden, rows, inputs.targets)
    scored = token_logprobs(inputs.hidden, rows, inputs.targets, group=group, entropy=True)
    logits = inputs.hidden @ inputs.weight.T
    logprobs = logits.log_softmax(1).gather(1, inputs.targets[:, None])[:, 0]
    return {
        "loss": loss - torch.nn.functional.cross_entropy(logits, inputs.targets),
        "logprobs": scored.logprobs - logprobs,
        "entropy": scored.entropy - torch.distributions.Categorical(logits=logits).entropy(),
    }


def not_a_number(group: Any) -> Tensor:
    """Losses [N] where a token's hidden, or a row that one rank holds, is NaN."""
    inputs = gaussian_inputs(24, 60, 16, generator=made())
    hidden = inputs.hidden.index_fill(0, torch.tensor([3]), torch.nan)
    rows = inputs.weight.chunk(group.size())[group.rank()]
    how: dict[str, Any] = {"group": group, "reduction": "none"}
    one = linear_cross_entropy(hidden, rows, inputs.targets, **how)
    if group.rank() == group.size() - 1:
        rows = torch.full_like(rows, torch.nan)
    return torch.stack([one, linear_cross_entropy(inputs.hidden, rows, inputs.targets, **how)])


class Counting:
    """A communicator that notes the names of the collectives that it is asked for."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name[0].isupper() and not name.startswith("Get"):
            self.names.append(name)
        return getattr(self._comm, name)


def collectives_of(group: Any, **options: Any) -> tuple[list[str], list[str]]:
    """Of a loss, and of its backward."""
    inputs = gaussian_inputs(24, 60, 16, generator=made(), dtype=torch.bfloat16)
    hidden = inputs.hidden.clone().requires_grad_()
    rows = inputs.weight.chunk(group.size())[group.rank()]
    group._comm = counting = Counting(group._comm)
    loss = linear_cross_entropy(hidden, rows, inputs.targets, group=group, **options)
    forward, counting.names = counting.names, []
    loss.backward()
    group._comm = counting._comm
    return forward, counting.names


def example(group: Any) -> dict[str, Any]:
    """Runs the example of docs/guide/ranks.md over MPI, on all ranks there are."""
    sources = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf8"), re.DOTALL)
    (code,) = (source for source in sources if "MPIGroup" in source)
    names: dict[str, Any] = {}
    exec(code, names)
    return {"loss": names["loss"].detach(), "size": names["group"].size(), "seen": names["seen"]}


# -- what goes wrong ----------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no refusal"


def arguments(group: Any) -> dict[str, Any]:
    inputs = gaussian_inputs(24, 60, 16, generator=made())
    rows = inputs.weight.chunk(group.size())[group.rank()]
    return {"hidden": inputs.hidden, "weight": rows, "targets": inputs.targets, "group": group}


def one_skips(group: Any) -> tuple[str, str]:
    """The last rank leaves a merge out and goes on; then whoever uses the group again."""
    given = arguments(group)

    def call() -> object:
        if group.rank() == group.size() - 1:
            return gather_numbers([1, 2, 3], group)
        return linear_cross_entropy(**given)

    return refusal(call), refusal(lambda: linear_cross_entropy(**given))


def one_has_fewer_tokens(group: Any) -> str:
    given = arguments(group)
    if group.rank() == 1:
        given |= {name: given[name][:5] for name in ("hidden", "targets")}
    return refusal(lambda: linear_cross_entropy(**given))


def one_has_another_option(group: Any) -> str:
    given = arguments(group) | {"check_ranks": True, "softcap": 2.0 if group.rank() else None}
    return refusal(lambda: linear_cross_entropy(**given))


def whole_head(group: Any) -> str:
    inputs = gaussian_inputs(24, 60, 16, generator=made())
    given = {"hidden": inputs.hidden, "weight": inputs.weight, "targets": inputs.targets}
    return refusal(lambda: linear_cross_entropy(**given, group=group))


def shards_overlap(group: Any) -> str:
    given = arguments(group) | {"vocab_shard": VocabShard(0, 60 // group.size(), 60)}
    return refusal(lambda: linear_cross_entropy(**given))


def refusals(group: Any) -> dict[str, str]:
    from mpi4py import MPI

    given = arguments(group)
    return {
        "raw": refusal(lambda: linear_cross_entropy(**given | {"group": MPI.COMM_WORLD})),
        "null": refusal(lambda: MPIGroup(MPI.COMM_NULL)),
        "type": refusal(lambda: MPIGroup("world")),  # pyright: ignore[reportArgumentType]
        "timeout": refusal(lambda: MPIGroup(timeout=0)),
        "pipeline": refusal(
            lambda: PipelineHead(given["weight"], group=group, hidden_shape=(24, 16))
        ),
        "device": refusal(lambda: group.all_reduce(torch.zeros(3, device="meta"))),
        "dtype": refusal(lambda: group.all_reduce(torch.zeros(3, dtype=torch.bfloat16))),
    }


def errors_return(_: Any) -> bool:
    """MPI's errors are raised, whatever the caller's communicator does with them."""
    from mpi4py import MPI

    comm = MPI.COMM_SELF.Dup()
    comm.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    group = MPIGroup(comm)
    try:
        group._comm.Send(bytearray(1), dest=7)
    except MPI.Exception:
        return True
    finally:
        group.free()
        comm.Free()
    return False


def leaves_in_order(_: Any) -> str:
    """`sys.exit()` is no failure."""
    try:
        with abort_on_exception():
            sys.exit()
    except SystemExit:
        return "still here"


# -- running them -------------------------------------------------------------------------------

Job = tuple[int, Callable[..., Any], tuple[Any, ...]]


def jobs() -> dict[str, Job]:
    """By name: on how many ranks, what, and its arguments besides the group."""
    found: dict[str, Job] = {"example": (4, example, ()), "operator": (4, by_mpi_alone, ())}
    for world in WORLD_SIZES:
        for name, values in VALUES.items():
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                found[f"reduce {name} {dtype} {world}"] = (world, reduced, (values.to(dtype),))
        for name in ("plain", "smooth", "entropy", "count"):
            found[f"merge {name} {world}"] = (world, merged, (name,))
        for dtype in (torch.float32, torch.float64):
            found[f"bits {dtype} {world}"] = (world, bits_of_every_size, (dtype,))
        for name, case in cases(world).items():
            found[f"case {name} {world}"] = (world, run_case, (case,))
    for job in (twice, by_other_functions, not_a_number, one_skips, shards_overlap, whole_head):
        found[job.__name__] = (3, job, ())
    for job in (errors_return, leaves_in_order):
        found[job.__name__] = (1, job, ())
    for job in (one_has_fewer_tokens, one_has_another_option, refusals, collectives_of):
        found[job.__name__] = (2, job, ())
    return found


def main(folder: Path) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    results: dict[str, Any] = {"library": MPI.Get_library_version(), "size": world.Get_size()}
    for name, (size, function, arguments_) in jobs().items():
        comm = world.Split(0 if world.Get_rank() < size else MPI.UNDEFINED)
        if comm == MPI.COMM_NULL:
            continue
        try:
            results[name] = function(MPIGroup(comm, timeout=20), *arguments_)
        except Exception as error:
            results[name] = error
    results["torch.distributed"] = torch.distributed.is_initialized()
    torch.save(results, folder / f"{world.Get_rank()}.pt")


class Failing(Counting):
    """Its rank fails when it comes to an all-reduce of what ranks have agreed on."""

    def __init__(self, comm: Any, folder: Path, fault: str) -> None:
        super().__init__(comm)
        self._folder, self._fault = folder, fault

    def Allreduce(self, *_: Any) -> None:
        (self._folder / "failed").touch()
        if self._fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("as if there were no more")


def fail(folder: Path, fault: str) -> None:
    """Rank 1 fails in the middle of the merge, or never comes to it."""
    linear_cross_entropy(**arguments(MPIGroup()))
    group = MPIGroup(timeout=1.0 if fault == "absent" else 60.0)
    if group.rank() == 1:
        group._comm = Failing(group._comm, folder, fault)
        if fault == "absent":
            (folder / "failed").touch()
            time.sleep(100)
    linear_cross_entropy(**arguments(group))


if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    elif sys.argv[2] == "absent":
        with abort_on_exception():
            fail(Path(sys.argv[1]), sys.argv[2])
    else:
        fail(Path(sys.argv[1]), sys.argv[2])
