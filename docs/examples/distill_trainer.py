"""Distillation in transformers' Trainer, by its `compute_loss`: neither model's logits are made.

Both models return hidden states, and the logits of one position. The loss computes the divergence
of the others from the heads' weights. For one device or DDP; needs transformers.

    python docs/examples/distill_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from cce_dist import linear_distillation

VOCAB, LENGTH, STEPS = 512, 16, 12


class DistillationTrainer(Trainer):
    """Trains on alpha nll + (1 - alpha) KL(teacher, student), of labels that are not -100."""

    def __init__(
        self, teacher: Any, *, temperature: float = 2.0, alpha: float = 0.1, **keywords: object
    ) -> None:
        super().__init__(**keywords)  # pyright: ignore[reportArgumentType]
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.options: dict[str, Any] = {"temperature": temperature, "alpha": alpha}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = {**inputs, "output_hidden_states": True, "logits_to_keep": 1}
        labels = inputs.pop("labels")
        with self.accelerator.autocast():
            outputs = model(**inputs)
            hidden, weight, bias = parts_of(self.model, outputs)
            with torch.no_grad():
                of_teacher = parts_of(self.teacher, self.teacher(**inputs))
            loss: Any = linear_distillation(
                *(hidden, weight, of_teacher[0], of_teacher[1], labels),
                bias=bias,
                teacher_bias=of_teacher[2],
                shift=1,
                reduction="sum",
                **self.options,
            )
        if num_items_in_batch is None:
            num_items_in_batch = labels[:, 1:].ne(-100).sum()
        elif self.args.average_tokens_across_devices:
            # Of all ranks, whose gradients DDP averages.
            loss = loss * self.accelerator.num_processes
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def parts_of(model: Any, outputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the last hidden states, and the head's weight and bias.

    Raises:
        ValueError: they don't make the model's logits, or the head trains other parameters.
    """
    head, hidden = model.get_output_embeddings(), outputs.hidden_states[-1]
    weight, bias, name = head.weight, head.bias, type(model).__name__
    # LoRA's A and B have no effect at first: the logits don't show them.
    if any(x.requires_grad and x is not weight and x is not bias for x in head.parameters()):
        raise ValueError(
            f"{name}'s head trains other parameters than its weight and bias, such as LoRA's: pass "
            'weight=head.weight + head.get_delta_weight("default") to linear_distillation'
        )
    with torch.no_grad():
        logits = F.linear(hidden[:, -1:], weight, bias).to(outputs.logits.dtype)
    if not torch.allclose(logits, outputs.logits, rtol=1e-5, atol=1e-5):
        raise ValueError(
            f"{name} has a softcap, a scale or an adapter on its head: pass softcap=, logit_scale= "
            "(the teacher's: teacher_softcap=, teacher_logit_scale=) or the merged weight to "
            "linear_distillation"
        )
    return hidden, weight, bias


def model_of(dim: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def main() -> list[float]:
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (8 * STEPS, LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            max_steps=STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        )
        trainer = DistillationTrainer(
            model_of(64),
            model=model_of(32),
            args=args,
            train_dataset=[{"input_ids": x, "labels": x} for x in ids],
        )
        trainer.train()
    losses = [step["loss"] for step in trainer.state.log_history if "loss" in step]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps, without logits")
    return losses


if __name__ == "__main__":
    main()
