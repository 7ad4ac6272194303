"""All checks in order, on one rank or on every rank of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from cce_dist.distributed.launchers import rank_from_environment
from cce_dist.doctor.check import Check, across_ranks, first_line, guarded, worst
from cce_dist.doctor.clashes import check_clashes
from cce_dist.doctor.facts import Facts, RankFacts, gather_facts
from cce_dist.doctor.gpus import check_driver, check_gpus
from cce_dist.doctor.software import (
    check_hopper_forward,
    check_interpreter,
    check_megatron,
    check_mpi,
    check_nccl,
    check_numpy,
    check_python,
    check_torch,
    check_transformer_engine,
    check_triton,
)

if TYPE_CHECKING:
    import torch

    from cce_dist.doctor.ranks import Ranks

# A mode may take this long to compile, or to be interpreted; then the rank counts as hung.
LONGEST_TRIAL_S = 120.0
# A rank that waits too long raises an error that names the absent ranks. It is ended only if it has
# not raised after this much more time.
MARGIN_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of an examination.

    Args:
        tp: ranks that share the vocabulary; None: all that pp leaves.
        seconds: time of the numerics, after which no further mode starts; 0: no numerics.
        timeout: seconds that a rank may keep the others waiting.
        bandwidth: GB/s that the collectives' bus should reach; None: those of `links`.
    """

    tp: int | None = None
    pp: int = 1
    tokens: int = 8192
    dim: int = 2304
    vocab: int = 256000
    dtype: str = "bfloat16"
    sequence_parallel: bool = False
    seconds: float = 30.0
    timeout: float = 60.0
    bandwidth: float | None = None

    def mesh(self, size: int) -> tuple[int, int, int]:
        """Returns dp, pp, tp of `size` ranks.

        Raises:
            ValueError: pp x tp do not divide the ranks or, with sequence parallelism, the tokens.
        """
        from cce_dist.distributed import split_ranks

        dp, tp = split_ranks(size, tp=self.tp or "all", pp=self.pp, prefix="--")
        if self.sequence_parallel and self.tokens % (self.pp * tp):
            raise ValueError(
                f"--tokens must be a multiple of pp x tp with --sequence-parallel, got "
                f"{self.tokens} on {self.pp * tp} ranks"
            )
        return dp, self.pp, tp


@dataclass(frozen=True)
class Report:
    """The result of an examination.

    Args:
        checks: the rows, of all ranks together.
        by_rank: each rank's checks, before they were joined.
        mesh: dp, pp, tp; None: the ranks did not join.
    """

    rank: int
    size: int
    checks: Sequence[Check]
    by_rank: Sequence[Sequence[Check]] = ()
    hosts: Sequence[str] = ()
    mesh: tuple[int, int, int] | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return int(worst(self.checks) == "failure")

    def as_json(self) -> dict[str, Any]:
        mesh = None if self.mesh is None else dict(zip(("dp", "pp", "tp"), self.mesh, strict=True))
        return {
            "status": worst(self.checks),
            "exit_code": self.exit_code,
            "ranks": self.size,
            "hosts": list(self.hosts),
            "mesh": mesh,
            "versions": self.versions,
            "checks": [check.as_json() for check in self.checks],
            "by_rank": [[check.as_json() for check in checks] for checks in self.by_rank],
        }


def examine(request: Request) -> Report:
    """Makes all checks; a check comes after the checks that it depends on.

    Raises:
        ValueError: the request does not fit the ranks, or the launcher's variables are wrong.
    Collectives: all ranks of the job must call this.
    """
    torch_row = check_torch()
    facts = gather_facts(with_torch=torch_row.status == "ok")
    checks = [check_python(), torch_row]
    needs_torch = "torch is needed for it"
    local_checks: list[Callable[[], list[Check]]] = [
        lambda: [check_triton(needed=bool(facts.gpus))],
        lambda: [check_numpy(facts)],
        lambda: [check_driver(facts)],
        lambda: [
            check_gpus(facts)
            if torch_row.status == "ok"
            else Check(name="GPUs", status="skipped", observed=needs_torch)
        ],
        lambda: [row for row in [check_hopper_forward(facts)] if row is not None],
        lambda: [check_nccl(facts)],
        lambda: [check_interpreter(facts)],
        lambda: [check_megatron(facts)],
        lambda: [check_transformer_engine(facts)],
        lambda: [check_mpi(facts)],
        lambda: check_clashes(facts, request.pp),
    ]
    for function in local_checks:
        checks += guarded("an environment check", function)
    if torch_row.status != "ok":
        checks += [
            Check(name=name, status="skipped", observed=needs_torch)
            for name in ("numerics", "ranks")
        ]
        return Report(
            rank_from_environment(), 1, checks, hosts=[facts.host], versions=dict(facts.versions)
        )
    return _examine_ranks(request, facts, checks)


