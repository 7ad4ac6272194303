"""All checks in order, on one rank or on every rank of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cce_dist.distributed.launchers import rank_from_environment
from cce_dist.doctor import gpus, software
from cce_dist.doctor.check import Check, across_ranks, guarded
from cce_dist.doctor.clashes import check_clashes
from cce_dist.doctor.facts import Facts, RankFacts, gather_facts
from cce_dist.doctor.report import Report, Request
from cce_dist.train.errors import first_line

if TYPE_CHECKING:
    import torch

    from cce_dist.doctor.ranks import Ranks

# A mode may take this long to compile, or to be interpreted; then the rank counts as hung.
LONGEST_TRIAL_S = 120.0
# A rank that waits too long raises an error that names the absent ranks. It is ended only if it has
# not raised after this much more time.
MARGIN_S = 15.0
NEEDS_TORCH = "torch is needed for it"


def examine(request: Request) -> Report:
    """Makes all checks; a check comes after the checks that it depends on.

    Raises:
        ValueError: the request does not fit the ranks, or the launcher's variables are wrong.
    Collectives: all ranks of the job must call this.
    """
    torch_row = software.check_torch()
    has_torch = torch_row.status == "ok"
    facts = gather_facts(with_torch=has_torch)
    checks = [software.check_python(), torch_row]
    for check in (
        software.check_triton,
        software.check_numpy,
        gpus.check_driver,
        gpus.check_gpus if has_torch else lambda _: Check("GPUs", "skipped", NEEDS_TORCH),
        software.check_hopper_forward,
        software.check_nccl,
        software.check_interpreter,
        software.check_megatron,
        software.check_transformer_engine,
        software.check_mpi,
        lambda facts: check_clashes(facts, request.pp),
    ):
        checks += guarded("an environment check", check, facts)
    if has_torch:
        return _examine_ranks(request, facts, checks)
    checks += [Check(name, "skipped", NEEDS_TORCH) for name in ("numerics", "ranks")]
    return _alone(rank_from_environment(), facts, checks)


def _examine_ranks(request: Request, facts: Facts, checks: list[Check]) -> Report:
    from cce_dist.distributed.rendezvous import JoinError
    from cce_dist.doctor.ranks import join

    try:
        ranks = join(request.timeout, {f"--{name}": value for name, value in vars(request).items()})
    except JoinError as error:
        return _alone(rank_from_environment(), facts, [*checks, _lost(error)])
    mesh = request.mesh(ranks.size)
    try:
        report = _with_ranks(request, facts, checks, ranks, mesh)
        ranks.leave()
    except Exception as error:
        return _alone(ranks.rank, facts, [*checks, _lost(error)])
    return report


def _alone(rank: int, facts: Facts, checks: Sequence[Check]) -> Report:
    """Returns the report of a rank that has no contact with the others."""
    return Report(rank, 1, checks, hosts=[facts.host], versions=facts.versions)


def _lost(error: Exception) -> Check:
    remedy = "look at the output of the ranks named here; --timeout gives them longer"
    expected = "all ranks, until the end"
    return Check("ranks", "failure", first_line(error), expected=expected, remedy=remedy)


def _with_ranks(
    request: Request, facts: Facts, checks: list[Check], ranks: Ranks, mesh: tuple[int, int, int]
) -> Report:
    from cce_dist.doctor import ranks as rank_checks

    # All ranks leave this wait together, and then read their clocks.
    ranks.share("the beginning", None)
    device = rank_checks.choose_device(ranks, facts)
    everyone = rank_checks.gather_rank_facts(ranks, facts, device)
    hosts = list(dict.fromkeys(member.host for member in everyone))
    devices = rank_checks.check_devices(everyone)
    joint = [_mesh_row(request, mesh, hosts, ranks.launch.launcher), devices]
    joint += [rank_checks.check_alike(everyone), *rank_checks.check_clocks(everyone)]
    limit = request.seconds + LONGEST_TRIAL_S
    with rank_checks.ends_within(limit, ranks, "the numerics"):
        checks = checks + _numerics(request, facts)
    # Ranks may finish their numerics this far apart.
    patient = replace(ranks, timeout=request.timeout + limit)
    shared = patient.share("the numerics", [check.as_json() for check in checks])
    by_rank = [[Check.from_json(row) for row in rows] for rows in shared]
    if ranks.size > 1 and devices.status == "failure":
        joint.append(Check("collectives", "skipped", "not without a GPU for each rank"))
    else:
        joint += _collectives(request, ranks, device, everyone)
    rows = [*across_ranks(by_rank), *joint]
    return Report(ranks.rank, ranks.size, rows, by_rank, hosts, mesh, facts.versions)


def _mesh_row(
    request: Request, mesh: tuple[int, int, int], hosts: Sequence[str], launcher: str
) -> Check:
    dp, pp, tp = mesh
    over = f"{-(-request.vocab // tp):,} of {request.vocab:,} classes a rank"
    if pp > 1:
        over += f", over the pipeline {-(-request.vocab // (pp * tp)):,}"
    size = dp * pp * tp
    shape = f"{size} rank{'s' * (size > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    if size > 1:
        shape += f" by {launcher}"
    return Check("mesh", "ok", f"{shape}, dp {dp} x pp {pp} x tp {tp}: {over}")


def _numerics(request: Request, facts: Facts) -> list[Check]:
    if request.seconds == 0:
        return [Check("numerics", "skipped", "left out by --seconds 0")]
    from cce_dist.doctor.numerics import check_numerics

    return guarded("numerics", check_numerics, facts, request.seconds)


def _collectives(
    request: Request, ranks: Ranks, device: torch.device, everyone: Sequence[RankFacts]
) -> list[Check]:
    if ranks.size == 1:
        reason = "one rank has none: start this with torchrun to measure them"
        return [Check("collectives", "skipped", reason)]
    from cce_dist.doctor.collectives import check_collectives
    from cce_dist.doctor.ranks import ends_within

    with ends_within(request.timeout + MARGIN_S, ranks, "the collectives"):
        return check_collectives(ranks, request, device, everyone)
