"""LoRA on the head: logits of W + scale B A, with W frozen, and without W + scale B A.

h (W + scale B A)^T = [h, scale h A^T] [W, B]^T: the loss takes hidden states of D + rank columns,
and a weight that has B's columns beside W's. Nothing is merged.

    python docs/examples/lora_head.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cce_dist import linear_cross_entropy
from cce_dist.core.allocations import track_allocations

VOCAB, DIM, RANK, TOKENS, STEPS = 8192, 64, 8, 128, 25
MIB = 2**20
# Of the loss, small beside the weight, as it is in a real job.
WORKSPACE_BYTES = MIB // 2


class LoraHead(nn.Module):
    """`weight` [V, D] is copied once, to have B's columns beside it.

    `a` and `b` are what an optimizer steps. `b` is those columns of `wide`; it gets their part of
    the gradient of `wide`, and the rest of that is dropped at once.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float = 1.0) -> None:
        super().__init__()
        num_rows, dim = weight.shape
        self.scale = scale
        self.a = nn.Parameter(torch.randn(rank, dim, device=weight.device) / dim**0.5)
        self.wide = torch.cat([weight, weight.new_zeros(num_rows, rank)], 1).requires_grad_()
        self.b = nn.Parameter(self.wide.detach()[:, dim:])
        self.wide.register_post_accumulate_grad_hook(self._hand_over)

    def _hand_over(self, wide: Tensor) -> None:
        assert wide.grad is not None
        part = wide.grad[:, -self.b.shape[1] :]
        self.b.grad = part.clone() if self.b.grad is None else self.b.grad + part
        wide.grad = None

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        low = self.scale * hidden @ self.a.T
        both = torch.cat([hidden, low], -1)
        return linear_cross_entropy(both, self.wide, targets, workspace_bytes=WORKSPACE_BYTES)


def merged_loss(
    hidden: Tensor, weight: Tensor, a: Tensor, b: Tensor, targets: Tensor, scale: float
) -> Tensor:
    """The other way: a [V, D] sum in every step, and its gradient, from which a's and b's come."""
    merged = torch.addmm(weight, b, a, alpha=scale)
    return linear_cross_entropy(hidden, merged, targets, workspace_bytes=WORKSPACE_BYTES)


def measure(run: Callable[[], Tensor]) -> int:
    """Bytes of tensors at the peak of the forward and backward, beyond what was there before."""
    run().backward()  # On a GPU the first call compiles.
    if not torch.cuda.is_available():
        with track_allocations() as allocations:
            run().backward()
        return allocations.peak_bytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run().backward()
    return torch.cuda.max_memory_allocated() - before


def main() -> dict[str, object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, DIM, device=device) / DIM**0.5
    hidden = torch.randn(TOKENS, DIM, device=device)
    targets = torch.randint(VOCAB, (TOKENS,), device=device)
    head = LoraHead(weight, RANK, scale=2.0)
    optimizer = torch.optim.AdamW([head.a, head.b], lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = head(hidden, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    frozen = torch.equal(head.wide.detach()[:, :DIM], weight)
    a, b = (each.detach().clone().requires_grad_() for each in (head.a, head.b))
    memory = {
        "columns beside": measure(lambda: head(hidden, targets)),
        "merged": measure(lambda: merged_loss(hidden, weight, a, b, targets, head.scale)),
    }
    states = 2 * 4 * (head.a.numel() + head.b.numel()), 2 * 4 * weight.numel()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps; W unchanged: {frozen}")
    for name, num_bytes in memory.items():
        print(f"forward and backward, {name}: {num_bytes / MIB:.2f} MiB")
    print(f"of which the weight's gradient, whole in both: {weight.nbytes / MIB:.2f} MiB")
    print(f"AdamW's moments: {states[0] / MIB:.2f} MiB; of a trained W {states[1] / MIB:.2f} MiB")
    return {"losses": losses, "frozen": frozen, "memory": memory}


if __name__ == "__main__":
    main()
