"""TRL's trainers that distil, of small models; what their steps have computed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    # Of the packages, about one another, as they are imported.
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        TrainerCallback,
    )
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    from tests.integrations.trl.test_trl_trainers import SIZES, text, tokenizer_of

__all__ = ["ChunkedDivergenceFunction", "tokenizer_of"]


def model_of(kind: str, dim: int = 16, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    classes = {
        "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
        "gemma": (
            Gemma2Config,
            Gemma2ForCausalLM,
            {"final_logit_softcapping": 2.0, "head_dim": 8, "attn_implementation": "eager"},
        ),
        "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
        "untied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    }
    config, model, options = classes[kind]
    return model(config(**SIZES | {"hidden_size": dim, "initializer_range": 0.3} | options))


class Gradients(TrainerCallback):
    """The gradients that each step of the optimizer sees."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        named = keywords["model"].named_parameters()
        self.steps.append({name: x.grad.clone() for name, x in named if x.grad is not None})


def trainer_of(name: str, tokenizer: Any, folder: Path, options: dict[str, Any]) -> Any:
    options = {**options}
    models = (
        model_of(options.pop("student", "untied")),
        model_of(options.pop("teacher", "untied"), dim=24, seed=1),
    )
    lora = options.pop("lora", None)
    trainer, config = {
        "GKD": (options.pop("cls", GKDTrainer), GKDConfig),
        "Distillation": (trl.DistillationTrainer, trl.DistillationConfig),
    }[name]
    if name == "GKD":
        options["lmbda"] = options.get("lmbda", 0.0)
        options["max_new_tokens"] = 4
        rows = [
            [
                {"role": "user", "content": text(i, 2 + i % 3)},
                {"role": "assistant", "content": text(i + 9, 3 + i % 4)},
            ]
            for i in range(12)
        ]
        data = Dataset.from_dict({"messages": rows})
    else:
        options["max_completion_length"] = 5
        data = Dataset.from_dict({"prompt": [text(i, 2 + i % 3) for i in range(12)]})
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam makes 1e-3 of a gradient of 1e-9
        "max_steps": 2,
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    args = config(**{**defaults, **options})
    keywords = {}
    if lora is not None:
        keywords["peft_config"] = LoraConfig(r=2, target_modules=lora, task_type="CAUSAL_LM")
    return trainer(
        model=models[0],
        teacher_model=models[1],
        args=args,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        callbacks=[Gradients()],
        **keywords,
    )


def run(
    trainer: Any, evaluates: bool = True
) -> tuple[list[dict[str, float]], list[dict[str, Tensor]]]:
    """What the trainer logs, but times, with an evaluation's loss; and gradients."""
    torch.manual_seed(5)
    trainer.train()
    if evaluates:
        trainer.evaluate()
    timed = ("runtime", "per_second", "time", "flos", "memory")
    steps = [
        {name: x for name, x in step.items() if not any(word in name for word in timed)}
        for step in trainer.state.log_history
    ]
    (gradients,) = (x for x in trainer.callback_handler.callbacks if isinstance(x, Gradients))
    return steps, gradients.steps


def check(ours: Any, theirs: Any, tolerance: float = 3e-6) -> None:
    """Of fp32 the errors of both, each some 1e-6 of a step's largest gradient."""
    assert len(ours[0]) == len(theirs[0]) > 1
    for got, expected in zip(ours[0], theirs[0], strict=True):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=tolerance, abs=tolerance / 10), name
    assert len(ours[1]) == len(theirs[1]) > 0
    for got, expected in zip(ours[1], theirs[1], strict=True):
        assert got.keys() == expected.keys()
        largest = max(float(x.abs().max()) for x in expected.values())
        assert largest > 1e-3
        for name, value in expected.items():
            assert float((got[name] - value).abs().max()) <= tolerance * largest, name
