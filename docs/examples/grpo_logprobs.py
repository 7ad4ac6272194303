"""GRPO: log-probabilities of sampled tokens under policy and reference, a clipped ratio, a KL term.

A toy policy learns to say ids below WANTED. The loss is that of DeepSeekMath (arXiv:2402.03300).

    python docs/examples/grpo_logprobs.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from cce_dist import token_logprobs

VOCAB, DIM, WANTED = 256, 32, 64
PROMPTS, SAMPLES, PROMPT_LENGTH, LENGTH = 4, 16, 3, 12
STEPS, EPOCHS, CLIP, BETA, TEMPERATURE = 30, 2, 0.2, 0.04, 0.9


class Policy(nn.Module):
    """Of the last id alone, so that sampling it is short."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embedding(ids)))


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor) -> Tensor:
    ids = prompts
    while ids.shape[1] < LENGTH:
        logits = policy.head(policy(ids[:, -1])) / TEMPERATURE
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    return ids


def logprobs(policy: Policy, ids: Tensor, is_response: Tensor) -> Tensor:
    """[B, T - 1], 0 at prompts, which cost nothing."""
    hidden, weight = policy(ids), policy.head.weight
    found = token_logprobs(hidden, weight, ids, mask=is_response, shift=1, temperature=TEMPERATURE)
    return found.logprobs


def grpo_loss(
    now: Tensor,  # [B, T - 1] log-probabilities, as the others
    before: Tensor,
    reference: Tensor,
    advantages: Tensor,  # [B]
    counts: Tensor,  # [B, T - 1] bool
) -> tuple[Tensor, Tensor]:
    """The loss, and the mean of the KL divergence from the reference (the estimator k3)."""
    ratio = (now - before).exp()
    gain = ratio * advantages[:, None]
    gain = torch.minimum(gain, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    kl = (reference - now).exp() - (reference - now) - 1
    per_token = torch.where(counts, -gain + BETA * kl, 0)
    loss = (per_token.sum(1) / counts.sum(1)).mean()
    return loss, kl.detach()[counts].mean()


def advantages_of(rewards: Tensor) -> Tensor:
    """[prompts, samples] -> [prompts x samples]: how much better than the prompt's others."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def main() -> dict[str, object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    policy = Policy().to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-2)
    is_response = torch.zeros(PROMPTS * SAMPLES, LENGTH, dtype=torch.bool, device=device)
    is_response[:, PROMPT_LENGTH:] = True
    counts = is_response[:, 1:]
    means, divergences = [], []
    for _ in range(STEPS):
        prompts = torch.randint(VOCAB, (PROMPTS, PROMPT_LENGTH), device=device)
        ids = sample(policy, prompts.repeat_interleave(SAMPLES, 0))
        rewards = (ids[:, PROMPT_LENGTH:] < WANTED).float().mean(1).view(PROMPTS, SAMPLES)
        advantages = advantages_of(rewards)
        with torch.no_grad():
            before = logprobs(policy, ids, is_response)
            of_reference = logprobs(reference, ids, is_response)
        kl = before.new_zeros(())
        for _ in range(EPOCHS):
            now = logprobs(policy, ids, is_response)
            loss, kl = grpo_loss(now, before, of_reference, advantages, counts)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        means.append(rewards.mean().item())
        divergences.append(kl.item())
    print(f"mean reward {means[0]:.2f} -> {means[-1]:.2f} in {STEPS} steps of {EPOCHS} epochs")
    print(f"KL from the reference: {divergences[-1]:.3f} nats a token")
    return {"rewards": means, "kl": divergences}


if __name__ == "__main__":
    main()
