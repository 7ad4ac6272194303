"""A stand-in for a trained model's softmax that a GPU makes in seconds at any size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS_PER_CONTEXT = 16
CONTEXTS_PER_DOCUMENT = 16
NUM_TOPICS = 32
# The first channel of every hidden state; the first of weight holds a token's average logit.
COMMON_CHANNEL = 8.0
# Average logit: minus this times the log of the frequency rank.
FREQUENCY_SLOPE = 0.6
# Of the spread of a context's candidates over the rows that share it, in nats of log-rank.
ROW_SPREAD = 0.7
# Of frequency over token ids: low ids are frequent on average, as those of a BPE.
ID_SPREAD = 1.5
# Columns whose logits exist at once while candidates or targets are drawn.
MAX_ELEMENTS = 2**26


def zipf_tensors(
    num_tokens: int,
    vocab_size: int,
    dim: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [N, D], weight [V, D] and targets [N], on the generator's device.

    16 rows share a context, which has up to 96 candidate tokens drawn from a Zipf unigram. A row's
    logits on them fall by 2 nats an e-fold of their rank, exactly, over a background of the
    unigram, so that the softmax falls like 1 / rank^2: at rank 50 it is about 2^-12, as that of
    figure 3 of arXiv:2411.09009. Targets are drawn from the softmax.
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
    return hidden, weight, _draw_targets(hidden, weight, generator)


def _weight(
    vocab_size: int, dim: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """weight [V, D] and each id's frequency rank [V], 0 for the most frequent."""
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
    """[contexts, candidates] distinct ids, in the order drawn from 1 / (frequency rank + 1)."""
    log_unigram = -(frequency_rank + 1.0).log()
    step = max(1, MAX_ELEMENTS // len(log_unigram))
    drawn = []
    for first in range(0, num_contexts, step):
        count = min(step, num_contexts - first)
        # The largest of log p + Gumbel noise are draws without replacement.
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
    """[contexts * 16, D] fp32: each row's logits on its candidates are `by_rank`, reordered."""
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


def _draw_targets(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    step = max(1, MAX_ELEMENTS // len(weight))
    drawn = [
        torch.multinomial((rows @ weight.T).float().softmax(-1), 1, generator=generator)
        for rows in hidden.split(step)
    ]
    return torch.cat(drawn).squeeze(1)
