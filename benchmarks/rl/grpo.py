"""GRPO runs of a small model that adds numbers, with dense log-probabilities and with ours."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.rl.addition import Adder, Task, rewards_of, sample, warm_up
from benchmarks.rl.contenders import TokenFunction, dense, ours
from cce_dist import TokenLogprobs, rl
from cce_dist.bench.report import Cells

METHODS: dict[str, TokenFunction] = {
    "dense": dense,
    "filtered": ours("filtered"),
    "exact": ours("exact"),
}
SAMPLES, EPOCHS, CLIP, KL_WEIGHT = 8, 2, 0.2, 0.01
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
# Mean reward that ends the supervised warm-up.
FIRST_REWARD = 0.15
# Steps whose means a summary compares: the first and the last of a run.
SUMMARY_STEPS = 10


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Args:
        steps: of GRPO, each with `prompts` prompts, 8 answers to each and 2 epochs.
        warm_up: most supervised steps before them.
        dtype: of hidden states and head, and of autocast in the model.
    """

    steps: int
    warm_up: int
    prompts: int
    vocab: int
    dim: int
    layers: int
    device: torch.device
    dtype: torch.dtype


def bench_grpo(
    plan: Plan,
    methods: Sequence[str],
    seeds: Sequence[int],
    *,
    save: Callable[[list[Cells]], None] = lambda rows: None,
) -> list[Cells]:
    """Returns a row for each step of each run: the reward of its samples, and its last epoch's KL
    from the model after the warm-up and from the sampler, entropy and clipped share.

    The methods start a seed with the same weights, prompts and random numbers. The sampler has
    dense logits in any run; log-probabilities before, now and of the reference are the method's.

    Args:
        save: called with all rows so far after every run.
    Raises:
        ValueError: a method is unknown.
    """
    if unknown := sorted(set(methods) - set(METHODS)):
        raise ValueError(f"method must be among {list(METHODS)}, got {unknown}")
    rows: list[Cells] = []
    for seed in seeds:
        torch.manual_seed(seed)
        task = Task(plan.vocab, plan.device)
        start = Adder(plan.vocab, plan.dim, plan.layers, plan.dtype).to(plan.device)
        generator = torch.Generator(plan.device).manual_seed(seed)
        taken = warm_up(start, task, generator, most_steps=plan.warm_up, until=FIRST_REWARD)
        for name in methods:
            about = {"method": name, "seed": seed, "warm_up": taken}
            generator = torch.Generator(plan.device).manual_seed(seed + 1)
            model = copy.deepcopy(start)
            for step in _run(model, start, task, METHODS[name], generator, plan):
                rows.append({**about, **step})
            save(rows)
    return rows


def _run(
    model: Adder,
    reference: Adder,
    task: Task,
    tokens: TokenFunction,
    generator: torch.Generator,
    plan: Plan,
) -> list[Cells]:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    rows: list[Cells] = []
    for step in range(plan.steps):
        started = time.perf_counter()
        prompts, answers = (
            drawn.repeat_interleave(SAMPLES, 0) for drawn in task.draw(plan.prompts, generator)
        )
        ids = sample(model, prompts, generator)
        rewards = rewards_of(ids, answers)
        advantages = rl.group_advantages(rewards, SAMPLES)
        mask = torch.ones_like(answers, dtype=torch.bool)
        with torch.no_grad():
            before = _logprobs(model, ids, task, tokens).logprobs
            of_reference = _logprobs(reference, ids, task, tokens).logprobs
        for _ in range(EPOCHS):
            result = rl.grpo_loss(
                _logprobs(model, ids, task, tokens),
                before,
                advantages,
                mask=mask,
                clip=CLIP,
                reference=of_reference,
                kl_weight=KL_WEIGHT,
            )
            result.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        assert result.kl_reference is not None and result.entropy is not None
        rows.append(
            {
                "step": step,
                "reward": float(rewards.mean()),
                "kl": float(result.kl_reference),
                "kl_before": float(result.kl_before),
                "entropy": float(result.entropy),
                "clipped": float(result.clipped),
                "seconds": time.perf_counter() - started,
            }
        )
    return rows


def _logprobs(model: Adder, ids: Tensor, task: Task, tokens: TokenFunction) -> TokenLogprobs:
    """Returns the method's values of the answers' tokens, [B, 3] each."""
    answers = ids[:, task.prompt_length :]
    hidden, weight = model(ids[:, :-1])
    hidden = hidden[:, task.prompt_length - 1 :]
    result = tokens(hidden.flatten(0, 1), weight, answers.flatten())
    assert result.entropy is not None
    shape = answers.shape
    return TokenLogprobs(result.logprobs.view(shape), result.entropy.view(shape))


def summarize(rows: Sequence[Cells]) -> list[Cells]:
    """Returns a row for each run: means over its first and last steps, and the seconds of all."""
    summary: list[Cells] = []
    for method, seed in dict.fromkeys((row["method"], row["seed"]) for row in rows):
        run = [row for row in rows if (row["method"], row["seed"]) == (method, seed)]
        first, last = run[:SUMMARY_STEPS], run[-SUMMARY_STEPS:]

        def mean(name: str, some: Sequence[Cells] = last) -> float:
            return fmean(row[name] for row in some)

        cells: dict[str, Any] = {"method": method, "seed": seed, "warm_up": run[0]["warm_up"]}
        cells |= {"first_reward": mean("reward", first), "last_reward": mean("reward")}
        cells |= {name: mean(name) for name in ("kl", "kl_before", "entropy", "clipped")}
        summary.append({**cells, "seconds": sum(row["seconds"] for row in run)})
    return summary
