"""Table A3 and Figure 1 of Cut Cross-Entropy, arXiv:2411.09009, from configurations alone.

These formulas reproduce the table, with MB of 2^20 bytes and N = 65,536 tokens:

    logits                 N V 4 bytes: one fp32 matrix, V of the tokenizer
    activations            N D L 2 bytes: a 16-bit vector a token and layer, as full recompute keeps
    weights and optimizer  8 bytes a number: weight, gradient and two moments in 16 bits, of all
                           that the checkpoint holds, saved buffers included
    largest batch          memory of 16 GPUs of 75 GiB that the weights leave, over logits and
                           activations, or over activations alone
"""

from __future__ import annotations

from dataclasses import dataclass

from .model import PAPER, Model

TOKENS = 65536
MB = 2**20
BUDGET_MB = 16 * 75 * 1024
BYTES_OF_NUMBER = 8


@dataclass(frozen=True)
class MemoryRow:
    """A row of Table A3, in MB of all GPUs and in tokens."""

    logits_mb: float
    activations_mb: float
    weights_mb: float  # with their gradient and optimizer state
    batch_before: float  # the largest, in tokens
    batch_after: float

    @property
    def increase(self) -> float:
        return self.batch_after / self.batch_before


# The printed row, and the printed increase, which has one decimal.
PRINTED: dict[str, tuple[MemoryRow, float]] = {
    "GPT2": (MemoryRow(12564, 1152, 1045, 5866190, 69845595), 11.9),
    "GPT Neo (1.3B)": (MemoryRow(12564, 6144, 10421, 4268047, 12996042), 3.0),
    "GPT Neo (2.7B)": (MemoryRow(12564, 10240, 20740, 3471784, 7731585), 2.2),
    "Gemma (2B)": (MemoryRow(64000, 4608, 19121, 1155515, 17204330), 14.9),
    "Gemma 2 (27B)": (MemoryRow(64000, 26496, 207727, 739448, 2525554), 3.4),
    "Gemma 2 (2B)": (MemoryRow(64000, 7488, 19946, 1108206, 10580057), 9.5),
    "Llama 2 (13B)": (MemoryRow(8000, 25600, 99303, 2203057, 2891512), 1.3),
    "Llama 2 (7B)": (MemoryRow(8000, 16384, 51410, 3164429, 4709560), 1.5),
    "Llama 3 (70B)": (MemoryRow(32064, 81920, 538282, 397019, 552414), 1.4),
    "Llama 3 (8B)": (MemoryRow(32064, 16384, 61266, 1579333, 4670136), 3.0),
    "Mistral 7B": (MemoryRow(8000, 16384, 55250, 3154108, 4694200), 1.5),
    "Mixtral 8x7B": (MemoryRow(8000, 16384, 356314, 2344949, 3489944), 1.5),
    "Phi 1.5": (MemoryRow(12574, 6144, 10821, 4264482, 12991781), 3.0),
    "Phi3 Medium": (MemoryRow(8003, 25600, 106508, 2188824, 2873067), 1.3),
    "Qwen1.5 (7B)": (MemoryRow(37912, 16384, 58909, 1412087, 4679564), 3.3),
}


def memory_row(model: Model) -> MemoryRow:
    """Computes Table A3's arithmetic for any model."""
    logits = TOKENS * model.classes * 4 / MB
    activations = TOKENS * model.dim * model.layers * 2 / MB
    weights = (model.parameters + model.buffers) * BYTES_OF_NUMBER / MB
    room = BUDGET_MB - weights
    before, after = (room / each * TOKENS for each in (logits + activations, activations))
    return MemoryRow(logits, activations, weights, before, after)


@dataclass(frozen=True)
class Deviation:
    """The largest deviation of computed from printed values: in MB, in tokens, in the increase."""

    mb: float
    tokens: float
    increase: float

    @property
    def is_rounding(self) -> bool:
        return self.mb <= 0.5 and self.tokens <= 0.5 and self.increase < 0.05


def deviation(name: str) -> Deviation:
    """Compares a model's computed row with the printed row.

    Raises:
        KeyError: the table has no such model.
    """
    printed, increase = PRINTED[name]
    computed = memory_row(PAPER[name])
    in_mb = ("logits_mb", "activations_mb", "weights_mb")
    in_tokens = ("batch_before", "batch_after")
    return Deviation(
        max(abs(getattr(computed, x) - getattr(printed, x)) for x in in_mb),
        max(abs(getattr(computed, x) - getattr(printed, x)) for x in in_tokens),
        abs(round(computed.increase, 1) - increase),
    )
