"""Benchmark of log-probabilities with entropy and accuracy, under a policy's gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import add_ratios
from benchmarks.fidelity.tenths import ALL, Group, compare_groups
from benchmarks.rl.contenders import CONTENDERS, Built, Policy, draw_policy
from cce_dist import TokenLogprobs
from cce_dist.bench.golden import CHUNK_ELEMENTS, GRADIENT_ERRORS, Gradients, Reference, gradients
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import Settings, bench_loss
from cce_dist.bench.methods import Method
from cce_dist.bench.report import Cells

# Columns of a row. "all" has a row for each part; a tenth has one. `least_p` and `most_p` are the
# probabilities of its targets. `logprob_error` and `entropy_error` are root mean squares in nats,
# `logprob_worst` the largest; `correct_off` is the share of tokens whose accuracy differs. Errors
# of gradients are relative, in the Frobenius norm: of its tokens, and of its targets' rows.
COLUMNS = (
    *("method", "part", "tenth", "least_p", "most_p", "repeats", "median_ms", "p10_ms", "p90_ms"),
    *("of_fastest_peer", "of_roofline", "peak_extra_mib", "logprob_error", "logprob_worst"),
    *("entropy_error", "correct_off", "grad_hidden_error", "grad_weight_error", "note", "failed"),
)
TIMED = ("part", "repeats", "median_ms", "p10_ms", "p90_ms", "of_roofline", "peak_extra_mib")
NUM_TENTHS = 10


def bench_logprobs(
    inputs: BenchInputs,
    names: Sequence[str],
    settings: Settings,
    *,
    failed: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Cells]:
    """Returns rows of the tenths by the target's probability, then those of all tokens.

    Part "loss" is the forward without grad. The upstream gradient is that of `Policy`: normal
    advantages, and the entropy's weight where a method has the entropy. Float64 code has the same
    loss. Ignored tokens are removed first.

    Raises:
        DeviceLostError: a method broke the CUDA context.
    """
    inputs = inputs.without_ignored()
    policy = draw_policy(len(inputs.targets), inputs.hidden.device)
    build = functools.cache(lambda name: CONTENDERS[name].build(policy))
    golden = {
        True: golden_of(inputs, policy),
        False: golden_of(inputs, replace(policy, entropy_weight=0.0)),
    }

    def save(rows: Sequence[Cells]) -> None:
        say(f"{rows[-1]['method']}: {rows[-1]['failed'] or 'measured'}")

    timed = bench_loss(
        inputs,
        [Method(name, "peer", lambda _, each=name: build(each).loss) for name in names],
        replace(settings, parts=("loss", "loss+grad"), host=False, strict=False),
        save=save,
        failed=failed,
        # The errors below take the place of these.
        make_reference=lambda _: Reference(golden[True][1], {}),
    )
    groups = tenths_by_probability(golden[True][0].logprobs, inputs)
    whole, tenths = [], []
    for row in timed:
        cells = {**dict.fromkeys(COLUMNS), "method": row["method"], "tenth": ALL, "note": ""}
        whole.append(cells | {name: row[name] for name in TIMED} | {"failed": row["failed"]})
    for name in names:
        mine = [row for row in whole if row["method"] == name and not row["failed"]]
        if not mine:
            continue
        note, entropy = CONTENDERS[name].note, CONTENDERS[name].entropy
        for tenth, cells in compare(build(name), inputs, *golden[entropy], groups).items():
            if tenth == ALL:
                for row in mine:
                    row |= {**cells, "note": note}
            else:
                about = {"method": name, "part": "", "tenth": tenth, "note": note, "failed": ""}
                tenths.append({**dict.fromkeys(COLUMNS), **about, **cells})
    add_ratios(whole, CONTENDERS)
    return [*tenths, *whole]


@torch.no_grad()
def golden_of(inputs: BenchInputs, policy: Policy) -> tuple[TokenLogprobs, Gradients]:
    """Computes log-probabilities, entropy, accuracy, loss and gradients by dense float64 code.

    It takes some tokens at a time. The gradients are stored in fp32 unless inputs are float64.
    """
    weight, count = inputs.weight.double(), len(inputs.targets)
    grad_weight = torch.zeros_like(weight)
    grad_hidden = torch.empty_like(
        inputs.hidden, dtype=torch.promote_types(inputs.hidden.dtype, torch.float32)
    )
    results = []
    chunk = max(64, min(2048, CHUNK_ELEMENTS // len(weight)))
    for tokens in torch.arange(count, device=weight.device).split(chunk):
        rows, ids = inputs.hidden[tokens].double(), inputs.targets[tokens]
        logits = rows @ weight.T
        correct = logits.argmax(-1) == ids
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1)
        advantages = policy.advantages[tokens].double() / count
        results.append((log_p.gather(1, ids[:, None])[:, 0], entropy, correct))
        # The gradient of -A log p - w H by the logits is p (A + w (log p + H)) - A at the target.
        grad = log_p.add_(entropy[:, None]).mul_(policy.entropy_weight / count)
        grad.add_(advantages[:, None]).mul_(p)
        grad[torch.arange(len(ids), device=ids.device), ids] -= advantages
        grad_hidden[tokens] = (grad @ weight).to(grad_hidden.dtype)
        grad_weight.addmm_(grad.T, rows)
    logprobs, entropy, correct = (torch.cat(parts) for parts in zip(*results, strict=True))
    result = TokenLogprobs(logprobs, entropy, correct=correct)
    loss = policy.loss_of(lambda *_: result)(inputs.hidden, inputs.weight, inputs.targets)
    return result, Gradients(loss, grad_hidden, grad_weight.to(grad_hidden.dtype))


def tenths_by_probability(logprobs: Tensor, inputs: BenchInputs) -> list[Group]:
    """Returns the group of all tokens, then "1" (the most probable targets) to "10".

    A group's ids are its tokens' targets; an id may be in several.
    """
    ranked = logprobs.argsort(descending=True, stable=True)
    groups = []
    for name, some in [(ALL, ranked), *enumerate(ranked.tensor_split(NUM_TENTHS), 1)]:
        tokens = torch.zeros_like(logprobs, dtype=torch.bool)
        tokens[some] = True
        ids = tokens.new_zeros(len(inputs.weight))
        ids[inputs.targets[some]] = True
        if name == ALL:
            ids[:] = True
        groups.append(Group(str(name), ids, tokens))
    return groups


def compare(
    built: Built,
    inputs: BenchInputs,
    result: TokenLogprobs,
    golden: Gradients,
    groups: list[Group],
) -> dict[str, Cells]:
    """Returns the cells of each group's errors against float64."""
    gradient_errors = compare_groups(gradients(built.loss, inputs), golden, groups)
    ours = None
    if built.tokens is not None:
        with torch.no_grad():
            ours = built.tokens(inputs.hidden, inputs.weight, inputs.targets)
    cells: dict[str, Cells] = {}
    for group in groups:
        chosen = result.logprobs[group.tokens]
        if not len(chosen):
            continue
        row: dict[str, Any] = {
            "least_p": float(chosen.min().exp()),
            "most_p": float(chosen.max().exp()),
            **{name: gradient_errors[group.name][name] for name in GRADIENT_ERRORS},
        }
        if ours is not None:
            row |= _token_errors(ours, result, group.tokens)
        cells[group.name] = row
    return cells


def _token_errors(ours: TokenLogprobs, golden: TokenLogprobs, tokens: Tensor) -> Cells:
    off = (ours.logprobs.double() - golden.logprobs)[tokens]
    cells = {
        "logprob_error": float(off.square().mean().sqrt()),
        "logprob_worst": float(off.abs().max()),
    }
    if ours.entropy is not None and golden.entropy is not None:
        off = (ours.entropy.double() - golden.entropy)[tokens]
        cells["entropy_error"] = float(off.square().mean().sqrt())
    if ours.correct is not None and golden.correct is not None:
        cells["correct_off"] = float((ours.correct != golden.correct)[tokens].double().mean())
    return cells
