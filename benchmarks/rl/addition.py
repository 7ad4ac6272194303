"""The task of the GRPO experiment, and a model of transformers that learns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

DIGITS = 2
CHARACTERS = "0123456789+="
# Sequences of a supervised step, and of a look at the reward.
EXAMPLES = 256
# Supervised steps between two looks.
LOOK_EVERY = 20
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Task:
    """Additions of two numbers, such as 37+58=095, a token a character.

    The characters' ids are spread over the vocabulary, whose other ids are never right.
    """

    vocab: int
    device: torch.device

    @property
    def prompt_length(self) -> int:
        return 2 * DIGITS + 2

    def draw(self, num_prompts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws prompts [num_prompts, 6], and their answers [num_prompts, 3]."""
        terms = torch.randint(10**DIGITS, (2, num_prompts), generator=generator, device=self.device)
        first, second = (_digits(term, DIGITS) for term in terms)
        plus, equals = (torch.full_like(first[:, :1], CHARACTERS.index(sign)) for sign in "+=")
        prompts = torch.cat([first, plus, second, equals], 1)
        return self._ids(prompts), self._ids(_digits(terms.sum(0), DIGITS + 1))

    def _ids(self, characters: Tensor) -> Tensor:
        return characters * (self.vocab // len(CHARACTERS)) + 1


def _digits(numbers: Tensor, count: int) -> Tensor:
    powers = 10 ** torch.arange(count - 1, -1, -1, device=numbers.device)
    return numbers[:, None] // powers % 10


class Adder(nn.Module):
    """A small Llama. Its parameters are fp32; its hidden states and head come in `dtype`."""

    def __init__(self, vocab: int, dim: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        heads = max(1, dim // 32)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=dim,
            intermediate_size=4 * dim,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=64,
        )
        self.llama: Any = LlamaForCausalLM(config)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden states [B, T, D], and the head's weight [V, D]."""
        reduced = self.dtype != torch.float32
        with torch.autocast(ids.device.type, self.dtype, enabled=reduced):
            hidden = self.llama.model(ids, use_cache=False).last_hidden_state
        return hidden.to(self.dtype), self.llama.lm_head.weight.to(self.dtype)


@torch.no_grad()
def sample(model: Adder, prompts: Tensor, generator: torch.Generator) -> Tensor:
    """Returns prompts and sampled answers [B, 9], at temperature 1 by dense logits."""
    ids = prompts
    for _ in range(DIGITS + 1):
        hidden, weight = model(ids)
        p = (hidden[:, -1] @ weight.T).float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
    return ids


def rewards_of(ids: Tensor, answers: Tensor) -> Tensor:
    """Returns 1.0 for each right answer and 0.0 for the others, [B]."""
    return (ids[:, -answers.shape[1] :] == answers).all(1).float()


def warm_up(
    model: Adder, task: Task, generator: torch.Generator, *, most_steps: int, until: float
) -> int:
    """Trains on right answers by cross-entropy, until a look at the mean reward reaches `until`.

    Returns:
        the number of steps, at most most_steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for step in range(most_steps):
        prompts, answers = task.draw(EXAMPLES, generator)
        if step % LOOK_EVERY == 0:
            reward = rewards_of(sample(model, prompts, generator), answers).mean()
            if float(reward) >= until:
                return step
        hidden, weight = model(torch.cat([prompts, answers[:, :-1]], 1))
        logits = hidden[:, task.prompt_length - 1 :] @ weight.T
        F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return most_steps
