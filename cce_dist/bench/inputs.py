"""Inputs of a benchmark: random, skewed like a trained model's, or captured in a training run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from cce_dist.vocab_shard import dealt_ids

# Vocabulary and hidden size of the heads in Cut Cross-Entropy, arXiv:2411.09009, tables 1 and A2,
# and of those that `cce-dist bench heads` measures.
MODELS = {
    "deepseek-v3": (129280, 7168),
    "gemma2-2b": (256000, 2304),
    "gemma2-9b": (256000, 3584),
    "gemma2-27b": (256000, 4608),
    "gemma3-270m": (262144, 640),
    "gemma3-27b": (262208, 5376),
    "llama3-8b": (128256, 4096),
    "llama3-70b": (128256, 8192),
    "llama3.2-1b": (128256, 2048),
    "mistral-nemo": (131072, 5120),
    "phi3.5-mini": (32064, 3072),
    "qwen2.5-0.5b": (151936, 896),
    "qwen2.5-7b": (151936, 3584),
    "smollm2-135m": (49152, 576),
}
# Number of tokens in the paper.
MODEL_TOKENS = 8192

KINDS = ("gaussian", "flat", "zipf", "zipf-shuffled")
# The same with ids dealt out to so many ranks.
DEALT = re.compile(r"zipf-dealt-([1-9]\d*)")
# Standard deviation of a new model's weight, and of the weight of "flat".
INIT_STD = 0.02
IGNORE_INDEX = -100

# Constants of `zipf_tensors`, whose softmax stands in for a trained model's.
ROWS_PER_CONTEXT = 16
CONTEXTS_PER_DOCUMENT = 16
NUM_TOPICS = 32
# The first channel of every hidden state. The weight's first channel holds a token's mean logit.
COMMON_CHANNEL = 8.0
# A token's mean logit is minus this slope times the log of its frequency rank.
FREQUENCY_SLOPE = 0.6
# Spread of a candidate's rank over the rows that share its context, in nats of log-rank.
ROW_SPREAD = 0.7
# Spread of frequency over token ids: low ids are frequent only on average, as a BPE's are.
ID_SPREAD = 1.5
# Largest number of logits that exist at once while candidates or targets are drawn.
MAX_ELEMENTS = 2**26


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    vocab_size: int
    dim: int


def parse_shape(text: str, num_tokens: int | None = None) -> Shape:
    """Returns the shape of a model's name, or of a text TOKENSxVOCABxDIM.

    Args:
        num_tokens: number of tokens for a model's name; None: 8192.
    Raises:
        ValueError: `text` is neither, or a number is 0.
    """
    if text in MODELS:
        return Shape(num_tokens or MODEL_TOKENS, *MODELS[text])
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(
            f"shape must be one of {sorted(MODELS)} or TOKENSxVOCABxDIM such as "
            f"8192x256000x2304, got {text!r}"
        )
    tokens, vocab_size, dim = (int(number) for number in match.groups())
    return Shape(num_tokens or tokens, vocab_size, dim)


@dataclass(frozen=True)
class BenchInputs:
    """Inputs of a loss: hidden [N, D], weight [V, D], targets [N] int64.

    Args:
        kind: names the origin of the inputs.
        token_counts: [V] int64, how often the training text has each id; None: not known.
        training: the step of a captured file, and how its model was trained.
        softcap: softcap of the logits; None: no softcap.
        entropy_bonus: what the loss subtracts, times the mean entropy.
    """

    kind: str
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    token_counts: Tensor | None = None
    training: Mapping[str, int | float | bool] = field(default_factory=dict)
    softcap: float | None = None
    entropy_bonus: float = 0.0

    @property
    def description(self) -> dict[str, str | int]:
        """Returns the cells that identify these inputs in a row of results."""
        softcap = "" if self.softcap is None else f" softcap {self.softcap:g}"
        bonus = f" entropy bonus {self.entropy_bonus:g}" if self.entropy_bonus else ""
        return {
            "inputs": self.kind + softcap + bonus,
            "N": len(self.hidden),
            "ignored": int((self.targets == IGNORE_INDEX).sum()),
            "V": len(self.weight),
            "D": self.hidden.shape[1],
            "dtype": str(self.hidden.dtype).removeprefix("torch."),
        }

    @property
    def num_valid(self) -> int:
        return int((self.targets != IGNORE_INDEX).sum())

    def without_ignored(self) -> BenchInputs:
        """Returns the inputs without ignored tokens; their loss is the same."""
        valid = self.targets != IGNORE_INDEX
        return replace(self, hidden=self.hidden[valid], targets=self.targets[valid])

    def ignoring(self, fraction: float) -> BenchInputs:
        """Returns the inputs with a seeded random `fraction` of the targets set to IGNORE_INDEX.

        Raises:
            ValueError: fraction is not in [0, 1).
        """
        if not 0 <= fraction < 1:
            raise ValueError(f"ignored-fraction must lie in [0, 1), got {fraction}")
        if fraction == 0:
            return self
        device = self.targets.device
        generator = torch.Generator(device).manual_seed(1)
        order = torch.rand(len(self.targets), generator=generator, device=device).argsort()
        chosen = order[: round(fraction * len(order))]
        targets = self.targets.clone()
        targets[chosen] = IGNORE_INDEX
        return replace(self, targets=targets)


def is_made(kind: str) -> bool:
    """Tells whether `make_inputs` makes this kind, rather than reads the file of this path.

    Raises:
        ValueError: it is neither.
    """
    if kind in KINDS or DEALT.fullmatch(kind):
        return True
    if not Path(kind).is_file():
        known = f"{sorted(KINDS)}, zipf-dealt-RANKS or a file"
        raise ValueError(f"inputs must be one of {known}, got {kind!r}")
    return False


def make_inputs(
    kind: str,
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> BenchInputs:
    """Makes random inputs, or reads those that `cce-dist bench capture` wrote to a file.

    From a file the first shape.num_tokens tokens are taken, or all if it has fewer; vocabulary and
    hidden size are the file's.

    Args:
        kind: "gaussian"; "flat" (a new model's softmax); "zipf" (frequent tokens come first);
            "zipf-shuffled" (frequent tokens are anywhere in the vocabulary); "zipf-dealt-4" (as
            `cce-dist vocab deal` gives four ranks the ids); or a file's path.
    Raises:
        ValueError: `kind` is neither a known kind nor such a file.
    """
    device = torch.device(device)
    if not is_made(kind):
        stored = torch.load(kind, weights_only=True, map_location=device)
        if not isinstance(stored, dict) or not {"hidden", "weight", "targets"} <= set(stored):
            raise ValueError(f"inputs must be a file of `cce-dist bench capture`, got {kind!r}")
        hidden, targets = (stored[name][: shape.num_tokens] for name in ("hidden", "targets"))
        weight = stored["weight"].to(dtype)
        # Clone: the saved targets are a view that starts one token into its storage, and QuACK
        # wants an alignment of 32 bytes.
        tensors = (hidden.to(dtype), weight, targets.clone())
        # A file of an older version has neither counts nor training.
        counts, training = stored.get("token_counts"), stored.get("training", {})
        return BenchInputs(Path(kind).stem, *tensors, counts, training)
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, vocab_size, dim = shape.num_tokens, shape.vocab_size, shape.dim
    if kind.startswith("zipf"):
        drawn = zipf_tensors(num_tokens, vocab_size, dim, generator=generator, dtype=dtype)
        inputs = BenchInputs(kind, *drawn)
        if kind == "zipf":
            return inputs
        if dealt := DEALT.fullmatch(kind):
            ranks = int(dealt[1])
            new_ids = dealt_ids(vocab_size, ranks, -(-vocab_size // ranks))
            return _renamed(inputs, new_ids.argsort().to(device))
        return _renamed(inputs, torch.randperm(vocab_size, generator=generator, device=device))
    hidden = torch.randn(num_tokens, dim, generator=generator, device=device)
    weight = torch.randn(vocab_size, dim, generator=generator, device=device)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator, device=device)
    weight.mul_(INIT_STD if kind == "flat" else 1 / math.sqrt(dim))
    return BenchInputs(kind, hidden.to(dtype), weight.to(dtype), targets)


def _renamed(inputs: BenchInputs, order: Tensor) -> BenchInputs:
    """Returns the same tokens under other ids: id order[i] becomes id i."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return replace(inputs, weight=inputs.weight[order], targets=place[inputs.targets])


def zipf_tensors(
    num_tokens: int,
    vocab_size: int,
    dim: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes inputs whose softmax resembles a trained model's, on the generator's device.

    16 rows share a context, which has up to 96 candidate tokens drawn from a Zipf unigram. A row's
    logits on the candidates fall by exactly 2 nats for each e-fold of rank, over a background of
    the unigram. The softmax thus falls like 1 / rank^2: at rank 50 it is about 2^-12, as in figure
    3 of arXiv:2411.09009. Targets are drawn from the softmax.

    Returns:
        hidden [N, D], weight [V, D], targets [N].
    """
    weight, frequency_rank = _weight(vocab_size, dim, generator, dtype)
    num_contexts = -(-num_tokens // ROWS_PER_CONTEXT)
    num_candidates = min(vocab_size, max(8, min(96, dim // 24, vocab_size // 8)))
    background = torch.logsumexp(-FREQUENCY_SLOPE * (frequency_rank + 1.0).log(), 0)
    ranks = torch.arange(1, num_candidates + 1, device=weight.device, dtype=torch.float32)
    # About nine tenths of the mass lie on the candidates.
    by_rank = background + math.log(8) + 0.5 - 2 * ranks.log()
    parts = []
    for first in range(0, num_contexts, 512):
        count = min(512, num_contexts - first)
        candidates = _draw_candidates(frequency_rank, count, num_candidates, generator)
        parts.append(_hidden_of(weight, candidates, by_rank, generator))
    hidden = torch.cat(parts)[:num_tokens]
    # Neighbouring rows share contexts, but not in runs of 16.
    document = torch.arange(num_tokens, device=weight.device) // (
        ROWS_PER_CONTEXT * CONTEXTS_PER_DOCUMENT
    )
    key = document + torch.rand(num_tokens, generator=generator, device=weight.device)
    hidden = hidden[key.argsort()].to(dtype).contiguous()
    return hidden, weight, draw_targets(hidden, weight, generator)


def _weight(
    vocab_size: int, dim: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns weight [V, D] and each id's frequency rank [V], 0 for the most frequent."""
    device = generator.device
    ids = torch.arange(vocab_size, device=device)
    key = (ids + 1.0).log()
    key += ID_SPREAD * torch.randn(vocab_size, generator=generator, device=device)
    frequency_rank = torch.empty_like(ids)
    frequency_rank[key.argsort()] = ids
    scale = 1 / math.sqrt(max(dim - 1, 1))
    weight = torch.randn(vocab_size, dim, generator=generator, device=device).mul_(scale)
    topics = torch.randn(NUM_TOPICS, dim, generator=generator, device=device).mul_(0.15 * scale)
    topic = torch.randint(0, NUM_TOPICS, (vocab_size,), generator=generator, device=device)
    for first in range(0, vocab_size, 2**15):
        rows = slice(first, first + 2**15)
        weight[rows] += topics[topic[rows]]
    weight[:, 0] = -FREQUENCY_SLOPE / COMMON_CHANNEL * (frequency_rank + 1.0).log()
    return weight.to(dtype), frequency_rank


def _draw_candidates(
    frequency_rank: Tensor, num_contexts: int, num_candidates: int, generator: torch.Generator
) -> Tensor:
    """Draws distinct ids for each context, with weights 1 / (frequency rank + 1).

    Returns:
        [contexts, candidates], in the order drawn.
    """
    log_unigram = -(frequency_rank + 1.0).log()
    step = max(1, MAX_ELEMENTS // len(log_unigram))
    drawn = []
    for first in range(0, num_contexts, step):
        count = min(step, num_contexts - first)
        # The ids with the largest log p + Gumbel noise are draws without replacement.
        noise = torch.empty(count, len(log_unigram), device=log_unigram.device)
        noise.exponential_(generator=generator)
        drawn.append((log_unigram - noise.log_()).topk(num_candidates).indices)
    return torch.cat(drawn)


def _hidden_of(
    weight: Tensor,  # [V, D]
    candidates: Tensor,  # [contexts, candidates]
    by_rank: Tensor,  # [candidates]
    generator: torch.Generator,
) -> Tensor:
    """Returns hidden states [contexts * 16, D] in fp32.

    Each row's logits on its candidates are `by_rank`, reordered.
    """
    num_contexts, num_candidates = candidates.shape
    rows = weight[candidates].float()  # [contexts, candidates, D]
    along, across = rows[..., 0], rows[..., 1:]
    gram = across @ across.transpose(1, 2)
    gram.diagonal(dim1=1, dim2=2).add_(1e-4)
    shape = (num_contexts, ROWS_PER_CONTEXT, num_candidates)
    ranks = torch.arange(1, num_candidates + 1, device=weight.device, dtype=torch.float32)
    key = ranks.log() + ROW_SPREAD * torch.randn(shape, generator=generator, device=weight.device)
    place = key.argsort(-1).argsort(-1)
    wanted = by_rank[place] - COMMON_CHANNEL * along[:, None]
    mixture = torch.linalg.solve(gram, wanted.transpose(1, 2)).transpose(1, 2)
    hidden = weight.new_full((num_contexts, ROWS_PER_CONTEXT, weight.shape[1]), COMMON_CHANNEL)
    hidden = hidden.float()
    hidden[..., 1:] = mixture @ across
    return hidden.flatten(0, 1)


def draw_targets(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draws targets [N] int64 from the softmax; the logits of some tokens exist at a time."""
    step = max(1, MAX_ELEMENTS // len(weight))
    drawn = [
        torch.multinomial((rows @ weight.T).float().softmax(-1), 1, generator=generator)
        for rows in hidden.split(step)
    ]
    return torch.cat(drawn).squeeze(1)
