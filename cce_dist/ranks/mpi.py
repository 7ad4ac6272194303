"""The loss over MPI ranks, without torch.distributed: docs/guide/ranks.md.

    linear_cross_entropy(hidden, weight, targets, group=MPIGroup(comm))

The merge is one MPI all-reduce of N records, by our operator: log-add-exp.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)
# From the last line of a rank that fails to the end of the job.
UNTIL_READ_S = 0.5
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "log-add-exp all-reduce")
_GATHER, _REDUCE, _SCATTER, _MERGE = range(len(_KINDS))
_NUMBERS = 11
# Variables in which launchers give the number of ranks that they started.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# A waiting rank yields its core; after _SPIN_SECONDS it also sleeps, for _SLEEP_SECONDS at a time.
_SPIN_SECONDS, _SLEEP_SECONDS = 1e-3, 1e-4


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            "cce_dist.ranks.mpi needs mpi4py and an MPI library: pip install mpi4py, "
            f"and mpich from pip if the machine has no MPI of its own; got {error}"
        ) from error
    return MPI


class MPIGroup:
    """A group of MPI ranks, for `linear_cross_entropy` and other functions that take a group.

    Tensors are on the CPU. Before each collective the ranks compare its kind and its size, in an
    all-gather of 128 bytes a rank. If ranks disagree, all of them raise; they wait for a missing
    rank no longer than `timeout`. After either error the group cannot be used again.

    Args:
        comm: an intracommunicator, which is duplicated; None: MPI.COMM_WORLD. Keep the group and
            use it again: MPI has room for some thousand duplicates.
        timeout: seconds.
    Collectives: every rank of comm makes the group at the same time.
    Raises:
        ImportError: mpi4py, or an MPI library for it, is missing.
        ValueError: comm is no intracommunicator, or mpirun belongs to another MPI library.
    """

    device_type = "cpu"

    def __init__(self, comm: MPI.Comm | None = None, *, timeout: float = 1800.0) -> None:
        mpi = _mpi()
        intracomm: Any = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(intracomm, mpi.Intracomm) or intracomm == mpi.COMM_NULL:
            got = "COMM_NULL" if intracomm == mpi.COMM_NULL else type(intracomm)
            raise ValueError(f"comm must be an MPI.Intracomm with the calling rank, got {got}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, in seconds, got {timeout}")
        _require_its_launcher(mpi)
        self._comm = intracomm.Dup()
        # A rank must be able to report an error, whatever comm's error handler does.
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        self._timeout = timeout
        self._calls = 0
        self._lost = ""
        # Memory of a call that timed out, to which MPI may still write: kept while the job runs.
        self._pending: Any = None

    def rank(self) -> int:
        return self._comm.Get_rank()

    def size(self) -> int:
        return self._comm.Get_size()

    def free(self) -> None:
        """Gives back the duplicated communicator. Collectives: every rank calls it."""
        self._comm.Free()

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """See `transport.RankGroup`."""
        self._agree(_GATHER, tensor)
        self._run(self._comm.Allgather, _bytes_of(tensor), _bytes_of(out))

    def all_reduce(self, tensor: Tensor) -> None:
        """See `transport.RankGroup`."""
        self._agree(_REDUCE, tensor)
        self._run(self._comm.Allreduce, _mpi().IN_PLACE, _numbers_of(tensor))

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> None:
        """See `transport.RankGroup`."""
        self._agree(_SCATTER, tensor)
        self._run(self._comm.Reduce_scatter_block, _numbers_of(tensor), _numbers_of(out))

    def all_reduce_logaddexp(self, records: Tensor, numbers: Sequence[int] = ()) -> list[list[int]]:
        """See `transport.RankGroup`."""
        numbers_by_rank = self._agree(_MERGE, records, numbers)
        buffer = [_memory_of(records), len(records), record_type(records.dtype, records.shape[1])]
        operator = logaddexp_op(records.dtype)
        self._run(self._comm.Allreduce, _mpi().IN_PLACE, buffer, operator)
        return numbers_by_rank

    def _run(self, collective: Callable[..., None], *arguments: Any) -> None:
        """Runs a collective on which all ranks agree. MPI waits without a timeout."""
        try:
            collective(*arguments)
        except Exception as error:
            self._lost = f"{type(error).__name__}: {error}"
            raise

    def _agree(self, kind: int, tensor: Tensor, numbers: Sequence[int] = ()) -> list[list[int]]:
        """Gathers the collective that each rank is about to run, and its `numbers`."""
        if tensor.device.type != self.device_type:
            raise ValueError(f"tensors must be on the CPU with an MPIGroup, got {tensor.device}")
        assert tensor.is_contiguous()
        if self._lost or self._pending is not None:
            why = self._lost or "it was interrupted while it waited for other ranks"
            raise RuntimeError(f"this MPIGroup has failed before, make a new one: {why}")
        self._calls += 1
        columns = tensor.shape[1] if kind == _MERGE else 1
        call = [self._calls, kind, tensor.numel(), _DTYPES.index(tensor.dtype), columns]
        sent = [*call, *numbers] + [0] * (_NUMBERS - len(numbers))
        mine = torch.tensor(sent)
        everyone = torch.zeros(self.size(), len(sent), dtype=torch.int64)
        request = self._comm.Iallgather(_bytes_of(mine), _bytes_of(everyone))
        self._pending = request, mine, everyone
        self._wait(request, call)
        self._pending = None
        rows = everyone.tolist()
        if any(row[: len(call)] != call for row in rows):
            ranks = defaultdict(list)
            for rank, row in enumerate(rows):
                ranks[_described(row)].append(rank)
            got = "; ".join(f"{sorted(of_call)}: {call}" for call, of_call in ranks.items())
            self._lost = f"ranks must make the same calls in the same order, got by rank {got}"
            raise RuntimeError(f"{self._lost}. This is rank {self.rank()}")
        return [row[len(call) : len(call) + len(numbers)] for row in rows]

    def _wait(self, request: Any, call: Sequence[int]) -> None:
        begin = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - begin
            if waited > self._timeout:
                self._lost = (
                    f"rank {self.rank()} waited {self._timeout:g} s for the other ranks to come to "
                    + _described(call)
                )
                raise TimeoutError(self._lost)
            time.sleep(0 if waited < _SPIN_SECONDS else _SLEEP_SECONDS)


def _described(call: Sequence[int]) -> str:
    number, kind, numel, dtype, columns = call[:5]
    size = f"{numel // max(columns, 1)} records of {columns}" if kind == _MERGE else f"{numel}"
    return f"collective {number}, {_KINDS[kind]} of {size} {_DTYPES[dtype]}"


def _require_its_launcher(mpi: Any) -> None:
    """Refuses the mpirun of another MPI library: each of its ranks would have a world of 1 rank."""
    started = max(int(os.environ.get(name, "1")) for name in _SIZES)
    if started > 1 and mpi.COMM_WORLD.Get_size() == 1:
        library = mpi.Get_library_version().partition("\n")[0].strip("\0 ")
        raise ValueError(
            f"mpirun must be that of the MPI library in use, {library}, which knows 1 rank while "
            f"mpirun has started {started}: call mpirun by its path, or name the library to mpi4py "
            "by MPI4PY_MPIABI and MPI4PY_LIBMPI"
        )


def _memory_of(tensor: Tensor) -> Any:
    return _mpi().buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _bytes_of(tensor: Tensor) -> list[Any]:
    """Views a tensor of any dtype as bytes: MPI has no bf16."""
    return [_memory_of(tensor), _mpi().BYTE]


def _numbers_of(tensor: Tensor) -> list[Any]:
    return [_memory_of(tensor), _type_of(tensor.dtype)]


def _type_of(dtype: torch.dtype) -> Any:
    mpi = _mpi()
    types = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}
    if dtype not in types:
        raise ValueError(f"dtype must be float32 or float64 to be summed over MPI, got {dtype}")
    return types[dtype]


@functools.cache
def record_type(dtype: torch.dtype, num_fields: int) -> MPI.Datatype:
    """Makes one committed MPI element of `num_fields` numbers, so that MPI cuts no record."""
    return _type_of(dtype).Create_contiguous(num_fields).Commit()


@functools.cache
def logaddexp_op(dtype: torch.dtype = torch.float32) -> MPI.Op:
    """Makes a commutative MPI.Op that merges records (base, sum, others...): base + log sum by
    log-add-exp, the others by adding.

        comm.Allreduce(MPI.IN_PLACE, [records, N, record_type(torch.float32, 3)], logaddexp_op())

    The element must be `record_type(dtype, K)`, K >= 2, records contiguous [N, K]. (-inf, 0) is the
    log-sum-exp over no columns. NaN stays, and +inf merges to NaN. op(a, b) has the bits of
    op(b, a), so all ranks get the same wherever MPI combines the same parts.
    Source: docs/design/loss.md#online-merge.
    """
    itemsize = _type_of(dtype).Get_size()

    def merge(theirs: Any, ours: Any, datatype: Any) -> None:
        if not len(ours):
            return
        num_fields = datatype.Get_size() // itemsize
        a, b = (
            torch.frombuffer(memory, dtype=dtype).view(-1, num_fields) for memory in (theirs, ours)
        )
        b.copy_(merge_records(a, b))

    return _mpi().Op.Create(merge, commute=True)


def merge_records(a: Tensor, b: Tensor) -> Tensor:
    """Merges records [N, K] into records [N, K], as `logaddexp_op` describes."""
    # The rounding of an exponential must not depend on the sum's place in memory.
    a, b = a.t().contiguous(), b.t().contiguous()
    base = torch.maximum(a[0], b[0])
    finite = base.masked_fill(base == -torch.inf, 0)
    merged = a + b
    merged[0] = base
    merged[1] = a[1] * (a[0] - finite).exp() + b[1] * (b[0] - finite).exp()
    return merged.t()


@contextlib.contextmanager
def abort_on_exception(comm: MPI.Comm | None = None) -> Iterator[None]:
    """Ends the job, on all ranks, if the block or the decorated function raises.

    Without it, or `python -m mpi4py`, the other ranks would wait for the rank that has raised. The
    traceback is printed first. `sys.exit(0)` does not end the job.

    Args: comm: the communicator whose ranks end; None: MPI.COMM_WORLD.
    """
    mpi = _mpi()
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        rank = mpi.COMM_WORLD.Get_rank()
        sys.stderr.write(f"rank {rank} ends the job:\n{traceback.format_exc()}")
        sys.stdout.flush()
        sys.stderr.flush()
        # What mpirun has not read yet when it is told to end the job may be lost.
        time.sleep(UNTIL_READ_S)
        (comm or mpi.COMM_WORLD).Abort(1)
        raise
