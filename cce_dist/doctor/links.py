"""Links between the ranks of a group, and figures of collectives over these links.

Figures are measured or published ones. For other links no time is expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cce_dist.doctor.facts import RankFacts

# A collective that takes more than this many times the expected time gets a warning.
TOO_SLOW = 2.0
HERE = "docs/guide/doctor.md#expected-figures"
ON_GPUS = (
    "look for other work on these GPUs, at the path that NCCL_DEBUG=INFO names, and at "
    "`nvidia-smi topo -m`"
)
ON_CORES = "look for other work on these cores"


@dataclass(frozen=True)
class Expected:
    """Figures of the collectives over a link.

    Args:
        bandwidth: bytes/s of the bus in a large collective, as nccl-tests define it.
        latency: seconds of a small collective, by number of ranks.
        source: origin of the figures.
        scattered: the bandwidth of a sum by reduce-scatter; None: `bandwidth`.
    """

    bandwidth: float
    latency: dict[int, float]
    source: str
    scattered: float | None = None


@dataclass(frozen=True)
class Link:
    """A link between the ranks of a group.

    Args:
        kind: a phrase for the report.
        expected: figures of such a link; None: there are none.
        advice: remedy for a link that is slower.
    """

    kind: str
    expected: Expected | None = None
    advice: str = ON_GPUS


# Figures of NVLink by the major compute capability, and the number of links between two GPUs.
NVLINK = {
    (8, 12): Expected(200e9, {}, "https://github.com/NVIDIA/nccl-tests/issues/149, and 178"),
    (9, 18): Expected(320e9, {2: 35e-6, 4: 77e-6}, f"2 and 4 H200s, {HERE}"),
}
# Gloo's reduce-scatter sums everything on every rank.
GLOO = Expected(0.8e9, {2: 0.5e-3}, f"2 ranks on 2 cores, {HERE}", scattered=0.1e9)


def link_of(members: Sequence[RankFacts], cores: int) -> Link:
    """Returns the link between the ranks of a group.

    Args:
        cores: number of this host's cores that this process may use.
    """
    hosts = {facts.host for facts in members}
    if len(hosts) > 1:
        return Link(f"the network between {len(hosts)} hosts")
    uuids = sorted(facts.gpu for facts in members if facts.gpu is not None)
    if len(uuids) < len(members):
        # With more ranks than cores, ranks wait for a core.
        expected = GLOO if len(members) <= cores else None
        return Link("gloo on one host", expected, ON_CORES)
    known = {(first, second): kind for first, second, kind in members[0].links}
    kinds = sorted({known.get(pair, "unknown") for pair in itertools.combinations(uuids, 2)})
    if "unknown" in kinds:
        return Link("GPUs of one host, their links unknown (no `nvidia-smi topo -m`)")
    if slow := [kind for kind in kinds if not kind.startswith("NV")]:
        return Link(f"PCIe between GPUs of one host ({', '.join(slow)})")
    if len(kinds) > 1:
        return Link(f"NVLink of several widths ({', '.join(kinds)})")
    count = int(kinds[0][2:]) if kinds[0][2:].isdigit() else 0
    majors = {facts.capability[0] for facts in members if facts.capability is not None}
    expected = NVLINK.get((majors.pop(), count)) if len(majors) == 1 else None
    return Link(f"NVLink, {count} links", expected)
