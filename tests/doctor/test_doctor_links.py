"""Links between GPUs that the doctor reads, and its judgement of their figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cce_dist.doctor.collectives import Measured, judge
from cce_dist.doctor.facts import RankFacts, read_links
from cce_dist.doctor.links import Expected, Link, link_of

TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\tNODE\t0-31\t0
GPU1\tNV18\t X \tSYS\tNODE\t0-31\t0
GPU2\tPIX\tSYS\t X \tNODE\t0-31\t0
NIC0\tNODE\tNODE\tNODE\t X

Legend:

  X    = Self
"""


def test_read_links() -> None:
    links = read_links(TOPOLOGY, "0, GPU-c\n1, GPU-a\n2, GPU-b\n")
    assert links == {("a", "c"): "NV18", ("b", "c"): "PIX", ("a", "b"): "SYS"}
    assert read_links("", "") == {}


def member(gpu: str | None, **changes: Any) -> RankFacts:
    links = [("a", "b", "NV18"), ("a", "c", "NV18"), ("b", "c", "NV18"), ("a", "d", "PIX")]
    return replace(RankFacts(host="node1", gpu=gpu, capability=(9, 0), links=links), **changes)


@pytest.mark.parametrize(
    ("members", "kind", "expects"),
    [
        pytest.param([member("b"), member("a")], "NVLink, 18 links", True, id="nvlink"),
        pytest.param(
            [member(x, capability=(10, 0)) for x in "ab"], "NVLink, 18", False, id="unmeasured"
        ),
        pytest.param([member("a"), member("d")], "PCIe", False, id="pcie"),
        pytest.param([member("a"), member("z")], "unknown", False, id="unknown"),
        pytest.param([member("a"), member("b", host="node2")], "network", False, id="two hosts"),
        pytest.param([member(None), member(None)], "gloo", True, id="gloo"),
        pytest.param([member(None)] * 4, "gloo", False, id="more ranks than cores"),
    ],
)
def test_link_of(members: list[RankFacts], kind: str, expects: bool) -> None:
    link = link_of(members, cores=2)
    assert kind in link.kind
    assert (link.expected is not None) == expects


LINK = Link("a link", Expected(100e9, {2: 50e-6}, "somewhere"), "do this")


@pytest.mark.parametrize(
    ("seconds", "link", "bandwidth", "status", "expected"),
    [
        pytest.param(2e-3, LINK, None, "ok", 1.05e-3, id="within twice"),
        pytest.param(2.2e-3, LINK, None, "warning", 1.05e-3, id="slower"),
        pytest.param(2.2e-3, LINK, 30e9, "ok", 50e-6 + 1e8 / 30e9, id="as given"),
        pytest.param(9.0, Link("unknown"), None, "ok", None, id="nothing known"),
        pytest.param(
            2.3e-3,
            Link("another", Expected(100e9, {}, "somewhere")),
            None,
            "warning",
            1.1e-3,
            id="on top of the smallest",
        ),
    ],
)
def test_judge(
    seconds: float, link: Link, bandwidth: float | None, status: str, expected: float | None
) -> None:
    measured = Measured(lambda: None, lambda: True, 1e8, 1, "all-reduce")
    check = judge("sum", measured, 2, seconds, 1e-4, link, bandwidth)
    assert check.status == status
    assert check.numbers["expected_seconds"] == (pytest.approx(expected) if expected else None)
    assert check.numbers["bus_bytes_per_second"] == pytest.approx(1e8 / seconds)


def test_a_small_collective_has_no_figure_where_none_is_known() -> None:
    measured = Measured(lambda: None, lambda: True, 4.0, 1, "all-gather")
    link = Link("another", Expected(100e9, {}, "somewhere"))
    assert judge("latency", measured, 2, 1e-3, 1e-3, link, None).numbers["expected_seconds"] is None
