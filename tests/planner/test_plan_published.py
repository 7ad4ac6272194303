"""Steps that others published beside the planner's; docs/design/planner.md has the table."""

from __future__ import annotations

import functools

from tests.planner.plan_published import Published, published_steps

# Of each family, the errors of time that docs/design/planner.md states: from, to.
STATED = {
    ("H100 llama3-8b tp1", False): (-4.4, 2.6),
    ("H100 llama3-70b tp4", True): (-0.1, 2.5),
    ("H100 llama3.1-405b tp8", False): (-0.7, 2.2),
    ("H100 llama3.1-405b tp8", True): (-0.3, 1.6),
    ("H100 gpt3-175b tp4", True): (3.3, 5.5),
    ("H100 nemotron4-15b tp4", False): (-7.4, -2.2),
    ("H100 nemotron4-15b tp2", True): (-4.2, 0.5),
    ("H100 nemotron4-340b tp8", True): (-3.3, 4.9),
    ("H100 grok1-314b tp4", True): (-5.4, 1.6),
    ("GB200 llama3.1-405b tp4", True): (-1.4, 0.4),
    ("GB200 nemotron4-340b tp8", True): (-3.3, 1.8),
    ("A100 SC21", False): (-2.3, 1.5),
    ("A100 SC21", True): (-4.8, 1.2),
    ("A100 arXiv:2205.05198", True): (4.6, 14.1),
}


@functools.cache
def steps() -> tuple[Published, ...]:
    return tuple(published_steps())


def errors(family: str, apart: bool) -> list[float]:
    mine = [x.compared for x in steps() if (x.family, x.apart) == (family, apart)]
    return [100 * each.time_error for each in mine if each.time_error is not None]


def test_published_steps() -> None:
    """From and to are as the documents have them, the promise kept or not."""
    assert {(each.family, each.apart) for each in steps()} == set(STATED)
    for (family, apart), stated in STATED.items():
        found = errors(family, apart)
        assert (round(min(found), 1), round(max(found), 1)) == stated, family


def test_how_many_published_steps_are_within_the_promise() -> None:
    within = {"h100": 0, "gb200": 0, "a100": 0}
    for each in steps():
        assert each.compared.time_error is not None
        within[each.row["gpu"]] += abs(each.compared.time_error) < 0.05
    assert len(steps()) == 135 and sum(not each.apart for each in steps()) == 47
    assert within == {"h100": 98, "gb200": 9, "a100": 12}


def test_rows_that_nothing_was_changed_for() -> None:
    """Grok-1's: looked at when all else was done."""
    found = errors("H100 grok1-314b tp4", True)
    assert len(found) == 18 and sum(abs(each) < 5 for each in found) == 16


def test_peaks_of_published_steps() -> None:
    found = [x.compared.memory_error for x in steps() if x.compared.memory_error is not None]
    assert len(found) == 2 and max(map(abs, found)) < 0.045
