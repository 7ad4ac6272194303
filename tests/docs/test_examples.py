"""The scripts of docs/examples: each runs, and computes what dense logits would."""

from __future__ import annotations

import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist import TeacherLogprobs
from tests.support.torchrun import run_forked

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
# Of instance_classes.
LOSSES = ("filtered", "dense")


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


def check(ours: list[Tensor], dense: list[Tensor]) -> None:
    for each, expected in zip(ours, dense, strict=True):
        error = torch.linalg.vector_norm(each - expected) / torch.linalg.vector_norm(expected)
        assert error < 1e-5


def test_every_example_is_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tested


def test_frozen_head(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("frozen_head")
    model = example["LanguageModel"]()
    model.head.requires_grad_(False)
    body = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ids = example["make_text"](torch.Generator().manual_seed(1))
    logits = model.head(model(ids)[:, :-1])
    dense = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss = example["compute_loss"](model, ids)
    assert loss.item() == pytest.approx(dense.item(), rel=1e-6)
    check(gradients(loss, body), gradients(dense, body))
    found = example["main"]()
    assert found["losses"][-1] < found["losses"][0] - 2
    assert found["unchanged"]
    saved = found["memory"]["trained head"] - found["memory"]["frozen head"]
    weight_bytes = model.head.weight.nbytes
    # Less what the loss holds when a frozen head's peak is.
    assert 0.8 * weight_bytes < saved <= weight_bytes
    assert "head unchanged, without a gradient: True" in capsys.readouterr().out


def test_lora_head(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("lora_head")
    num_classes, dim, rank, scale = 300, 16, 4, 2.0
    weight, hidden = torch.randn(num_classes, dim), torch.randn(50, dim, requires_grad=True)
    targets = torch.randint(num_classes, (50,))
    head = example["LoraHead"](weight, rank, scale)
    with torch.no_grad():
        head.b.normal_()
    a, b = (each.detach().clone().requires_grad_() for each in (head.a, head.b))
    dense = F.cross_entropy(hidden @ (weight + scale * b @ a).T, targets)
    expected = gradients(dense, [hidden, a, b])
    merged = example["merged_loss"](hidden, weight, a, b, targets, scale)
    check(gradients(merged, [hidden, a, b]), expected)
    loss = head(hidden, targets)
    assert loss.item() == pytest.approx(dense.item(), rel=1e-6)
    loss.backward()
    check([hidden.grad, head.a.grad, head.b.grad], expected)
    assert head.wide.grad is None
    # Gradients of another batch add up, as a parameter's do.
    head(hidden, targets).backward()
    check([head.b.grad], [2 * expected[2]])
    found = example["main"]()
    assert found["losses"][-1] < found["losses"][0] - 2
    assert found["frozen"]
    assert found["memory"]["columns beside"] < found["memory"]["merged"]
    assert "W unchanged: True" in capsys.readouterr().out


def test_grpo_logprobs(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("grpo_logprobs")
    policy, other = example["Policy"](), example["Policy"]()
    reference = example["Policy"]()
    ids = torch.randint(example["VOCAB"], (6, 10))
    is_response = torch.arange(10) >= torch.randint(1, 9, (6, 1))
    advantages = torch.randn(6)

    def dense_logprobs(policy: Any) -> Tensor:
        logits = policy.head(policy(ids[:, :-1])) / example["TEMPERATURE"]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    counts = is_response[:, 1:]
    leaves = list(policy.parameters())
    now, before, of_reference = (
        example["logprobs"](each, ids, is_response) for each in (policy, other, reference)
    )
    expected = dense_logprobs(policy)
    torch.testing.assert_close(now.logprobs[counts], expected[counts])
    assert not now.logprobs[~counts].any()
    arguments = (before.logprobs, of_reference.logprobs, advantages, counts)
    result = example["compute_loss"](now, *arguments)
    loss, kl = result.loss, result.kl_reference
    ratio = (expected - dense_logprobs(other).detach()).exp()
    gap = dense_logprobs(reference).detach() - expected
    divergence = (gap.exp() - gap - 1).detach()
    each = torch.zeros(())
    for row in range(6):
        a, r = advantages[row], ratio[row]
        gain = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
        penalty = 0.04 * (gap[row].exp() - gap[row] - 1)
        each = each + (penalty - gain)[counts[row]].mean() / 6
    assert loss.item() == pytest.approx(each.item(), rel=1e-5)
    assert kl.item() == pytest.approx(divergence[counts].mean().item(), rel=1e-4)
    check(gradients(loss, leaves), gradients(each, leaves))
    found = example["main"]()
    assert found["rewards"][-1] > found["rewards"][0] + 0.2
    assert found["kl"][-1] > 0
    assert "mean reward" in capsys.readouterr().out


def test_gemma(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("gemma")
    model, cap = example["TiedModel"](), example["SOFTCAP"]
    leaves = list(model.parameters())
    ids = torch.randint(example["VOCAB"], (4, 20))
    with torch.no_grad():
        # Logits that the cap bends.
        model.norm.weight.mul_(5)
    logits = cap * torch.tanh(model(ids)[:, :-1] @ model.embedding.weight.T / cap)
    assert logits.abs().max() > 0.9 * cap
    lse = logits.logsumexp(-1)
    dense = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    dense = dense + 1e-2 * lse.square().mean()
    out = example["compute_loss"](model, ids, 1e-2)
    assert out.loss.item() == pytest.approx(dense.item(), rel=1e-6)
    torch.testing.assert_close(out.lse, lse)
    check(gradients(out.loss, leaves), gradients(dense, leaves))
    found = example["main"]()
    assert all(figures["largest logit"] <= cap for figures in found.values())
    sizes = [abs(figures["log-sum-exp"]) for figures in found.values()]
    assert sizes[-1] < sizes[0]
    assert f"of at most {cap:g}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_distill_trainer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    example = load("distill_trainer")
    student, teacher = example["model_of"](16), example["model_of"](24)
    arguments = example["TrainingArguments"](str(tmp_path), use_cpu=True, report_to="none")
    trainer = example["DistillationTrainer"](teacher, model=student, args=arguments, alpha=0.2)
    ids = torch.randint(example["VOCAB"], (3, 9))
    labels = ids.masked_fill(torch.rand(3, 9) < 0.3, -100)
    counts, num_tokens = labels[:, 1:] != -100, 20
    logits = student(ids).logits[:, :-1][counts]
    of_teacher = teacher(ids).logits[:, :-1][counts].detach()
    log_q, log_p = (x.div(2.0).log_softmax(-1) for x in (logits, of_teacher))
    kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    dense = 0.8 * kl + 0.2 * F.cross_entropy(logits, labels[:, 1:][counts], reduction="sum")
    inputs = {"input_ids": ids, "labels": labels}
    loss = trainer.compute_loss(student, inputs, num_items_in_batch=num_tokens)
    assert loss.item() == pytest.approx(dense.item() / num_tokens, rel=1e-6)
    leaves = list(student.parameters())
    check(gradients(loss, leaves), gradients(dense / num_tokens, leaves))
    mean = trainer.compute_loss(student, inputs)
    assert mean.item() == pytest.approx(dense.item() / counts.sum().item(), rel=1e-6)
    outputs = student(ids, output_hidden_states=True, logits_to_keep=1)
    outputs.logits = 30 * torch.tanh(outputs.logits / 30)
    with pytest.raises(ValueError, match="LlamaForCausalLM has a softcap, a scale or an adapter"):
        example["parts_of"](student, outputs)
    losses = example["main"]()
    assert losses[-1] < losses[0]
    assert "without logits" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trains", [True, False], ids=["trains", "frozen"])
def test_distill_trainer_refuses_lora_on_the_head(trains: bool) -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    example = load("distill_trainer")
    # LoRA's product is 0 at first, unless init_lora_weights is False.
    lora = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=trains)
    model = peft.get_peft_model(example["model_of"](16), lora).requires_grad_(trains)
    ids = torch.randint(example["VOCAB"], (3, 9))
    outputs = model(ids, output_hidden_states=True, logits_to_keep=1)
    words = r'get_delta_weight\("default"\)' if trains else "an adapter on its head"
    with pytest.raises(ValueError, match=words):
        example["parts_of"](model, outputs)


@pytest.mark.filterwarnings("ignore")
def test_distill_trainer_with_a_saved_head() -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    example = load("distill_trainer")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(example["model_of"](16), config)
    ids = torch.randint(example["VOCAB"], (3, 9))
    outputs = model(ids, output_hidden_states=True, logits_to_keep=1)
    _, weight, _ = example["parts_of"](model, outputs)
    assert weight.requires_grad


def test_instance_classes(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("instance_classes")
    hidden = F.normalize(torch.randn(150, 16), dim=-1).requires_grad_()
    weight = torch.randn(400, 16).mul_(0.1).requires_grad_()
    targets = torch.randint(400, (150,))
    # Of so few classes each has more mass than the filter asks for.
    ours, dense = (example["LOSSES"][name](hidden, weight, targets) for name in LOSSES)
    assert ours.item() == pytest.approx(dense.item(), rel=1e-6)
    check(gradients(ours, [hidden, weight]), gradients(dense, [hidden, weight]))
    views = example["draw_views"](torch.zeros(3, 1, 6, 6), torch.Generator())
    assert views.shape == (3, 1, 16, 16)
    # Of 6 x 6 is nothing left but 0.
    assert views.eq(0).sum((1, 2, 3)).tolist() == [36, 36, 36]
    found = example["main"](num_classes=300, steps=24, batch=64)
    for name in LOSSES:
        rows = [row for row in found["training"] if row["method"] == name]
        assert [row["step"] for row in rows] == list(range(0, 25, 3))
        assert rows[-1]["loss"] < rows[1]["loss"]
        assert rows[-1]["top1"] > rows[0]["top1"]
    rows = {row["method"]: row for row in found["loss"]}
    assert rows["filtered"]["loss"] == pytest.approx(rows["dense"]["loss"], rel=1e-5)
    assert rows["filtered"]["grad_weight_error"] < 1e-2
    assert "logits of one batch: 0.1 MiB" in capsys.readouterr().out


def run_as_main(arguments: Sequence[str]) -> None:
    # Four ranks that have more threads than there are cores wait for one another.
    torch.set_num_threads(1)
    runpy.run_path(str(EXAMPLES / arguments[-1]), run_name="__main__")


def test_teacher_elsewhere(tmp_path: Path) -> None:
    example = load("teacher_elsewhere")
    teacher, student = (example["LanguageModel"](dim, 0, 1) for dim in (24, 16))
    ids = example["draw_batch"](torch.randint(256, (500,)), 1)
    with torch.no_grad():
        expected = (teacher(ids) @ teacher.head.T / example["TEMPERATURE"]).log_softmax(-1)
    lists = example["list_teacher"](teacher, ids, None)
    assert isinstance(lists, TeacherLogprobs) and lists.ids.shape == (*ids.shape, example["K"])
    torch.testing.assert_close(lists.logprobs, expected.topk(example["K"]).values)
    torch.testing.assert_close(lists.logprobs, expected.gather(-1, lists.ids))
    logits = student(ids) @ student.head.T / example["TEMPERATURE"]
    of_student = logits.log_softmax(-1).gather(-1, lists.ids)
    log_p, log_q = (
        torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1)
        for x in (lists.logprobs, of_student)
    )
    dense = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    loss = example["compute_loss"](student, ids, lists, None)
    assert loss.item() == pytest.approx(dense.item(), rel=1e-6)
    leaves = list(student.parameters())
    check(gradients(loss, leaves), gradients(dense, leaves))

    script, output = "teacher_elsewhere.py", tmp_path / "output"
    code, text = run_forked(4, output, script, run=run_as_main)
    assert code == 0, text
    divergence, of_text = re.findall(r"(\d+\.\d+) -> (\d+\.\d+)", text)
    assert float(divergence[1]) < 0.5 * float(divergence[0])
    assert float(of_text[1]) < float(of_text[0]) - 1.5
    assert "a batch's lists: 48 KiB; its logits: 256 KiB" in text
