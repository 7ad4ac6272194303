"""Shapes of benchmarks: of models' heads by name, or TOKENSxVOCABxDIM."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Vocabulary and hidden size of the heads in Cut Cross-Entropy, arXiv:2411.09009, tables 1 and A2,
# and of one more that is common.
MODELS = {
    "gemma2-2b": (256000, 2304),
    "gemma2-9b": (256000, 3584),
    "gemma2-27b": (256000, 4608),
    "llama3-8b": (128256, 4096),
    "mistral-nemo": (131072, 5120),
    "phi3.5-mini": (32064, 3072),
    "qwen2.5-7b": (151936, 3584),
}
# The paper's number of tokens.
MODEL_TOKENS = 8192


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    vocab_size: int
    dim: int


def parse_shape(text: str, num_tokens: int | None = None) -> Shape:
    """`text` is a model's name, with `num_tokens` or 8192 tokens, or TOKENSxVOCABxDIM.

    Raises:
        ValueError: neither, or a number is 0.
    """
    if text in MODELS:
        return Shape(num_tokens or MODEL_TOKENS, *MODELS[text])
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(
            f"shape must be one of {sorted(MODELS)} or TOKENSxVOCABxDIM such as "
            f"8192x256000x2304, got {text!r}"
        )
    tokens, vocab_size, dim = (int(number) for number in found.groups())
    return Shape(num_tokens or tokens, vocab_size, dim)
