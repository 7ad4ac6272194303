"""Benchmark of every method's loss and gradients: errors first, then time and memory."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cce_dist import LinearCrossEntropy, LossOutput
from cce_dist.options import Backend, LossOptions

from .golden import (
    GRADIENT_ERRORS,
    WORST_ERROR_RATIO,
    LossFunction,
    Reference,
    full_reference,
    require_correct,
)
from .inputs import BenchInputs
from .machine import (
    FLOORS,
    HOST_REPEATS,
    NUM_PRODUCTS,
    Part,
    Timer,
    Variant,
    compacting,
    count_launches,
    floor_variants,
    fresh_compiler,
    host_seconds,
    interleaved_times,
    peak_extra_bytes,
    variant_of,
)
from .methods import Method, describe_failure, recover, time_limit
from .rank_methods import Setup
from .report import Cells, Report, format_cell, percentiles_ms

# Rounding units by which sums in another order may differ.
SLACK_UNITS = 4
MIN_REPEATS = 3
# Calls of `varied_host_ms`: the first ones compile and record, and only the last ones count.
VARIED, VARIED_COUNTED = 96, 32
# Columns of a row. Errors are relative, those of gradients in the Frobenius norm. `peak_extra_mib`
# is the peak beyond the memory in use before, `over_gradients_mib` the same less both gradients.
# `screened` is "yes" or "no" for a method that may screen its logits. `host_ms` is the host's time
# with an idle device, `launches` the kernels, copies and fills: of a call like many before;
# `varied_host_ms` the host's time of calls whose numbers of tokens differ.
COLUMNS = (
    *("method", "part", "repeats", "median_ms", "p10_ms", "p90_ms", "of_dense"),
    *("tflop_per_s", "of_roofline", "host_ms", "varied_host_ms", "launches"),
    *("peak_extra_mib", "over_gradients_mib"),
    *("loss_error", *GRADIENT_ERRORS, "tail_mass", "screened", "failed"),
)


@dataclass(frozen=True)
class Settings:
    """Settings of a benchmark of losses.

    Args:
        repeats: launches of each method and part; fewer, but at least 3, if they would take more
            than `budget_seconds` (0: no such bound).
        timeout_seconds: time for a peer's import, compilation and first calls; 0: no bound.
        compact: drop ignored tokens before every method that does not do so itself.
        backend: of our methods.
        host: also measure the host's time and count launches.
        varied: also measure the host's time of calls whose numbers of tokens differ.
        strict: raise an error of our methods; False: report it in their row, as a peer's.
    """

    repeats: int = 30
    parts: tuple[Part, ...] = ("loss+grad",)
    budget_seconds: float = 0.0
    timeout_seconds: float = 0.0
    worst_error_ratio: float = WORST_ERROR_RATIO
    compact: bool = False
    backend: Backend = "auto"
    host: bool = True
    varied: bool = False
    strict: bool = True


@dataclass
class Trial:
    """Results of one method, or of bare matrix products, so far."""

    name: str
    method: Method | None = None  # None: bare matrix products
    function: LossFunction | None = None  # None: bare matrix products, or the method failed
    cells: dict[str, Any] = field(default_factory=dict)
    peak_bytes: dict[Part, int] = field(default_factory=dict)
    seconds: dict[Part, list[float]] = field(default_factory=dict)
    host: dict[Part, dict[str, float]] = field(default_factory=dict)  # cells
    failed: str = ""


def bench_loss(
    inputs: BenchInputs,
    methods: Sequence[Method],
    settings: Settings,
    *,
    save: Callable[[list[Cells]], None] = lambda rows: None,
    failed: Mapping[str, str] | None = None,
    make_reference: Callable[[BenchInputs], Reference] = full_reference,
) -> list[Cells]:
    """Returns a row for every method and part, after two rows of bare matrix products.

    Args:
        save: called with all rows so far after every method.
        failed: methods that are not to be run, each with the reason to report.
    Raises:
        RuntimeError: one of our gradients is further from float64 than worst_error_ratio times
            the dense one.
        DeviceLostError: a peer broke the CUDA context.
    """
    timer = Timer(inputs.hidden.device)
    floors = _time_floors(inputs, settings, timer)
    reference = make_reference(inputs)
    trials: list[Trial] = []
    for method in methods:
        trial = Trial(method.name, method, failed=(failed or {}).get(method.name, ""))
        trials.append(trial)
        if not trial.failed:
            _try(trial, inputs, settings, reference, timer)
        save(_rows(inputs, [*floors, *trials]))
    del reference
    _time_in_turns(trials, inputs, settings, timer)
    rows = _rows(inputs, [*floors, *trials])
    save(rows)
    return rows


@torch.no_grad()
def filter_cells(inputs: BenchInputs, options: LossOptions) -> dict[str, float | str]:
    """Returns the cells that say what the filter of a loss with these options did.

    Returns:
        tail_mass: the mean mass, over tokens not ignored, whose gradient the filter approximates.
        screened: with screened logits, whether 8 bits were enough.
    """
    screens = options.logits == "screened"
    loss = LinearCrossEntropy(
        softcap=options.softcap,
        filter=options.filter,
        logits=options.logits,
        screen=options.screen,
        backend=options.backend,
        stats=("tail_mass", "screened") if screens else ("tail_mass",),
    )
    out = loss(inputs.hidden, inputs.weight, inputs.targets)
    assert isinstance(out, LossOutput) and out.tail_mass is not None
    cells: dict[str, float | str] = {
        "tail_mass": float(out.tail_mass.sum()) / max(inputs.num_valid, 1)
    }
    if out.screened is not None:
        cells["screened"] = "yes" if bool(out.screened.all()) else "no"
    return cells


def _time_floors(inputs: BenchInputs, settings: Settings, timer: Timer) -> list[Trial]:
    variants = floor_variants(inputs)
    repeats = {key: _num_repeats(settings, timer.seconds(run)) for key, run in variants.items()}
    times = interleaved_times(variants, repeats, timer)
    return [Trial(name, seconds={part: taken}) for (name, part), taken in times.items()]


def _try(
    trial: Trial, inputs: BenchInputs, settings: Settings, reference: Reference, timer: Timer
) -> None:
    """Measures a method; a peer's failure is kept in the trial, ours is raised if strict."""
    is_ours = trial.method is not None and trial.method.is_ours
    try:
        with time_limit(0 if is_ours else settings.timeout_seconds):
            _measure(trial, inputs, settings, reference, timer)
        return
    except Exception as error:
        if is_ours and settings.strict:
            raise
        trial.failed, trial.function = describe_failure(error), None
    # Only now has the error's traceback released its tensors.
    recover(trial.name, trial.failed, timer.device)


