"""TRL's trainers that distil, beside their own loss: values and every gradient of some steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from cce_dist.integrations import trl as patch
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.transformers.logits import DeferredLogits
from tests.integrations.distillation.conftest import THEIRS
from tests.integrations.distillation.trainers import (
    ChunkedDivergenceFunction,
    GKDTrainer,
    check,
    model_of,
    run,
    trainer_of,
)
from tests.integrations.trl.test_trl_trainers import tokenizer

__all__ = ["tokenizer"]

TRAINED: dict[str, dict[str, Any]] = {
    "forward KL": {"beta": 0.0},
    "JSD": {"beta": 0.5, "temperature": 0.7, "gradient_accumulation_steps": 2},
    "skewed JSD": {"beta": 0.2, "student": "gemma", "teacher": "cohere"},
    "reverse KL": {"beta": 1.0, "student": "tied", "temperature": 1.5},
    "scale": {"beta": 0.0, "student": "cohere", "teacher": "gemma"},
    "LoRA": {"beta": 0.5, "lora": ["q_proj"]},
}


@pytest.fixture
def never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def materialize(logits: Any) -> None:
        raise AssertionError("logits were made")

    monkeypatch.setattr(DeferredLogits, "materialize", materialize)


@pytest.mark.filterwarnings("ignore")
# Both trainers in either order of apply, and with a wrapped student. Each has some of the heads,
# which one function reads for both.
@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, name) for case in ("JSD", "LoRA") for name in ("Distillation", "GKD")),
        *((case, "Distillation") for case in ("forward KL", "skewed JSD")),
        *((case, "GKD") for case in ("reverse KL", "scale")),
    ],
)
def test_trainer(
    case: str, name: str, tokenizer: Any, tmp_path: Path, never_computed: None, lines: list[str]
) -> None:
    options = dict(TRAINED[case])
    if name == "GKD":
        # Half of the batches are the student's own text, from the random module.
        options["lmbda"] = 0.5 if case == "JSD" else 0.0
    theirs = run(trainer_of(name, tokenizer, tmp_path, options))
    assert lines == []
    # The order of apply and of the trainer's construction does not matter.
    if case == "JSD":
        trainer = trainer_of(name, tokenizer, tmp_path, options)
        patch.apply(gradient="exact")
    else:
        patch.apply(gradient="exact")
        trainer = trainer_of(name, tokenizer, tmp_path, options)
    ours = run(trainer)
    assert patch.status().calls >= 2 * options.get("gradient_accumulation_steps", 1)
    check(ours, theirs)
    (line,) = lines
    divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(options["beta"], "jsd")
    for part in ("linear_distillation", divergence, f"{name}Trainer", "remove()"):
        assert part in line


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("teacher", ["the student's head", "LoRA on its head"], ids=str)
def test_trainer_with_a_teacher(
    teacher: str, tokenizer: Any, tmp_path: Path, never_computed: None
) -> None:
    """An adapter on a student's head is refused by TRL itself."""
    theirs, ours = (trainer_of("GKD", tokenizer, tmp_path, {"beta": 0.0}) for _ in range(2))
    for trainer in (theirs, ours):
        if teacher == "the student's head":
            trainer.teacher_model = model_of("untied", seed=1)
            trainer.teacher_model.lm_head = trainer.model.lm_head
            continue
        lora = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        torch.manual_seed(7)
        trainer.teacher_model = get_peft_model(trainer.teacher_model, lora)
    expected = run(theirs)
    patch.apply(gradient="exact")
    check(run(ours), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("beta", "gradient"),
    [(0.0, "exact"), (0.2, "in_forward"), (1.0, "exact")],
    ids=str,
)
def test_trainer_in_float64(beta: float, gradient: str, tokenizer: Any, tmp_path: Path) -> None:
    """Without rounding the losses and gradients are GKDTrainer's own to 1e-12."""
    options = {"beta": beta, "student": "cohere", "gradient_accumulation_steps": 2}
    theirs, ours = (trainer_of("GKD", tokenizer, tmp_path, options) for _ in range(2))
    for trainer in (theirs, ours):
        trainer.model.double()
        trainer.teacher_model.double()
    expected = run(theirs)
    patch.apply(gradient=gradient)
    check(run(ours), expected, 1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Distillation", "GKD"], ids=str)
def test_trainer_in_bf16_with_checkpoints(name: str, tokenizer: Any, tmp_path: Path) -> None:
    options = {"beta": 1.0, "bf16": True, "gradient_checkpointing": True}
    theirs = run(trainer_of(name, tokenizer, tmp_path, options))
    patch.apply(gradient="exact")
    ours = run(trainer_of(name, tokenizer, tmp_path, options))
    # Their logits are rounded to 16 bits; ours are not. Text of theirs may be another from step 2.
    assert ours[0][0]["loss"] == pytest.approx(theirs[0][0]["loss"], rel=2e-2)
    for key, value in theirs[1][0].items():
        error = (ours[1][0][key] - value).abs().max()
        assert error <= 0.1 * value.abs().max(), key


@pytest.mark.filterwarnings("ignore")
def test_evaluation_with_logits(tokenizer: Any, tmp_path: Path) -> None:
    """Of the student, where a metric asks for them."""
    trainer = trainer_of("GKD", tokenizer, tmp_path, {"beta": 0.5})
    trainer.compute_metrics = lambda x: {"mean": float(abs(x.predictions).mean())}
    expected = trainer.evaluate()
    patch.apply()
    result = trainer.evaluate()
    for name in ("eval_loss", "eval_mean"):
        assert result[name] == pytest.approx(expected[name], rel=1e-6)


class Doubled(GKDTrainer):
    @staticmethod
    def generalized_jsd_loss(*args: Any, **keywords: Any) -> Tensor:
        return 2 * GKDTrainer.generalized_jsd_loss(*args, **keywords)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["subclass", "fsdp", "deepspeed"], ids=str)
