"""Steps that others published beside the planner's; docs/planner.md has the table."""

from __future__ import annotations

import functools

from plan_published import Published, published_steps

# Of each family, the errors of time that docs/planner.md states: from, to.
STATED = {
    "H100 llama3-8b tp1": (7.8, 19.3),
    "H100 llama3-70b tp4": (12.9, 15.4),
    "H100 llama3.1-405b tp8": (10.1, 14.7),
    "H100 gpt3-175b tp4": (5.7, 7.0),
    "H100 nemotron4-15b tp4": (21.4, 25.8),
    "H100 nemotron4-15b tp2": (31.9, 38.8),
    "H100 nemotron4-340b tp8": (13.6, 23.3),
    "H100 grok1-314b tp4": (-5.3, 2.5),
    "GB200 llama3.1-405b tp4": (-12.9, -11.4),
    "GB200 nemotron4-340b tp8": (-8.3, 39.6),
    "A100 SC21": (-8.4, 1.6),
    "A100 arXiv:2205.05198": (-6.0, 11.5),
}


@functools.cache
def steps() -> tuple[Published, ...]:
    return tuple(published_steps())


def test_published_steps() -> None:
    """No promise is kept here: what the documents say of the errors is."""
    assert len(steps()) == 135
    assert {each.family for each in steps()} == set(STATED)
    for family, stated in STATED.items():
        errors = [100 * (x.compared.time_error or 0) for x in steps() if x.family == family]
        assert (round(min(errors), 1), round(max(errors), 1)) == stated, family


def test_peaks_of_published_steps() -> None:
    errors = [x.compared.memory_error for x in steps() if x.compared.memory_error is not None]
    assert len(errors) == 2 and max(map(abs, errors)) < 0.045