def _examine_ranks(request: Request, facts: Facts, checks: list[Check]) -> Report:
    from cce_dist.distributed.rendezvous import JoinError
    from cce_dist.doctor.ranks import join

    try:
        ranks = join(request.timeout, {f"--{name}": value for name, value in vars(request).items()})
    except JoinError as error:
        return _alone(rank_from_environment(), facts, checks, error)
    mesh = request.mesh(ranks.size)
    try:
        report = _with_ranks(request, facts, checks, ranks, mesh)
        ranks.leave()
    except Exception as error:
        return _alone(ranks.rank, facts, checks, error)
    return report


def _alone(rank: int, facts: Facts, checks: Sequence[Check], error: Exception) -> Report:
    """Returns the report of a rank that has no contact with the others."""
    row = Check(
        name="ranks",
        status="failure",
        observed=first_line(error),
        expected="all ranks, until the end",
        remedy="look at the output of the ranks named here; --timeout gives them longer",
    )
    return Report(rank, 1, [*checks, row], hosts=[facts.host], versions=dict(facts.versions))


def _with_ranks(
    request: Request, facts: Facts, checks: list[Check], ranks: Ranks, mesh: tuple[int, int, int]
) -> Report:
    from cce_dist.doctor import ranks as rank_checks

    # All ranks leave this wait together, and then read their clocks.
    ranks.share("the beginning", None)
    device = rank_checks.choose_device(ranks, facts)
    everyone = rank_checks.gather_rank_facts(ranks, facts, device)
    hosts = list(dict.fromkeys(member.host for member in everyone))
    mesh_row = _mesh_row(request, mesh, hosts, ranks.launch.launcher)
    joint = [mesh_row, rank_checks.check_devices(everyone), rank_checks.check_alike(everyone)]
    joint += [row for row in [rank_checks.check_clocks(everyone)] if row is not None]
    limit = request.seconds + LONGEST_TRIAL_S
    with rank_checks.ends_within(limit, ranks, "the numerics"):
        checks = checks + _numerics(request, facts)
    # Ranks may finish their numerics this far apart.
    patient = replace(ranks, timeout=request.timeout + limit)
    shared = patient.share("the numerics", [check.as_json() for check in checks])
    by_rank = [[Check.from_json(row) for row in rows] for rows in shared]
    joint += _collectives(request, ranks, mesh, device, everyone, joint)
    return Report(
        ranks.rank,
        ranks.size,
        [*across_ranks(by_rank), *joint],
        by_rank,
        hosts,
        mesh,
        dict(facts.versions),
    )


def _mesh_row(
    request: Request, mesh: tuple[int, int, int], hosts: Sequence[str], launcher: str
) -> Check:
    dp, pp, tp = mesh
    rows = -(-request.vocab // tp)
    over = f"{rows:,} of {request.vocab:,} classes a rank"
    if pp > 1:
        over += f", over the pipeline {-(-request.vocab // (pp * tp)):,}"
    size = dp * pp * tp
    shape = f"{size} rank{'s' * (size > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    if size > 1:
        shape += f" by {launcher}"
    shape += ", "
    return Check(name="mesh", status="ok", observed=f"{shape}dp {dp} x pp {pp} x tp {tp}: {over}")


def _numerics(request: Request, facts: Facts) -> list[Check]:
    if request.seconds == 0:
        return [Check(name="numerics", status="skipped", observed="left out by --seconds 0")]
    from cce_dist.doctor.numerics import check_numerics

    return guarded("numerics", check_numerics, facts, request.seconds)


def _collectives(
    request: Request,
    ranks: Ranks,
    mesh: tuple[int, int, int],
    device: torch.device,
    everyone: Sequence[RankFacts],
    joint: Sequence[Check],
) -> list[Check]:
    if ranks.size == 1:
        reason = "one rank has none: start this with torchrun to measure them"
        return [Check(name="collectives", status="skipped", observed=reason)]
    if any(row.name == "devices" and row.status == "failure" for row in joint):
        reason = "not without a GPU for each rank"
        return [Check(name="collectives", status="skipped", observed=reason)]
    from cce_dist.doctor import ranks as rank_checks
    from cce_dist.doctor.collectives import Job, check_collectives

    sizes = Job(
        tokens=request.tokens,
        dim=request.dim,
        dtype=request.dtype,
        tp=mesh[2],
        pp=mesh[1],
        sequence_parallel=request.sequence_parallel,
        bandwidth=None if request.bandwidth is None else 1e9 * request.bandwidth,
    )
    with rank_checks.ends_within(request.timeout + MARGIN_S, ranks, "the collectives"):
        return check_collectives(ranks, sizes, device, everyone)