def _measure(
    trial: Trial, inputs: BenchInputs, settings: Settings, reference: Reference, timer: Timer
) -> None:
    """Measures errors, tail mass, peak memory, and each part's time once.

    The single time stays if the timing in turns fails.

    Raises:
        RuntimeError: the method is ours, and its gradients are wrong.
    """
    assert trial.method is not None
    function = trial.method.build(Setup(settings.backend, inputs.softcap, inputs.entropy_bonus))
    if isinstance(function, LinearCrossEntropy) and function.options.filters:
        trial.cells |= filter_cells(inputs, function.options)
    if settings.compact and not trial.method.is_ours:
        function = compacting(function)
    trial.cells |= reference.errors_of(function, inputs)
    if trial.method.is_ours:
        accumulated_in = torch.promote_types(inputs.hidden.dtype, torch.float32)
        slack = SLACK_UNITS * torch.finfo(accumulated_in).eps / 2
        ratio = settings.worst_error_ratio
        require_correct(trial.name, trial.cells, reference.dense, worst_ratio=ratio, slack=slack)
    for part in settings.parts:
        variant = variant_of(function, inputs, part)
        # The first launch compiles what this part needs beyond the call above.
        timer.seconds(variant)
        trial.peak_bytes[part] = peak_extra_bytes(variant, timer.device)
        trial.seconds[part] = [timer.seconds(variant)]
        if settings.host and timer.device.type == "cuda":
            trial.host[part] = {
                "host_ms": median_host_ms([variant] * HOST_REPEATS, timer.device),
                "launches": count_launches(variant, timer.device),
            }
            if settings.varied:
                shorter = [variant_of(function, each, part) for each in shorter_inputs(inputs)]
                varied = median_host_ms(shorter, timer.device, VARIED_COUNTED)
                trial.host[part]["varied_host_ms"] = varied
    trial.function = function


