"""Benchmark of every method's loss and gradients: errors first, then time and memory."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cce_dist import LinearCrossEntropy, LossOutput, linear_cross_entropy
from cce_dist.options import LossOptions, Stat

from .golden import Gradients, LossFunction, dense_loss, errors, golden_gradients, gradients
from .inputs import BenchInputs
from .machine import (
    FLOORS,
    NUM_PRODUCTS,
    Part,
    Timer,
    compacting,
    floor_variants,
    interleaved_times,
    peak_extra_bytes,
    variant_of,
)
from .methods import Method, describe_failure, recover, time_limit
from .report import Report, Row, format_cell, percentiles_ms

# Our methods are timed only if each gradient's relative Frobenius error is at most this many times
# that of the dense recipe in the same dtype.
WORST_ERROR_RATIO = 1.5
# Rounding units by which sums in another order may differ.
SLACK_UNITS = 4
MIN_REPEATS = 3


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark of losses.

    Args:
        repeats: launches of each method and part; fewer, but at least 3, if they would take more
            than `budget_seconds` (0: no such bound).
        timeout_seconds: time for a peer's import, compilation and first calls; 0: no bound.
        compact: drop ignored tokens before every method that does not do so itself.
    """

    repeats: int = 30
    parts: tuple[Part, ...] = ("loss+grad",)
    budget_seconds: float = 0.0
    timeout_seconds: float = 0.0
    worst_error_ratio: float = WORST_ERROR_RATIO
    compact: bool = False


@dataclass
class Trial:
    """Results of one method so far."""

    name: str
    function: LossFunction | None = None
    errors: dict[str, float] = field(default_factory=dict)
    tail_mass: float | None = None
    screened: str = ""
    peak_bytes: dict[Part, int] = field(default_factory=dict)
    seconds: dict[Part, list[float]] = field(default_factory=dict)
    failed: str = ""


def bench_loss(
    inputs: BenchInputs,
    methods: Sequence[Method],
    settings: Settings,
    *,
    save: Callable[[list[Row]], None] = lambda rows: None,
    failed: Mapping[str, str] | None = None,
) -> list[Row]:
    """Returns a row for every method and part, after two rows of bare matrix products.

    Args:
        save: called with all rows so far after every method.
        failed: peers that are not to be run, each with the reason to report.
    Raises:
        RuntimeError: one of our gradients is further from float64 than worst_error_ratio times
            the dense one.
        DeviceLostError: a peer broke the CUDA context.
    """
    # Reset, or code that was compiled for another shape would run here as a generic kernel. Raise
    # the limit, or methods that share a code object would fall back to eager mode.
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        return _bench(inputs, methods, settings, save, failed or {})


def _bench(
    inputs: BenchInputs,
    methods: Sequence[Method],
    settings: Settings,
    save: Callable[[list[Row]], None],
    failed: Mapping[str, str],
) -> list[Row]:
    timer = Timer(inputs.hidden.device)
    floors = _time_floors(inputs, settings, timer)
    golden = golden_gradients(inputs)
    recipe = functools.partial(dense_loss, softcap=inputs.softcap)
    dense = errors(gradients(recipe, inputs), golden)
    trials: list[Trial] = []
    for method in methods:
        trial = Trial(method.name, failed=failed.get(method.name, ""))
        trials.append(trial)
        if method.origin == "ours":
            _try(trial, method, inputs, settings, golden, timer)
            _require_correct(trial, dense, settings.worst_error_ratio, inputs.hidden.dtype)
        elif not trial.failed:
            _try_peer(trial, method, inputs, settings, golden, timer)
        save(_rows(inputs, [*floors, *trials]))
    del golden
    _time_in_turns(trials, inputs, settings, timer)
    rows = _rows(inputs, [*floors, *trials])
    save(rows)
    return rows


def mean_tail_mass(inputs: BenchInputs, options: LossOptions) -> float:
    """Returns the mean mass, over tokens not ignored, whose gradient the filter approximates."""
    tail_mass = _stats(inputs, options, "tail_mass").tail_mass
    assert tail_mass is not None
    return float(tail_mass.sum()) / max(inputs.num_valid, 1)


def was_screened(inputs: BenchInputs, options: LossOptions) -> bool:
    """Tells whether 8 bits were enough."""
    screened = _stats(inputs, options, "screened").screened
    assert screened is not None
    return bool(screened.all())


@torch.no_grad()
def _stats(inputs: BenchInputs, options: LossOptions, stat: Stat) -> LossOutput:
    out = linear_cross_entropy(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        softcap=options.softcap,
        filter=options.filter,
        logits=options.logits,
        screen=options.screen,
        backend=options.backend,
        stats=(stat,),
    )
    assert isinstance(out, LossOutput)
    return out


def _time_floors(inputs: BenchInputs, settings: Settings, timer: Timer) -> list[Trial]:
    variants = floor_variants(inputs)
    repeats = {key: _num_repeats(settings, timer.seconds(run)) for key, run in variants.items()}
    times = interleaved_times(variants, repeats, timer, _raise)
    return [Trial(name, seconds={part: taken}) for (name, part), taken in times.items()]


def _raise(key: object, error: Exception) -> None:
    raise error


def _try_peer(
    trial: Trial,
    method: Method,
    inputs: BenchInputs,
    settings: Settings,
    golden: Gradients,
    timer: Timer,
) -> None:
    try:
        with time_limit(settings.timeout_seconds):
            _try(trial, method, inputs, settings, golden, timer)
    except Exception as error:
        trial.failed = describe_failure(error)
    if trial.failed:
        trial.function = None
        recover(trial.name, trial.failed, timer.device)


