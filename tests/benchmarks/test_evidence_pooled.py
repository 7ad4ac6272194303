"""Runs that differ in their vocabulary alone are taken together, and no others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.evidence.convergence import ALL, Pool, pools_of
from benchmarks.evidence.records import Record
from benchmarks.evidence.report import page_of
from tests.benchmarks.evidence_records import STEPS, convergence

END = STEPS[-1]


def shifted(record: Record, method: str, nats: float, wobble: float = 0.0) -> Record:
    """Where all held-out tokens' loss of a method is `nats` more, and `wobble` times the seed."""
    rows = tuple(
        {**row, ALL: float(row[ALL] or 0) + nats + wobble * float(row["seed"] or 0)}
        if row["part"] == "curve" and row["method"] == method
        else row
        for row in record.rows
    )
    return replace(record, rows=rows)


def two(method: str, *nats: float, wobble: float = 0.0) -> list[Record]:
    """A record for each vocabulary, in which a method is so much worse."""
    made = []
    for vocab, more in zip((32768, 65536), nats, strict=True):
        record = convergence({"dense": 0.0, method: 0.0}, vocab=vocab)
        named = replace(record, name=f"convergence-{vocab}")
        made.append(shifted(named, method, more, wobble))
    return made


def sizes(pool: Pool) -> list[int]:
    return [case.vocab_size for case in pool.cases]


def test_differences_of_the_vocabularies_are_averaged() -> None:
    (pool,) = pools_of(two("filtered", 0.012, -0.006))
    assert sizes(pool) == [32768, 65536] and pool.methods == ("filtered",)
    assert pool.num_seeds("filtered") == 6
    assert pool.difference("filtered", END) == pytest.approx(0.003)
    # Dense's seeds are 0.01 apart at either vocabulary.
    assert pool.spread(END) == pytest.approx(0.01)
    verdict = pool.verdict("filtered")
    assert verdict.share_within == 1 and verdict.worst == pytest.approx(0.3)
    # By itself the first one is outside.
    apart = [Pool((case,), pool.methods).verdict("filtered").worst for case in pool.cases]
    assert apart == pytest.approx([1.2, -0.6])


def test_standard_error_falls_with_the_vocabularies() -> None:
    (pool,) = pools_of(two("filtered", 0.0, 0.0, wobble=0.004))
    alone = Pool(pool.cases[:1], pool.methods).standard_error("filtered", END)
    assert alone == pytest.approx(0.004 / math.sqrt(3))
    assert pool.standard_error("filtered", END) == pytest.approx(alone / math.sqrt(2))
    verdict = pool.verdict("filtered")
    error = pool.standard_error("filtered", verdict.step, verdict.group)
    assert verdict.error == pytest.approx(error / pool.spread(verdict.step, verdict.group))


def test_spread_is_the_root_of_the_mean_variance() -> None:
    first, second = two("filtered", 0.0, 0.0)
    second = shifted(second, "dense", 0.0, wobble=0.02)  # 0.03 apart
    (pool,) = pools_of([first, second])
    assert pool.spread(END) == pytest.approx(math.sqrt((0.01**2 + 0.03**2) / 2))


def test_only_what_every_vocabulary_has_is_compared() -> None:
    first, second = two("filtered", 0.0, 0.0)
    rows = tuple(row for row in second.rows if row.get("method") != "filtered")
    # "screened" has failed at both.
    assert pools_of([first, replace(second, rows=rows)]) == []
    text = page_of("convergence", [first, replace(second, rows=rows)])
    assert "All vocabularies together" not in text


@pytest.mark.parametrize(
    "change",
    [{"settings": {"dim": 7}}, {"machine": {"device": "another"}}],
    ids=["settings", "device"],
)
def test_other_settings_or_devices_are_apart(change: dict) -> None:
    first, second = two("filtered", 0.0, 0.0)
    assert pools_of([first, replace(second, **change)]) == []


def test_starts_are_apart() -> None:
    both = [
        replace(convergence({"dense": 0.0, "exact": 0.0}, starts=starts, vocab=vocab), name=f"v{n}")
        for n, (vocab, starts) in enumerate(
            [(100, ("random", "checkpoint")), (200, ("random", "checkpoint")), (300, ("random",))]
        )
    ]
    pools = {pool.start: sizes(pool) for pool in pools_of(both)}
    assert pools == {"random": [100, 200, 300], "checkpoint": [100, 200]}


def test_of_two_records_of_a_vocabulary_the_one_with_more_seeds_counts() -> None:
    first, second = two("filtered", 0.0, 0.0)
    more = convergence({"dense": 0.0, "filtered": 0.0}, seeds=5, vocab=65536)
    for records in ([first, second, more], [more, second, first]):
        (pool,) = pools_of(records)
        assert sizes(pool) == [32768, 65536]
        assert pool.num_seeds("filtered") == 3 + 5


def test_what_the_record_with_more_seeds_lacks_is_of_the_other() -> None:
    losses = {"dense": 0.0, "exact": 0.0, "filtered": 0.0}
    fewer = [
        replace(convergence(losses, vocab=vocab), name=f"v{vocab}") for vocab in (32768, 65536)
    ]
    more = convergence({"dense": 0.0, "filtered": 0.0}, seeds=5, vocab=65536)
    for records in ([*fewer, more], [more, *fewer]):
        found = {pool.methods: pool for pool in pools_of(records)}
        assert set(found) == {("exact",), ("filtered",)}
        assert found[("exact",)].num_seeds("exact") == 3 + 3
        assert found[("filtered",)].num_seeds("filtered") == 3 + 5
        assert all(sizes(pool) == [32768, 65536] for pool in found.values())


def test_one_vocabulary_is_no_pool() -> None:
    assert pools_of([convergence({"dense": 0.0, "filtered": 0.0}, seeds=3)]) == []


def test_page_has_them_first() -> None:
    records = two("filtered", 0.012, -0.006) + [
        replace(record, name=f"{record.name}-more", settings={"dim": 9})
        for record in two("exact", 0.03, 0.03)
    ]
    text = " ".join(page_of("convergence", records).split())
    together = text.index("All vocabularies together, from random weights:")
    assert together < text.index(f"## {records[0].name}")
    assert "`filtered` is after 80 steps +0.0030 ± 0.0000 nats in all tokens" in text
    assert "| filtered | 6 | **+0.0030 ± 0.0000** |" in text
    assert "| exact | 6 | **+0.0300 ± 0.0000** |" in text
