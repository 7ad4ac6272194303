"""The arguments and the result of an examination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cce_dist.doctor.check import Check, worst


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of an examination.

    Args:
        tp: ranks that share the vocabulary; None: all that pp leaves.
        tokens, dim, vocab, dtype: sizes and dtype of the loss whose collectives are measured.
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
    versions: Mapping[str, str] = field(default_factory=dict)

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
            "versions": dict(self.versions),
            "checks": [check.as_json() for check in self.checks],
            "by_rank": [[check.as_json() for check in checks] for checks in self.by_rank],
        }
