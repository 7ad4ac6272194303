"""Fine-tuning with a frozen head: the body learns, and no gradient of the head is made.

python docs/examples/frozen_head.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cce_dist import linear_cross_entropy
from cce_dist.core.allocations import track_allocations

VOCAB, DIM, LENGTH, BATCH, STEPS = 8192, 64, 32, 4, 25
MIB = 2**20
# Of the loss, small beside the weight, as it is in a real job.
WORKSPACE_BYTES = MIB // 2


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        layers = (
            nn.TransformerEncoderLayer(
                DIM, 2, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> hidden [B, T, D]; the head's weight goes to the loss, as it is."""
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.norm(x)


def head_loss(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, ids, shift=1, workspace_bytes=WORKSPACE_BYTES)


def compute_loss(model: LanguageModel, ids: Tensor) -> Tensor:
    return head_loss(model(ids), model.head.weight, ids)


def make_text(generator: torch.Generator) -> Tensor:
    """[B, T]: each id is the one before it plus 7, of 64 ids that the model has to find."""
    first = torch.randint(64, (BATCH, 1), generator=generator)
    return (first + 7 * torch.arange(LENGTH)) % 64


def measure(run: Callable[[], Tensor]) -> int:
    """Bytes of tensors at the peak of the forward and backward, beyond what was there before."""
    if not torch.cuda.is_available():
        with track_allocations() as allocations:
            run().backward()
        return allocations.peak_bytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run().backward()
    return torch.cuda.max_memory_allocated() - before


def measure_head(model: LanguageModel, ids: Tensor) -> dict[str, int]:
    """The head alone, after the first call, which on a GPU compiles."""
    hidden = model(ids).detach().requires_grad_()
    weight = model.head.weight.detach()
    trained = weight.clone().requires_grad_()
    head_loss(hidden, trained, ids).backward()
    hidden.grad = trained.grad = None
    found = {}
    for name, each in (("frozen head", weight), ("trained head", trained)):
        found[name] = measure(lambda each=each: head_loss(hidden, each, ids))
        hidden.grad = trained.grad = None
    return found


def main() -> dict[str, object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = LanguageModel().to(device)
    model.head.requires_grad_(False)
    before = model.head.weight.clone()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = compute_loss(model, make_text(generator).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    unchanged = torch.equal(model.head.weight, before) and model.head.weight.grad is None
    memory = measure_head(model, make_text(generator).to(device))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    print(f"head unchanged, without a gradient: {unchanged}")
    for name, num_bytes in memory.items():
        print(f"forward and backward of a {name}: {num_bytes / MIB:.2f} MiB")
    print(f"the gradient that is not made: {before.nbytes / MIB:.2f} MiB")
    return {"losses": losses, "unchanged": unchanged, "memory": memory}


if __name__ == "__main__":
    main()
