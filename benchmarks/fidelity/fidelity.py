"""Fidelity of gradients: each method over its thresholds against float64, by token frequency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fidelity.candidates import Candidate
from benchmarks.fidelity.kept import shares_kept
from benchmarks.fidelity.tenths import ALL, Group, compare_groups, groups_of, products_by_row
from cce_dist import LinearCrossEntropy
from cce_dist.bench.golden import Gradients, LossFunction, golden_gradients, gradients
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import mean_tail_mass, was_screened
from cce_dist.bench.machine import Timer, interleaved_times, variant_of
from cce_dist.bench.methods import describe_failure, recover, time_limit
from cce_dist.bench.report import percentiles_ms

GOLDEN = "float64"
Row = dict[str, Any]


@dataclass
class Trial:
    """The measurements of one candidate so far: cells by group, or why it failed."""

    candidate: Candidate
    function: LossFunction | None = None
    cells: dict[str, Row] = field(default_factory=dict)
    failed: str | None = None


def bench_fidelity(
    inputs: BenchInputs,
    candidates: Sequence[Candidate],
    *,
    tenths: bool = True,
    repeats: int = 10,
    timeout_seconds: float = 0.0,
    failed: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Returns a row for each group of tokens: first those of float64, then each candidate's.

    Errors are relative Frobenius errors against float64; the error of the weight's update is
    `tenths.update_error`. A cosine distance is 1 - cosine, a norm ratio is over float64's norm.
    `kept` is the share of pairs of a column and a block of 128 tokens whose true mass reaches the
    threshold. `screened` is False if 8 bits were not enough and the call was computed in full. Loss
    error, shares and times are in the row of group "all" alone. Rows of "float64" describe each
    group, and give its share of the squared norm of the whole gradient. Ignored tokens are removed
    first.

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
    golden = golden_gradients(inputs)
    rows = _golden_rows(golden, groups)
    # A method that failed at one threshold is not tried at the others.
    reasons = dict(failed or {})
    trials: list[Trial] = []
    for candidate in candidates:
        method = candidate.method
        if method not in reasons:
            trials.append(_try(candidate, inputs, golden, groups, timeout_seconds))
            say(_progress(trials[-1]))
            if trials[-1].failed is not None:
                reasons[method] = trials[-1].failed
        elif all(trial.candidate.method != method for trial in trials):
            trials.append(Trial(candidate, failed=reasons[method]))
    # Their memory is free again where times are taken.
    del golden
    _add_shares(trials, inputs)
    _time_in_turns(trials, inputs, repeats, Timer(inputs.hidden.device))
    return [*rows, *(row for trial in trials for row in _rows(trial))]


def _try(
    candidate: Candidate,
    inputs: BenchInputs,
    golden: Gradients,
    groups: list[Group],
    timeout_seconds: float,
) -> Trial:
    try:
        with time_limit(timeout_seconds if candidate.may_fail else 0.0):
            return _compare(candidate, inputs, golden, groups)
    except Exception as error:
        if not candidate.may_fail:
            raise
        reason = describe_failure(error)
    recover(candidate.method, reason, inputs.hidden.device)
    return Trial(candidate, failed=reason)


def _compare(
    candidate: Candidate, inputs: BenchInputs, golden: Gradients, groups: list[Group]
) -> Trial:
    function = candidate.build()
    ours = gradients(function, inputs)
    cells: dict[str, Row] = compare_groups(ours, golden, groups)
    of_all, golden_loss = cells[ALL], float(golden.loss)
    of_all["loss_error"] = abs(float(ours.loss) - golden_loss) / abs(golden_loss)
    if isinstance(function, LinearCrossEntropy) and candidate.keep is not None:
        of_all["tail_mass"] = mean_tail_mass(inputs, function.options)
        if function.options.logits == "screened":
            of_all["screened"] = was_screened(inputs, function.options)
    return Trial(candidate, function, cells)


def _add_shares(trials: Sequence[Trial], inputs: BenchInputs) -> None:
    """Adds the kept shares of all thresholds, in one pass over the logits."""
    ours = {
        number: trial.candidate.keep
        for number, trial in enumerate(trials)
        if trial.candidate.keep is not None and trial.function is not None
    }
    shares = shares_kept(inputs, list(ours.values()))
    for number, share in zip(ours, shares, strict=True):
        trials[number].cells[ALL]["kept"] = share


def _time_in_turns(
    trials: Sequence[Trial], inputs: BenchInputs, repeats: int, timer: Timer
) -> None:
    variants = {
        number: variant_of(trial.function, inputs, "loss+grad")
        for number, trial in enumerate(trials)
        if trial.function is not None
    }

    def fail(number: int, error: Exception) -> None:
        candidate = trials[number].candidate
        if not candidate.may_fail:
            raise error
        trials[number].failed = describe_failure(error)
        recover(candidate.method, describe_failure(error), timer.device)

    taken = interleaved_times(variants, dict.fromkeys(variants, repeats), timer, fail)
    for number, seconds in taken.items():
        if trials[number].failed is None:
            trials[number].cells[ALL] |= {**percentiles_ms(seconds), "repeats": len(seconds)}


def _golden_rows(golden: Gradients, groups: Sequence[Group]) -> list[Row]:
    squares = [products_by_row(grad, grad)[:, 2] for grad in (golden.hidden, golden.weight)]
    totals = [float(square.sum()) or 1.0 for square in squares]
    rows = []
    for group in groups:
        least, most = group.times or (None, None)
        rows.append(
            {
                "method": GOLDEN,
                "group": group.name,
                "num_tokens": int(group.tokens.sum()),
                "num_ids": int(group.ids.sum()),
                "times_least": least,
                "times_most": most,
                "grad_hidden_share": float(squares[0][group.tokens].sum()) / totals[0],
                "grad_weight_share": float(squares[1][group.ids].sum()) / totals[1],
            }
        )
    return rows


def _rows(trial: Trial) -> list[Row]:
    candidate = trial.candidate
    about: Row = {"method": candidate.method}
    if candidate.keep is not None:
        about |= {"threshold": candidate.keep, "by": "mass", "default": candidate.default or None}
    if trial.failed is not None:
        return [{**about, "group": ALL, "failed": trial.failed}]
    return [{**about, "group": name, **cells} for name, cells in trial.cells.items()]


def _progress(trial: Trial) -> str:
    keep = trial.candidate.keep
    name = trial.candidate.method + ("" if keep is None else f" at {keep:.3g}")
    if trial.failed is not None:
        return f"{name} failed: {trial.failed}"
    of_all = trial.cells[ALL]
    errors = [f"{key} {of_all[f'{key}_error']:.1e}" for key in ("grad_hidden", "grad_weight")]
    return f"{name}: {', '.join(errors)}"
