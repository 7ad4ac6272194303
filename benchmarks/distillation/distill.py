"""Benchmark of distillation's divergence and its gradients by both of the student's tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import add_ratios
from benchmarks.distillation.contenders import (
    CONTENDERS,
    CROSS_ENTROPY,
    NOTES,
    PRODUCTS,
    REFERENCES,
    Built,
)
from benchmarks.distillation.inputs import JSD_BETA, Measured, Teacher, divergence_of, log_mixture
from benchmarks.fidelity.tenths import ALL, Group, compare_groups, groups_of
from benchmarks.rl.logprobs import tenths_by_probability
from cce_dist.bench.golden import CHUNK_ELEMENTS, GRADIENT_ERRORS, Gradients, Reference, gradients
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import Settings, bench_loss, progress_of
from cce_dist.bench.methods import Method
from cce_dist.bench.report import Cells

# Columns of a row. Group "all" has a row for each part, another group has one. `kl` and `entropy`
# are the group's means in nats: of the divergence, a KL or a mean of two, and of the teacher's
# entropy. `of_bound` is the time over that of both models' bare products and, with gradients, of
# the backward of the student's cross-entropy. `peak_extra_mib` is the peak beyond inputs and
# gradients.
# `kl_error` is the root mean square in nats over the group's tokens, where a method has their
# divergences. Other errors are relative, those of gradients in the Frobenius norm.
COLUMNS = (
    *("method", "part", "group", "kl", "entropy", "repeats", "median_ms", "p10_ms", "p90_ms"),
    *("of_fastest_peer", "of_bound", "peak_extra_mib", "kl_error", "loss_error"),
    *(*GRADIENT_ERRORS, "note", "failed"),
)
TIMED = ("part", "repeats", "median_ms", "p10_ms", "p90_ms", "failed")


@dataclass(frozen=True)
class Golden:
    """Values in float64.

    Args:
        divergence, entropy: the divergence and the teacher's entropy of each token, [N], in nats.
        gradients: loss and gradients of the mean; fp32 unless the inputs are float64.
    """

    divergence: Tensor
    entropy: Tensor
    gradients: Gradients


def describe(student: BenchInputs, teacher: Teacher, golden: Golden) -> dict[str, str | int]:
    """Returns the cells that identify the inputs in a row of results."""
    return {
        **student.description,
        "D_teacher": teacher.hidden.shape[1],
        "divergence": teacher.divergence,
        "temperature": f"{teacher.temperature:g}",
        "mean_kl": f"{float(golden.divergence.mean()):.3f}",
        "mean_entropy": f"{float(golden.entropy.mean()):.3f}",
    }


@torch.no_grad()
def golden_of(inputs: BenchInputs, teacher: Teacher) -> Golden:
    """Computes divergences, entropies and gradients by dense float64 code, in chunks of tokens."""
    weight, of_teacher = inputs.weight.double(), teacher.weight.double()
    T, count = teacher.temperature, len(inputs.hidden)
    stored = torch.promote_types(inputs.hidden.dtype, torch.float32)
    grad_hidden = torch.empty_like(inputs.hidden, dtype=stored)
    grad_weight = torch.zeros_like(weight)
    results = []
    chunk = max(64, min(2048, CHUNK_ELEMENTS // len(weight)))
    for tokens in torch.arange(count, device=weight.device).split(chunk):
        rows = inputs.hidden[tokens].double()
        log_q = (rows @ weight.T).div_(T).log_softmax(-1)
        log_p = (teacher.hidden[tokens].double() @ of_teacher.T).div_(T).log_softmax(-1)
        value = divergence_of(log_q, log_p, teacher.divergence)
        results.append((value, -(log_p.exp() * log_p).sum(-1)))
        grad = _derivative_of(log_q, log_p, teacher.divergence).div_(T * count)
        grad_hidden[tokens] = (grad @ weight).to(stored)
        grad_weight.addmm_(grad.T, rows)
    value, entropy = (torch.cat(parts) for parts in zip(*results, strict=True))
    return Golden(value, entropy, Gradients(value.mean(), grad_hidden, grad_weight.to(stored)))


def _derivative_of(log_q: Tensor, log_p: Tensor, divergence: Measured) -> Tensor:
    """Computes a token's derivative by the student's logits over the temperature, [n, V].

    Source: docs/design/distillation.md#the-divergences-and-their-gradients.
    """
    q = log_q.exp()
    if divergence == "forward_kl":
        return q.sub_(log_p.exp())
    is_jsd = divergence == "jsd"
    slope = log_q - (log_mixture(log_q, log_p) if is_jsd else log_p)
    centred = slope.sub_((q * slope).sum(-1, keepdim=True)).mul_(q)
    return centred.mul_(1 - JSD_BETA) if is_jsd else centred


def bench_distill(
    inputs: BenchInputs,
    teacher: Teacher,
    golden: Golden,
    names: Sequence[str],
    settings: Settings,
    *,
    failed: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Cells]:
    """Returns rows of the groups of tokens and ids, then those of all tokens.

    Part "loss" is the forward without grad. `products` and `cross-entropy` are measured in turns
    with the methods.

    Raises:
        DeviceLostError: a method broke the CUDA context.
    """
    build = functools.cache(lambda name: CONTENDERS[name].build(teacher))
    builders: dict[str, Callable[[Any], Any]] = {
        name: lambda _, make=make: make(teacher) for name, make in REFERENCES.items()
    }
    builders |= {name: lambda _, each=name: build(each).loss for name in names}

    def save(rows: Sequence[Cells]) -> None:
        unknown = dict.fromkeys(GRADIENT_ERRORS) if rows[-1]["method"] in REFERENCES else {}
        say(progress_of({**rows[-1], **unknown}))

    timed = bench_loss(
        inputs,
        [Method(name, "peer", builder) for name, builder in builders.items()],
        replace(settings, parts=("loss", "loss+grad"), host=False, strict=False),
        save=save,
        failed=failed,
        make_reference=lambda _: Reference(golden.gradients, {}),
    )
    groups = groups_by_entropy_and_frequency(golden.entropy, inputs)
    whole, parts = [], []
    for row in timed:
        if row["method"] not in builders:
            continue
        cells = {**dict.fromkeys(COLUMNS), "method": row["method"], "group": ALL, "note": ""}
        peak = row["over_gradients_mib"] if row["part"] == "loss+grad" else row["peak_extra_mib"]
        cells |= {name: row[name] for name in TIMED} | {"peak_extra_mib": peak}
        if row["method"] in REFERENCES:
            cells["note"] = NOTES[row["method"]]
        else:
            cells["loss_error"] = row.get("loss_error")
        whole.append(cells)
    for name in names:
        mine = [row for row in whole if row["method"] == name and not row["failed"]]
        if not mine:
            continue
        note = CONTENDERS[name].note
        for group, cells in compare(build(name), inputs, golden, groups).items():
            if group == ALL:
                for row in mine:
                    row |= {**cells, "note": note}
            else:
                about = {"method": name, "part": "", "group": group, "note": note, "failed": ""}
                parts.append({**dict.fromkeys(COLUMNS), **about, **cells})
    add_ratios(whole, CONTENDERS)
    add_of_bound(whole)
    return [*parts, *whole]


def groups_by_entropy_and_frequency(entropy: Tensor, inputs: BenchInputs) -> list[Group]:
    """Returns the group of all tokens, `groups_of` with tenths, and tenths of tokens by entropy.

    The latter go from "entropy 1", where the teacher's entropy is least, to "entropy 10"; the ids
    of each are its tokens' targets.
    """
    by_entropy = [
        replace(group, name=f"entropy {group.name}")
        for group in tenths_by_probability(-entropy, inputs)
        if group.name != ALL
    ]
    return [*groups_of(inputs, tenths=True), *by_entropy]


def compare(
    built: Built, inputs: BenchInputs, golden: Golden, groups: Sequence[Group]
) -> dict[str, Cells]:
    """Returns the cells of each group's errors against float64; ids may have no token."""
    gradient_errors = compare_groups(gradients(built.loss, inputs), golden.gradients, list(groups))
    off = None
    if built.tokens is not None:
        # A compiler would take other tensors than those of part "loss" for a new case.
        tensors = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
        with torch.no_grad():
            off = built.tokens(*tensors).double() - golden.divergence
    cells: dict[str, Cells] = {}
    for group in groups:
        row: dict[str, Any] = {name: gradient_errors[group.name][name] for name in GRADIENT_ERRORS}
        if group.tokens.any():
            row["kl"] = float(golden.divergence[group.tokens].mean())
            row["entropy"] = float(golden.entropy[group.tokens].mean())
            if off is not None:
                row["kl_error"] = float(off[group.tokens].square().mean().sqrt())
        cells[group.name] = row
    return cells


def add_of_bound(rows: Sequence[dict[str, Any]]) -> None:
    """Adds each time over that of what no distillation can do without.

    These are both models' bare products, and with gradients the backward of the student's
    cross-entropy: its loss with gradients less its loss.
    """
    times = {
        (row["method"], row["part"]): row["median_ms"]
        for row in rows
        if row["method"] in REFERENCES and not row["failed"]
    }
    forward = times.get((PRODUCTS, "loss"), math.nan)
    whole, loss = (times.get((CROSS_ENTROPY, part), math.nan) for part in ("loss+grad", "loss"))
    bounds = {"loss": forward, "loss+grad": forward + whole - loss}
    for row in rows:
        bound = bounds.get(row["part"], math.nan)
        if row["median_ms"] is not None and not math.isnan(bound):
            row["of_bound"] = row["median_ms"] / bound