def median_host_ms(variants: Sequence[Variant], device: torch.device, counted: int = 0) -> float:
    """Returns the host's median time. Args: counted: of the last calls alone; 0: of all."""
    return 1e3 * statistics.median(host_seconds(variants, device)[-counted:])


def shorter_inputs(inputs: BenchInputs) -> list[BenchInputs]:
    """Returns the first tokens of the inputs, VARIED times: more than half of them, at most all."""
    size = len(inputs.hidden)
    numbers = random.Random(0).choices(range(size // 2 + 1, size + 1), k=VARIED)
    return [replace(inputs, hidden=inputs.hidden[:n], targets=inputs.targets[:n]) for n in numbers]


def _time_in_turns(
    trials: Sequence[Trial], inputs: BenchInputs, settings: Settings, timer: Timer
) -> None:
    by_name = {trial.name: trial for trial in trials}
    variants, repeats = {}, {}
    for trial in trials:
        if trial.function is None:
            continue
        for part in settings.parts:
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


def _rows(inputs: BenchInputs, trials: Sequence[Trial]) -> list[Cells]:
    medians = {
        (trial.name, part): statistics.median(taken)
        for trial in trials
        for part, taken in trial.seconds.items()
    }
    matmul = medians["one matmul", FLOORS["one matmul"]]
    sizes = inputs.num_valid, len(inputs.weight), inputs.hidden.shape[1]
    flop = 2 * sizes[0] * sizes[1] * sizes[2]
    gradient_bytes = inputs.hidden.nbytes + inputs.weight.nbytes
    rows: list[Cells] = []
    for trial in trials:
        shared = {**dict.fromkeys(COLUMNS), "screened": "", **trial.cells}
        shared |= {"method": trial.name, "part": "", "repeats": 0, "failed": trial.failed}
        for part, taken in trial.seconds.items():
            median = medians[trial.name, part]
            cells = {
                **shared,
                "part": part,
                "repeats": len(taken),
                **percentiles_ms(taken),
                "tflop_per_s": NUM_PRODUCTS[part] * flop / median / 1e12,
                "of_roofline": NUM_PRODUCTS[part] * matmul / median,
            }
            if ("dense", part) in medians:
                cells["of_dense"] = median / medians["dense", part]
            cells |= trial.host.get(part, {})
            if part in trial.peak_bytes:
                cells["peak_extra_mib"] = trial.peak_bytes[part] / 2**20
                if part not in ("loss", "forward"):
                    over = trial.peak_bytes[part] - gradient_bytes
                    cells["over_gradients_mib"] = over / 2**20
            rows.append(cells)
        if not trial.seconds:
            rows.append(shared)
    return rows


def measure_all(
    cases: Sequence[Callable[[], BenchInputs]],
    methods: Sequence[Method],
    settings: Settings,
    report: Report,
    failed: Mapping[str, str],
) -> None:
    """Measures all methods on each case, and shows and writes the rows.

    Args:
        cases: functions that make the inputs, each called when its turn comes: together the inputs
            would not fit.
    """
    for make in cases:
        inputs = make()

        def save(rows: list[Cells], inputs: BenchInputs = inputs) -> None:
            report.add(inputs.description, rows)
            report.say(progress_of(rows[-1]))

        with fresh_compiler():
            bench_loss(inputs, methods, settings, save=save, failed=failed)
        report.finish_case()


def progress_of(row: Cells) -> str:
    """Returns a line about a method that has just been measured, from a row of `bench_loss`."""
    names = ("median_ms", "peak_extra_mib", "grad_hidden_error", "grad_weight_error", "failed")
    values = [(name, format_cell(name, row[name])) for name in names]
    return f"{row['method']}: " + ", ".join(f"{name} {value}" for name, value in values if value)
