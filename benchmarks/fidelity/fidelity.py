"""Fidelity of gradients: each method over its thresholds against float64, by token frequency."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.fidelity.candidates import MAY_FAIL, Candidate
from benchmarks.fidelity.kept import shares_kept
from benchmarks.fidelity.sparsity import Peaks, find_peaks, share_of_tiles
from benchmarks.fidelity.tenths import ALL, Group, compare_groups, groups_of, products_by_row
from cce_dist import LinearCrossEntropy
from cce_dist.bench.golden import Gradients, LossFunction, golden_gradients, gradients
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import mean_tail_mass, was_screened
from cce_dist.bench.machine import Timer, interleaved_times, variant_of
from cce_dist.bench.methods import describe_failure, recover, time_limit
from cce_dist.bench.report import percentiles_ms

GOLDEN = "float64"


@dataclass(frozen=True)
class FidelityRow:
    """Numbers of one method at one threshold, for one group of tokens (`Group`'s name).

    Errors are relative Frobenius errors against float64; the error of the weight's update is
    `tenths.update_error`. A cosine distance is 1 - cosine, a norm ratio is over float64's norm.
    `kept` is the share of pairs of a column and a block of 128 tokens whose true mass reaches the
    threshold; for Apple's methods it is the share of tiles that they compute. `screened` is False
    if 8 bits were not enough and the call was computed in full. Rows of "float64" describe each
    group, and give its share of the squared norm of the whole gradient. A field without a value is
    None.
    """

    method: str
    group: str = ALL
    threshold: float | None = None
    by: str | None = None
    default: bool | None = None
    kept: float | None = None
    tail_mass: float | None = None
    screened: bool | None = None
    loss_error: float | None = None
    grad_hidden_error: float | None = None
    grad_weight_error: float | None = None
    grad_weight_update_error: float | None = None
    grad_hidden_cosine_distance: float | None = None
    grad_weight_cosine_distance: float | None = None
    grad_hidden_norm_ratio: float | None = None
    grad_weight_norm_ratio: float | None = None
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    repeats: int | None = None
    num_tokens: int | None = None
    num_ids: int | None = None
    times_least: int | None = None
    times_most: int | None = None
    grad_hidden_share: float | None = None
    grad_weight_share: float | None = None
    failed: str | None = None


@dataclass
class Trial:
    """Results of one candidate so far; `of_all` has the fields that only group "all" has."""

    candidate: Candidate
    function: LossFunction | None = None
    compared: dict[str, dict[str, float | None]] = field(default_factory=dict)
    of_all: dict[str, float | int] = field(default_factory=dict)
    failed: str | None = None


@dataclass(frozen=True)
class Truth:
    golden: Gradients
    groups: list[Group]
    peaks: Peaks | None  # None: no candidate is Apple's


def bench_fidelity(
    inputs: BenchInputs,
    candidates: Sequence[Candidate],
    *,
    tenths: bool = True,
    repeats: int = 10,
    timeout_seconds: float = 0.0,
    failed: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[FidelityRow]:
    """Returns a row for each group of tokens: first those of float64, then each candidate's.

    Ignored tokens are removed first.

    Args:
        tenths: also measures groups by the frequency of tokens; needs `inputs.token_counts`.
        timeout_seconds: time to import, compile and run a method that may fail; 0: no bound.
        failed: methods that are not to be run, each with the reason to report.
    Raises:
        ValueError: `tenths` is set and the inputs have no counts.
        DeviceLostError: a peer broke the CUDA context.
    """
    inputs = inputs.without_ignored()
    groups = groups_of(inputs, tenths)
    torch._dynamo.reset()
    # Apple's helpers may be compiled once for each threshold.
    with torch._dynamo.config.patch(recompile_limit=64):
        trials, rows = _run(inputs, candidates, groups, timeout_seconds, failed or {}, say)
        _time_in_turns(trials, inputs, repeats, Timer(inputs.hidden.device))
    return [*rows, *(row for trial in trials for row in _rows(trial))]


def _run(
    inputs: BenchInputs,
    candidates: Sequence[Candidate],
    groups: list[Group],
    timeout_seconds: float,
    failed: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[list[Trial], list[FidelityRow]]:
    """Returns all results except times, and float64's rows.

    On return the memory of the float64 gradients is free again.
    """
    by_tiles = any(candidate.by == "probability" for candidate in candidates)
    truth = Truth(golden_gradients(inputs), groups, find_peaks(inputs) if by_tiles else None)
    rows = _golden_rows(truth)
    # A method that failed at one threshold is not tried at the others.
    reasons = dict(failed)
    trials: list[Trial] = []
    for candidate in candidates:
        trial = Trial(candidate, failed=reasons.get(candidate.method))
        if trial.failed is None:
            _try(trial, inputs, truth, timeout_seconds)
            say(_progress(trial))
        elif any(other.candidate.method == candidate.method for other in trials):
            continue
        if trial.failed is not None:
            reasons[candidate.method] = trial.failed
        trials.append(trial)
    _add_shares(trials, inputs)
    return trials, rows


def _try(trial: Trial, inputs: BenchInputs, truth: Truth, timeout_seconds: float) -> None:
    if trial.candidate.method not in MAY_FAIL:
        _compare(trial, inputs, truth)
        return
    try:
        with time_limit(timeout_seconds):
            _compare(trial, inputs, truth)
    except Exception as error:
        trial.function, trial.failed = None, describe_failure(error)
    if trial.failed is not None:
        recover(trial.candidate.method, trial.failed, inputs.hidden.device)


def _compare(trial: Trial, inputs: BenchInputs, truth: Truth) -> None:
    candidate = trial.candidate
    function = candidate.build()
    ours = gradients(function, inputs)
    trial.compared = compare_groups(ours, truth.golden, truth.groups)
    golden_loss = float(truth.golden.loss)
    trial.of_all["loss_error"] = abs(float(ours.loss) - golden_loss) / abs(golden_loss)
    if isinstance(function, LinearCrossEntropy) and candidate.by == "mass":
        trial.of_all["tail_mass"] = mean_tail_mass(inputs, function.options)
        if function.options.logits == "screened":
            trial.of_all["screened"] = was_screened(inputs, function.options)
    if candidate.by == "probability":
        assert truth.peaks is not None and candidate.threshold is not None
        order = truth.peaks.by_mean_logit
        trial.of_all["kept"] = share_of_tiles(truth.peaks.gradient, candidate.threshold, order)
    trial.function = function


def _add_shares(trials: Sequence[Trial], inputs: BenchInputs) -> None:
    """Adds the kept shares of all mass thresholds, in one pass over the logits."""
    ours = [trial for trial in trials if trial.candidate.by == "mass" and trial.function]
    thresholds = [trial.candidate.threshold or 0.0 for trial in ours]
    for trial, share in zip(ours, shares_kept(inputs, thresholds), strict=True):
        trial.of_all["kept"] = share


def _time_in_turns(
    trials: Sequence[Trial], inputs: BenchInputs, repeats: int, timer: Timer
) -> None:
    variants = {
        number: variant_of(trial.function, inputs, "loss+grad")
        for number, trial in enumerate(trials)
        if trial.function is not None
    }

    def fail(number: int, error: Exception) -> None:
        trial = trials[number]
        if trial.candidate.method not in MAY_FAIL:
            raise error
        trial.failed = describe_failure(error)
        recover(trial.candidate.method, trial.failed, timer.device)

    taken = interleaved_times(variants, dict.fromkeys(variants, repeats), timer, fail)
    for number, seconds in taken.items():
        if trials[number].failed is None:
            trials[number].of_all.update(percentiles_ms(seconds), repeats=len(seconds))


def _golden_rows(truth: Truth) -> list[FidelityRow]:
    golden = truth.golden
    squares = [products_by_row(grad, grad)[:, 2] for grad in (golden.hidden, golden.weight)]
    totals = [float(square.sum()) or 1.0 for square in squares]
    rows = []
    for group in truth.groups:
        least, most = group.times or (None, None)
        rows.append(
            FidelityRow(
                GOLDEN,
                group.name,
                num_tokens=int(group.tokens.sum()),
                num_ids=int(group.ids.sum()),
                times_least=least,
                times_most=most,
                grad_hidden_share=float(squares[0][group.tokens].sum()) / totals[0],
                grad_weight_share=float(squares[1][group.ids].sum()) / totals[1],
            )
        )
    return rows


def _rows(trial: Trial) -> list[FidelityRow]:
    candidate = trial.candidate
    shared = FidelityRow(
        candidate.method,
        threshold=candidate.threshold,
        by=candidate.by,
        default=candidate.default or None,
        failed=trial.failed,
    )
    if trial.failed is not None:
        return [shared]
    rows = [
        dataclasses.replace(shared, group=name, **values) for name, values in trial.compared.items()
    ]
    return [dataclasses.replace(rows[0], **trial.of_all), *rows[1:]]


def _progress(trial: Trial) -> str:
    threshold = trial.candidate.threshold
    name = trial.candidate.method + ("" if threshold is None else f" at {threshold:.3g}")
    if trial.failed is not None:
        return f"{name} failed: {trial.failed}"
    compared = trial.compared[ALL]
    errors = [f"{key} {compared[f'{key}_error']:.1e}" for key in ("grad_hidden", "grad_weight")]
    return f"{name}: {', '.join(errors)}"
