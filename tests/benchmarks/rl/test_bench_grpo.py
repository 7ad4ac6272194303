"""`bench grpo`: the task, and two steps of tiny runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.benchmarks.bench_cases import invoke, read_csv, refuse

pytest.importorskip("transformers")

from benchmarks.rl.addition import CHARACTERS, Adder, Task, rewards_of, sample, warm_up

TINY = ("--vocab", "120", "--dim", "32", "--layers", "1", "--prompts", "4", "--device", "cpu")
TASK = Task(120, torch.device("cpu"))


def text_of(ids: list[int]) -> str:
    return "".join(CHARACTERS[(token - 1) // (TASK.vocab // len(CHARACTERS))] for token in ids)


def test_answers_are_the_sums() -> None:
    prompts, answers = TASK.draw(20, torch.Generator().manual_seed(0))
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        terms, rest = text_of(prompt).split("=")
        assert rest == "" and sum(map(int, terms.split("+"))) == int(text_of(answer))
    ids = torch.cat([prompts, answers], 1)
    assert rewards_of(ids, answers).eq(1).all()
    ids[3, -1] += 1
    assert rewards_of(ids, answers).sum() == 19
    assert prompts.shape[1] == TASK.prompt_length


def test_warm_up_ends_at_its_reward() -> None:
    torch.manual_seed(0)
    model = Adder(TASK.vocab, 32, 1, torch.float32)
    generator = torch.Generator().manual_seed(0)
    before = {name: value.clone() for name, value in model.named_parameters()}
    assert warm_up(model, TASK, generator, most_steps=5, until=0.0) == 0
    assert all(before[name].equal(value) for name, value in model.named_parameters())
    assert warm_up(model, TASK, generator, most_steps=2, until=2.0) == 2
    assert not all(before[name].equal(value) for name, value in model.named_parameters())
    prompts, _ = TASK.draw(6, generator)
    ids = sample(model, prompts, generator)
    assert ids.shape == (6, 9) and ids[:, :6].equal(prompts) and ids.min() >= 0


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    steps = ("--steps", "2", "--warm-up", "1", "--seed", "3", "--seed", "4")
    output = invoke("grpo", *TINY, *steps, "--dtype", "float32", "--csv", str(path))
    rows = read_csv(path)
    runs = [(row["seed"], row["method"], row["step"]) for row in rows]
    methods = ("dense", "filtered")
    assert runs == [(s, m, step) for s in ("3", "4") for m in methods for step in ("0", "1")]
    for dense, ours in zip(rows[0:2], rows[2:4], strict=True):
        for name in ("reward", "entropy", "clipped"):
            assert float(dense[name]) == pytest.approx(float(ours[name]), rel=1e-3), name
        assert float(dense["entropy"]) > 0 and float(dense["kl"]) >= 0
    assert "last_reward" in output
    invoke("grpo", *TINY, "--steps", "1", "--warm-up", "1", "--seed", "3", "--method", "exact")
    assert "method must be among" in refuse("grpo", *TINY, "--method", "screened")
    assert "dtype must name a torch dtype" in refuse("grpo", *TINY, "--dtype", "float33")
