"""Gemma 2's head, tied to its embedding, with the final logits capped at 30; and a z-loss.

The cap is Gemma 2's `final_logit_softcapping` (arXiv:2408.00118); the z-loss of 1e-4 is PaLM's
(arXiv:2204.02311), and keeps the log-sum-exp of the logits near 0.

    python docs/examples/gemma.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cce_dist import LossOutput, linear_cross_entropy

VOCAB, DIM, LENGTH, BATCH, STEPS = 2048, 64, 32, 4, 20
SOFTCAP, Z_LOSS = 30.0, 1e-4


class TiedModel(nn.Module):
    """A body of one layer between Gemma's ends: a scaled embedding, a norm, the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.norm = nn.RMSNorm(DIM)
        nn.init.normal_(self.embedding.weight, std=DIM**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * DIM**0.5
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return self.norm(x)


def compute_loss(model: TiedModel, ids: Tensor, z_loss: float) -> LossOutput:
    out = linear_cross_entropy(
        model(ids),
        model.embedding.weight,
        ids,
        shift=1,
        softcap=SOFTCAP,
        z_loss=z_loss,
        stats=("lse", "logit_moments"),
    )
    assert isinstance(out, LossOutput)
    return out


def train(z_loss: float) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = TiedModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = last = None
    for _ in range(STEPS):
        start = torch.randint(64, (BATCH, 1), device=device)
        last = compute_loss(model, (start + 7 * torch.arange(LENGTH, device=device)) % 64, z_loss)
        last.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        first = first or last
    assert first is not None and last is not None
    assert last.lse is not None and last.logit_moments is not None
    return {
        "first loss": first.loss.item(),
        "last loss": last.loss.item(),
        "log-sum-exp": last.lse.mean().item(),
        "largest logit": last.logit_moments.max.max().item(),
    }


def main() -> dict[float, dict[str, float]]:
    found = {z_loss: train(z_loss) for z_loss in (0.0, Z_LOSS, 100 * Z_LOSS)}
    for z_loss, figures in found.items():
        print(
            f"z-loss {z_loss:g}: loss {figures['first loss']:.3f} -> {figures['last loss']:.3f}, "
            f"mean log-sum-exp {figures['log-sum-exp']:.3f}, largest logit "
            f"{figures['largest logit']:.2f} of at most {SOFTCAP:g}"
        )
    return found


if __name__ == "__main__":
    main()
