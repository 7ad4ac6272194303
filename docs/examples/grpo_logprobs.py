"""GRPO: log-probabilities of sampled tokens under policy and reference, a clipped ratio, a KL term.

A toy policy learns to say ids below WANTED. The loss is that of DeepSeekMath (arXiv:2402.03300).

    python docs/examples/grpo_logprobs.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from cce_dist import TokenLogprobs, rl, token_logprobs

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


def logprobs(policy: Policy, ids: Tensor, is_response: Tensor) -> TokenLogprobs:
    """[B, T - 1], 0 at prompts, which cost nothing."""
    hidden, weight = policy(ids), policy.head.weight
    return token_logprobs(hidden, weight, ids, mask=is_response, shift=1, temperature=TEMPERATURE)


def compute_loss(
    now: TokenLogprobs,  # [B, T - 1]
    before: Tensor,  # [B, T - 1] log-probabilities, as the reference's
    reference: Tensor,
    advantages: Tensor,  # [B]
    mask: Tensor,  # [B, T - 1] bool
) -> rl.PolicyLoss:
    return rl.grpo_loss(
        now, before, advantages, mask=mask, clip=CLIP, reference=reference, kl_weight=BETA
    )


def main() -> dict[str, object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    policy = Policy().to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-2)
    is_response = torch.zeros(PROMPTS * SAMPLES, LENGTH, dtype=torch.bool, device=device)
    is_response[:, PROMPT_LENGTH:] = True
    means, divergences, clipped = [], [], []
    for _ in range(STEPS):
        prompts = torch.randint(VOCAB, (PROMPTS, PROMPT_LENGTH), device=device)
        ids = sample(policy, prompts.repeat_interleave(SAMPLES, 0))
        rewards = (ids[:, PROMPT_LENGTH:] < WANTED).float().mean(1)
        advantages = rl.group_advantages(rewards, SAMPLES)
        with torch.no_grad():
            before = logprobs(policy, ids, is_response).logprobs
            of_reference = logprobs(reference, ids, is_response).logprobs
        for epoch in range(EPOCHS):
            now = logprobs(policy, ids, is_response)
            result = compute_loss(now, before, of_reference, advantages, is_response[:, 1:])
            result.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if epoch == EPOCHS - 1:
                divergences.append(result.kl_reference.item())
                clipped.append(result.clipped.item())
        means.append(rewards.mean().item())
    print(f"mean reward {means[0]:.2f} -> {means[-1]:.2f} in {STEPS} steps of {EPOCHS} epochs")
    print(f"KL from the reference: {divergences[-1]:.3f} nats a token")
    print(f"ratios clipped in the second epoch: {sum(clipped) / STEPS:.0%}")
    return {"rewards": means, "kl": divergences}


if __name__ == "__main__":
    main()