def test_trainer_that_keeps_its_loss(
    case: str, tokenizer: Any, tmp_path: Path, lines: list[str]
) -> None:
    options = {"beta": 0.5, "cls": Doubled if case == "subclass" else GKDTrainer}
    theirs = run(trainer_of("GKD", tokenizer, tmp_path, options))
    patch.apply()
    trainer = trainer_of("GKD", tokenizer, tmp_path, options)
    if case != "subclass":
        setattr(trainer, f"is_{case}_enabled", True)
        deferring: Any = GKDTrainer.compute_loss
        inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        expected = THEIRS[0](trainer, trainer.model, inputs)
        assert deferring(trainer, trainer.model, inputs).equal(expected)
        reason = "FSDP or DeepSpeed"
    else:
        ours = run(trainer)
        assert ours[0] == theirs[0]
        reason = "Doubled has a generalized_jsd_loss of its own"
    assert patch.status().calls == 0
    (line,) = lines
    assert "keeps TRL's own loss" in line and reason in line


def test_logits_of_others_have_their_function() -> None:
    student, teacher = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[-100, 1, 2, -100]] * 3)
    for reduction in ("batchmean", "sum", "mean", "none"):
        theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels, reduction=reduction)
        with patch.patched():
            ours = GKDTrainer.generalized_jsd_loss(student, teacher, labels, reduction=reduction)
        assert ours.equal(theirs)


@pytest.mark.filterwarnings("ignore")
def test_trainer_refuses(tokenizer: Any, tmp_path: Path) -> None:
    trainer = trainer_of("GKD", tokenizer, tmp_path, {"beta": 0.5})
    trainer.model.lm_head.register_forward_hook(lambda module, args, output: output / 2)
    forward = vars(trainer.teacher_model.lm_head).get("forward")
    with patch.patched(), pytest.raises(PatchError, match=r"Llama.* cannot be .* a forward hook"):
        trainer.train()
    assert vars(trainer.teacher_model.lm_head).get("forward") is forward


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Distillation", "GKD"], ids=str)
def test_trainer_compiled(name: str, tokenizer: Any, tmp_path: Path) -> None:
    options = {"beta": 0.0, "torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1}
    theirs = run(trainer_of(name, tokenizer, tmp_path, options), evaluates=False)
    patch.apply(gradient="exact")
    ours = run(trainer_of(name, tokenizer, tmp_path, options), evaluates=False)
    assert patch.status().calls
    check(ours, theirs)


def test_apply_to_other_functions(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """They stay, and the other trainer's is replaced."""
    monkeypatch.setattr(GKDTrainer, "generalized_jsd_loss", staticmethod(lambda x: x))
    patch.apply()
    (line,) = lines
    message = "GKDTrainer keeps TRL's own loss: TRL .* must have the arguments .*, got .x."
    assert re.match(message, line)
    assert GKDTrainer.compute_loss is THEIRS[0] and "apply" in vars(ChunkedDivergenceFunction)
    patch.remove()
    monkeypatch.undo()
    kept = ChunkedDivergenceFunction.apply
    monkeypatch.setattr(ChunkedDivergenceFunction, "apply", kept)
    patch.apply()
    assert ChunkedDivergenceFunction.apply == kept and GKDTrainer.compute_loss is not THEIRS[0]
    assert "DistillationTrainer keeps TRL's own loss" in lines[1]
    patch.remove()
    monkeypatch.undo()
    if "apply" in vars(ChunkedDivergenceFunction):
        del ChunkedDivergenceFunction.apply