def _try(
    trial: Trial,
    method: Method,
    inputs: BenchInputs,
    settings: Settings,
    golden: Gradients,
    timer: Timer,
) -> None:
    """Measures errors, tail mass, peak memory, and each part's time once.

    The single time stays if the timing in turns fails.
    """
    function = method.build()
    if isinstance(function, LinearCrossEntropy) and function.options.filters:
        trial.tail_mass = mean_tail_mass(inputs, function.options)
        if function.options.logits == "screened":
            trial.screened = "yes" if was_screened(inputs, function.options) else "no"
    if settings.compact and method.origin != "ours":
        function = compacting(function)
    trial.errors = errors(gradients(function, inputs), golden)
    for part in settings.parts:
        variant = variant_of(function, inputs, part)
        # The first launch compiles what this part needs beyond the call above.
        timer.seconds(variant)
        trial.peak_bytes[part] = peak_extra_bytes(variant, timer.device)
        trial.seconds[part] = [timer.seconds(variant)]
    trial.function = function


def _time_in_turns(
    trials: Sequence[Trial], inputs: BenchInputs, settings: Settings, timer: Timer
) -> None:
    by_name = {trial.name: trial for trial in trials}
    variants, repeats = {}, {}
    for trial in trials:
        for part in settings.parts if trial.function is not None else ():
            assert trial.function is not None
            variants[trial.name, part] = variant_of(trial.function, inputs, part)
            repeats[trial.name, part] = _num_repeats(settings, trial.seconds[part][0])

    def fail(key: tuple[str, Part], error: Exception) -> None:
        trial = by_name[key[0]]
        trial.failed = describe_failure(error)
        recover(trial.name, trial.failed, timer.device)

    for (name, part), taken in interleaved_times(variants, repeats, timer, fail).items():
        if taken:
            by_name[name].seconds[part] = taken


def _num_repeats(settings: Settings, seconds: float) -> int:
    if not settings.budget_seconds:
        return settings.repeats
    affordable = int(settings.budget_seconds / seconds)
    return max(MIN_REPEATS, min(settings.repeats, affordable))


def _require_correct(
    trial: Trial, dense: dict[str, float], worst_ratio: float, dtype: torch.dtype
) -> None:
    accumulated_in = torch.float64 if dtype == torch.float64 else torch.float32
    slack = SLACK_UNITS * torch.finfo(accumulated_in).eps / 2
    for key in ("grad_hidden_error", "grad_weight_error"):
        got, expected = trial.errors[key], dense[key]
        # `got > ...` would let a NaN pass.
        if not got <= worst_ratio * expected + slack:
            raise RuntimeError(
                f"{trial.name}: {key} is {got:.2e}, more than {worst_ratio:g} times that of the "
                f"dense computation ({expected:.2e}); nothing was timed"
            )


def _rows(inputs: BenchInputs, trials: Sequence[Trial]) -> list[Row]:
    medians = {
        (trial.name, part): statistics.median(taken)
        for trial in trials
        for part, taken in trial.seconds.items()
    }
    matmul = medians["one matmul", FLOORS["one matmul"]]
    sizes = inputs.num_valid, len(inputs.weight), inputs.hidden.shape[1]
    flop = 2 * sizes[0] * sizes[1] * sizes[2]
    gradient_bytes = inputs.hidden.nbytes + inputs.weight.nbytes
    rows = []
    for trial in trials:
        known = {"tail_mass": trial.tail_mass, "screened": trial.screened, "failed": trial.failed}
        shared = {**trial.errors, **known}
        for part, taken in trial.seconds.items():
            median = medians[trial.name, part]
            dense = medians.get(("dense", part))
            peak = trial.peak_bytes.get(part)
            over = None if peak is None or part in ("loss", "forward") else peak - gradient_bytes
            rows.append(
                Row(
                    method=trial.name,
                    part=part,
                    repeats=len(taken),
                    **percentiles_ms(taken),
                    of_dense=None if dense is None else median / dense,
                    tflop_per_s=NUM_PRODUCTS[part] * flop / median / 1e12,
                    of_roofline=NUM_PRODUCTS[part] * matmul / median,
                    peak_extra_mib=None if peak is None else peak / 2**20,
                    over_gradients_mib=None if over is None else over / 2**20,
                    **shared,
                )
            )
        if not trial.seconds:
            rows.append(Row(method=trial.name, part="", **shared))
    return rows


def measure_all(
    cases: Sequence[Callable[[], BenchInputs]],
    methods: Sequence[Method],
    settings: Settings,
    report: Report,
    failed: Mapping[str, str],
    *,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Measures all methods on each case, and shows and writes the rows.

    Args:
        cases: functions that make the inputs, each called when its turn comes: together the inputs
            would not fit.
        labels: further columns, the same in every row.
    """
    for make in cases:
        inputs = make()
        description = {**(labels or {}), **inputs.description}

        def save(rows: list[Row], description: Mapping[str, str | int] = description) -> None:
            report.add(description, [row.cells for row in rows])
            report.say(_progress(rows[-1]))

        bench_loss(inputs, methods, settings, save=save, failed=failed)
        report.finish_case()


def _progress(row: Row) -> str:
    names = ("median_ms", "peak_extra_mib", "grad_hidden_error", "grad_weight_error", "failed")
    values = [(name, format_cell(name, row.cells[name])) for name in names]
    return f"{row.method}: " + ", ".join(f"{name} {value}" for name, value in values if value)
