"""The planner beside runs that were published or measured; tables: docs/design/planner.md."""

from __future__ import annotations

import functools

import pytest

from tests.planner.plan_runs import (
    OVER,
    Compared,
    embedding_seconds,
    least_loaded,
    megatron,
    passes_beside_collectives,
    pipelines,
    published,
)

TIME, MEMORY = 0.05, 0.08  # what issue and documents promise


@functools.cache
def runs() -> list[tuple[Compared, Compared]]:
    return published()


def test_steps_from_measured_stages() -> None:
    """40 published runs: 1F1B even and uneven, three forms of the vocabulary over the pipeline."""
    errors = [found.time_error for found, _ in runs()]
    assert len(errors) == 40
    assert max(abs(error) for error in errors if error is not None) < 0.016


def test_memory_of_published_runs() -> None:
    errors = [found.memory_error for _, found in runs()]
    errors += [found.memory_error for found in least_loaded()]
    assert len(errors) == 56
    assert max(abs(error) for error in errors if error is not None) < MEMORY


def test_steps_of_published_runs_from_hardware_alone() -> None:
    """No promise is kept here: what the documents say of the errors is."""
    errors: dict[bool, list[float]] = {True: [], False: []}
    short: list[float] = []
    for _, found in runs():
        assert found.time_error is not None
        method, sequence, _ = found.name
        errors[method in ("base", "redis")].append(found.time_error)
        if method in OVER and sequence == "2048":
            short.append(found.time_error)
    assert max(map(abs, errors[True])) < 0.12
    assert sum(map(abs, errors[True])) / len(errors[True]) < TIME
    # Of 4,096 tokens the layers themselves are too fast, without a head as well.
    assert -0.095 < min(errors[False]) < max(errors[False]) < 0
    assert len(short) == 12 and max(map(abs, short)) < TIME


def test_passes_take_longer_beside_collectives() -> None:
    """The stall that the planner adds lies within the passes of published runs, not between."""
    longer = passes_beside_collectives()
    assert len(longer) == 8
    for forward, backward in longer:
        assert 0.06 < forward < 0.11 and 0.04 < backward < 0.08
    # Whatever the vocabulary is: it is the hidden states that travel.
    assert max(forward for forward, _ in longer) - min(forward for forward, _ in longer) < 0.04


def test_what_a_first_stage_takes_beside_a_middle_one() -> None:
    """The embedding's gradient, by how much it grows with the vocabulary."""
    for sequence in (2048, 4096):
        few, many = (embedding_seconds(sequence, classes) for classes in (32000, 256000))
        measured, predicted = many[0] - few[0], many[1] - few[1]
        assert measured > 3e-3 and abs(predicted / measured - 1) < 0.12


def test_steps_and_peaks_of_megatron() -> None:
    """One, two and four H200s without a pipeline, from hardware alone."""
    found = megatron()
    times = [abs(each.time_error) for each in found if each.time_error is not None]
    peaks = [abs(each.memory_error) for each in found if each.memory_error is not None]
    assert len(times) > 50 and len(peaks) > 50
    # The worst is two GPUs' with sequence parallelism, measured after the model was made.
    assert max(times) < 0.07
    assert sum(each < TIME for each in times) / len(times) > 0.85
    assert max(peaks) < 0.035 < MEMORY


def check(
    runs: list[tuple[Compared, Compared]], measured: float, alone: float, memory: float
) -> None:
    """Errors by measured stages, by the cost model alone and of peaks are smaller than these."""
    for first, second in runs:
        if first.time_error is not None and second.time_error is not None:
            assert abs(first.time_error) < measured <= TIME
            assert abs(second.time_error) < alone
        assert second.memory_error is not None and abs(second.memory_error) < memory < MEMORY


def test_pipelines_on_gpus() -> None:
    """Measured after the model was made: no constant knows of them."""
    found = pipelines()
    check(found, 0.035, TIME, 0.025)
    assert all(first.time_error < 0 for first, _ in found if first.time_error is not None)
    assert len(found) == 28


@pytest.mark.parametrize(
    ("over", "measured", "alone"),
    [
        # A tenth of a cycle is lost between passes; that was taken from these runs.
        ("vocab-1f1b", 0.035, 0.055),
        # A fifth beside 1F1B; that too was taken from these runs.
        ("vocab-thread", TIME, TIME),
    ],
)
def test_the_vocabulary_over_two_gpus(over: str, measured: float, alone: float) -> None:
    found = pipelines(over)
    check(found, measured, alone, 0.035)
    assert len(found) == 6


@pytest.mark.parametrize(
    ("gpu", "alone", "counts"),
    [
        # Measured after all of the model was made, and after a planned cycle's loss was fitted.
        ("h100", 0.035, (16, 4)),
        # In the order of today, before which the model had been made.
        ("h100 with room", 0.045, (4, 4)),
    ],
)
def test_pipelines_on_h100s(gpu: str, alone: float, counts: tuple[int, int]) -> None:
    on_last, planned = pipelines(gpu=gpu), pipelines("vocab-1f1b", gpu)
    check(on_last + planned, 0.03, alone, 0.066)
    assert (len(on_last), len(planned)) == counts


@pytest.mark.parametrize(
    ("gpu", "expected"), [("h100", (-0.139, -0.134)), ("h100 with room", (-0.083, -0.056))]
)
def test_a_thread_on_h100s_is_missed(gpu: str, expected: tuple[float, float]) -> None:
    """No promise is kept here: what the documents say of the error is."""
    ((measured, alone), (_, last)) = pipelines("vocab-thread", gpu)
    assert (measured.time_error, alone.time_error) == pytest.approx(expected, abs=2e-3)
    for found in (alone, last):
        assert found.memory_error is not None and abs(found.memory_error) < 0.03 < MEMORY


def test_what_the_software_keeps_is_seen() -> None:
    """A negative control: fused kernels keep less than what was measured."""
    errors = [each.memory_error for each in megatron("megatron") if each.memory_error is not None]
    assert min(errors) < -MEMORY
