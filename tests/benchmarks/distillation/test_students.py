"""`bench students`: the losses, a tiny run shared by two processes, and the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.distillation import student_losses
from benchmarks.distillation.inputs import Teacher
from benchmarks.distillation.student_losses import DIVERGENCES, METHODS, TOP_K
from benchmarks.distillation.students import StudentPlan, StudentSizes, student_loss
from benchmarks.evidence.distillation import comparisons_of, summarize, times_of
from benchmarks.evidence.records import read_record
from benchmarks.evidence.report import page_of
from cce_dist.reference import divergence_reference
from cce_dist.train.data.batches import Batches
from tests.benchmarks.bench_cases import refuse, write_texts
from tests.support.torchrun import run_forked

pytest.importorskip("tokenizers")

TINY = (
    *("--vocab", "300", "--seed", "0", "--seed", "1", "--dim", "16", "--layers", "1"),
    *("--teacher-dim", "32", "--teacher-layers", "1", "--teacher-steps", "30", "--batch", "2"),
    *("--sequence-length", "16", "--steps", "12", "--evaluations", "2", "--held-out-tokens", "64"),
    *("--warmup", "1", "--lr", "0.01", "--teacher-lr", "0.01", "--threads", "1"),
)


def reference(
    divergence: str, hidden: torch.Tensor, weight: torch.Tensor, targets: Any, teacher: Teacher
) -> torch.Tensor:
    logits, of_teacher = hidden @ weight.T, teacher.hidden @ teacher.weight.T
    if divergence == "cross_entropy":
        return torch.nn.functional.cross_entropy(logits, targets)
    if divergence != "topk":
        return divergence_reference(logits, of_teacher, divergence).mean()
    ids = of_teacher.topk(TOP_K, -1).indices
    both = []
    for each in (logits, of_teacher):
        listed = each.softmax(-1).gather(-1, ids)
        both.append(torch.cat([listed, 1 - listed.sum(-1, keepdim=True)], -1).log())
    return divergence_reference(both[0], both[1], "forward_kl").mean()


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("method", METHODS)
def test_losses_and_gradients_are_the_references(
    method: str, divergence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several chunks, the last one shorter.
    monkeypatch.setattr(student_losses, "CHUNK", 20)
    sizes = ((48, 16), (200, 16), (48, 24), (200, 24))
    tensors = [torch.randn(size, dtype=torch.float64) / size[1] ** 0.25 for size in sizes]
    targets, teacher = torch.randint(200, (48,)), Teacher(*tensors[2:])
    functions: list[Any] = [METHODS[method], reference]
    results = []
    for function in functions:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:2]]
        is_alone = divergence == "cross_entropy" and function is not reference
        loss = function(divergence, *leaves, targets, None if is_alone else teacher)
        loss.backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for computed, expected in zip(*results, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-6, atol=1e-9)


def test_the_teacher_gets_the_tokens_of_the_step() -> None:
    batches = Batches(torch.arange(50).numpy(), torch.arange(9).numpy(), 3, 2, 8)

    class Same:
        def on(self, ids: torch.Tensor) -> Any:
            return ids

    def returned(divergence: str, *tensors: Any) -> Any:
        return tensors[-1]

    teacher: Any = Same()
    loss = student_loss(returned, "jsd", teacher, batches)
    for step in (1, 2):
        ids, targets = batches.step(step, 0, 1)
        assert loss(ids, ids, targets.flatten()).equal(ids)
    with pytest.raises(RuntimeError, match="the tokens of the student's step"):
        loss(ids, ids, targets.flatten())


@pytest.mark.timeout(120)
def test_the_command(tmp_path: Path) -> None:
    write_texts(tmp_path / "text")
    path = tmp_path / "evidence" / "tiny.json"
    folders = ("--data", str(tmp_path / "text"), "--cache", str(tmp_path / "cache"))
    command = ("bench", "students", *TINY, *folders, "--record", str(path))
    code, output = run_forked(1, tmp_path / "a.out", *command, "--slice", "1/2")
    assert code == 0 and output.count("training the checkpoint") == 1, output
    before = read_record(path).rows
    # Every second group, of two seeds: those of seed 1.
    assert {row["seed"] for row in before if row["part"] == "run"} == {1}
    code, output = run_forked(1, tmp_path / "b.out", *command)
    assert code == 0 and "training the checkpoint" not in output, output
    assert f"written: {path}" in output and "in spreads" in output
    record = read_record(path)
    assert record.rows[: len(before)] == before
    parts = [row["part"] for row in record.rows]
    num_runs = len(DIVERGENCES) * len(METHODS) * 2
    assert [parts.count(name) for name in ("teacher", "run", "curve")] == [
        1,
        num_runs,
        3 * num_runs,
    ]
    assert not any("failed" in row for row in record.rows)
    # Below 4096 ids the filter keeps all: the methods differ by rounding.
    for each in comparisons_of(record.rows):
        for method in ("ours", "reordered"):
            assert each.differences(method) == pytest.approx([0, 0], abs=1e-4), each
        assert set(each.values["dense"]) == {0, 1}
    check_what_was_learned(record.rows)
    text = page_of("distillation", [record])
    assert "The teacher's held-out loss after 30 steps" in text and "| cross_entropy |" in text


def check_what_was_learned(rows: Any) -> None:
    curves = {
        (row["divergence"], row["method"], row["seed"], row["step"]): row
        for row in rows
        if row["part"] == "curve"
    }
    for (divergence, method, seed, step), row in curves.items():
        first = curves["jsd", "dense", seed, 0]
        if step == 0:
            # The same first weights and the same teacher for all.
            assert (row["all"], row["kl"]) == (first["all"], first["kl"])
        if step == 12:
            assert row["all"] < first["all"] and row["kl"] < first["kl"], (divergence, method)
    assert curves["jsd", "dense", 0, 0]["all"] != curves["jsd", "dense", 1, 0]["all"]
    ends = [curves[name, "dense", 0, 12]["all"] for name in DIVERGENCES]
    assert len(set(ends)) == len(ends)


def test_the_comparison_is_taken_by_seed() -> None:
    def row(method: str, seed: int, loss: float, step: int = 8) -> dict[str, Any]:
        about = {"vocab": 300, "divergence": "jsd", "method": method, "seed": seed}
        return {"part": "curve", **about, "step": step, "all": loss, "kl": loss / 2}

    run = {"part": "run", "vocab": 300, "divergence": "jsd", "method": "dense", "parameters": 9}
    rows = [
        *(row("dense", seed, loss) for seed, loss in enumerate((2.0, 3.0, 4.0))),
        *(row("ours", seed, loss) for seed, loss in ((0, 9.0), (2, 4.5), (0, 2.25))),
        *(row("ours", 0, 7.0, step) for step in (0, 4)),
        row("reordered", 1, 3.125),
        *({**run, "seed": seed, "median_step_ms": 2.0 + seed} for seed in (0, 2)),
        {**run, "seed": 1, "failed": "out of memory"},
    ]
    loss, kl = summarize(rows)
    # The later run of seed 0 counts, and seed 1 has no partner.
    assert (loss["seeds"], loss["dense"], loss["dense's spread"]) == ("2", "3.0000", "1.0000")
    assert (loss["ours - dense"], loss["by seed"]) == ("+0.37500", "+0.2500 +0.5000")
    assert loss["reordered - dense by seed"] == "+0.1250"
    assert (loss["in spreads"], kl["in spreads"]) == ("+0.38", "+0.38")
    assert [each["step"] for each in summarize(rows, last_step=False)] == ["4", "8"] * 2
    assert summarize(rows, last_step=False)[0]["in spreads"] == ""
    (times,) = times_of(rows)
    assert (times["step_ms"], times["runs"], times["why not"]) == ("3.00", "3", "out of memory")


def test_sizes_and_groups() -> None:
    sizes = StudentSizes()
    student, teacher = sizes.student, sizes.teacher
    assert (student.dim, student.steps, student.marks) == (384, 300, (0, 100, 200, 300))
    assert (teacher.dim, teacher.layers, teacher.steps, teacher.lr) == (1024, 8, 1000, 6e-4)
    assert student.tied and teacher.tied and teacher.batch == student.batch
    everything = ((300, 400), DIVERGENCES, ("dense",), (0, 1, 2))
    groups = list(StudentPlan(*everything).groups())
    parts = [list(StudentPlan(*everything, (k, 4)).groups()) for k in range(4)]
    assert sorted(group for part in parts for group in part) == sorted(groups)
    assert [len(part) for part in parts] == [6] * 4
    # A process that has every fourth group has several divergences: their steps differ in time.
    assert all(len({group.divergence for group in part}) == 3 for part in parts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--divergence", "tvd"], "divergence must be among", id="divergence"),
        pytest.param(["--method", "filtered"], "method must be among", id="method"),
        pytest.param(["--slice", "2/2"], "slice must be K/N with 0 <= K < N", id="slice"),
        pytest.param(["--evaluations", "500"], "evaluations must be <= steps=300", id="marks"),
        pytest.param(["--record", "a/B.json"], "record must be the path of a .json", id="record"),
        pytest.param(
            ["--record", "a/b.json", "--cache", "a"], "must not lie in the folder", id="folders"
        ),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    assert message in refuse("students", *arguments)
