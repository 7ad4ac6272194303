"""A classifier of 100,000 classes that are no words: each image is a class of its own.

Instance discrimination (Exemplar-CNN, arXiv:1406.6909; arXiv:1805.01978): of an augmented view of
an image the encoder has to say which image it is. The "weight" is the classes' embeddings, and the
loss that of a language model's head. Images are random smooth patterns, made on the spot.

    python docs/examples/instance_classes.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import Filter, LossOutput, linear_cross_entropy
from cce_dist.core.allocations import track_allocations

CLASSES, DIM, BATCH, STEPS = 100_000, 64, 128, 300
SIDE, CROP, HIDDEN, SEED_SIDE = 18, 16, 6, 6
# Cosines are at most 1: at this scale the softmax over 100,000 of them can be sharp.
LOGIT_SCALE = 20.0
# Of a column in a block of 128 images. In fp32 the default would drop next to nothing.
FILTER = Filter(keep=2.0**-10)
WORKSPACE_BYTES = 8 * 2**20
MIB = 2**20

# hidden [N, D], weight [V, D], targets [N] -> mean loss
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Encoder(nn.Module):
    """[N, 1, 16, 16] -> [N, D] of norm 1."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * (CROP // 4) ** 2, dim),
            # Centred: else all cosines would be near 1 at first.
            nn.BatchNorm1d(dim, affine=False),
        )

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.body(images), dim=-1)


def make_images(num_classes: int, generator: torch.Generator) -> Tensor:
    """[V, 1, 6, 6]: what each image is upsampled from, so that 100,000 of them take 14 MiB."""
    return torch.randn(num_classes, 1, SEED_SIDE, SEED_SIDE, generator=generator)


def draw_views(images: Tensor, generator: torch.Generator) -> Tensor:
    """[N, 1, 16, 16]: cropped anywhere, of another contrast, noisy, with a square hidden."""
    count = len(images)
    large = F.interpolate(images, size=(SIDE, SIDE), mode="bicubic", align_corners=True)

    def corners(size: int, within: int) -> tuple[Tensor, Tensor]:
        first = torch.randint(within - size + 1, (2, count, 1), generator=generator)
        rows, columns = first + torch.arange(size)
        return rows[:, :, None], columns[:, None, :]

    each = torch.arange(count)[:, None, None]
    rows, columns = corners(CROP, SIDE)
    views = large[:, 0][each, rows, columns]
    views = views * (0.5 + torch.rand(count, 1, 1, generator=generator))
    views = views + 0.2 * torch.randn(views.shape, generator=generator)
    rows, columns = corners(HIDDEN, CROP)
    views[each, rows, columns] = 0
    return views[:, None]


def clean_views(images: Tensor) -> Tensor:
    """The middle of each image, as it is."""
    large = F.interpolate(images, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
    margin = (SIDE - CROP) // 2
    return large[..., margin : margin + CROP, margin : margin + CROP]


def filtered_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    loss = linear_cross_entropy(
        hidden,
        weight,
        targets,
        logit_scale=LOGIT_SCALE,
        filter=FILTER,
        workspace_bytes=WORKSPACE_BYTES,
    )
    assert isinstance(loss, Tensor)
    return loss


def dense_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(LOGIT_SCALE * hidden @ weight.T, targets)


LOSSES: dict[str, Loss] = {"filtered": filtered_loss, "dense": dense_loss}


class Classifier:
    """An encoder, and a weight [V, D] whose rows begin as what it makes of the clean images."""

    def __init__(self, images: Tensor, dim: int, device: str) -> None:
        self.device = device
        self.images = images
        self.encoder = Encoder(dim).to(device)
        with torch.no_grad():
            rows = [self.encoder(clean_views(part).to(device)) for part in images.split(1000)]
        self.weight = nn.Parameter(torch.cat(rows))
        self.optimizers = [
            torch.optim.AdamW(self.encoder.parameters(), lr=4e-3),
            torch.optim.SGD([self.weight], lr=0.3),
        ]

    def hidden(self, ids: Tensor, generator: torch.Generator) -> Tensor:
        return self.encoder(draw_views(self.images[ids], generator).to(self.device))

    def step(self, loss: Loss, ids: Tensor, generator: torch.Generator) -> float:
        value = loss(self.hidden(ids, generator), self.weight, ids.to(self.device))
        value.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return value.item()

    @torch.no_grad()
    def top1(self, ids: Tensor) -> float:
        """Share of new views of these images that are recognised, among all classes."""
        self.encoder.eval()
        generator = torch.Generator().manual_seed(1)
        right = 0
        for part in ids.split(1000):
            hidden, targets = self.hidden(part, generator), part.to(self.device)
            out = linear_cross_entropy(hidden, self.weight, targets, stats=("correct",))
            assert isinstance(out, LossOutput) and out.correct is not None
            right += int(out.correct.sum())
        self.encoder.train()
        return right / len(ids)


def train(name: str, num_classes: int, steps: int, batch: int) -> tuple[Classifier, list[dict]]:
    """The same images, views and order of classes whatever the loss."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Classifier(make_images(num_classes, generator), DIM, device)
    asked = torch.randperm(num_classes, generator=generator)[:2000]
    order = torch.empty(0, dtype=torch.int64)
    rows, losses, seconds = [], [], 0.0
    every = max(1, steps // 8)
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            mean = sum(losses) / len(losses) if losses else None
            row = {"method": name, "step": step, "views": step * batch, "loss": mean}
            rows.append({**row, "top1": model.top1(asked), "seconds": seconds})
            losses.clear()
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        if step == steps:
            break
        if len(order) < batch:
            order = torch.cat([order, torch.randperm(num_classes, generator=generator)])
        ids, order = order[:batch], order[batch:]
        began = time.perf_counter()
        losses.append(model.step(LOSSES[name], ids, generator))
        seconds += time.perf_counter() - began
    return model, rows


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


def compare(model: Classifier, batch: int) -> list[dict]:
    """Each loss of one batch of the trained model: gradients beside dense, memory, time."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(len(model.images), (batch,), generator=generator)
    hidden = model.hidden(ids, generator).detach()
    targets = ids.to(model.device)
    rows, dense = [], []
    for name in ("dense", "filtered"):
        leaves = [hidden.clone().requires_grad_(), model.weight.detach().clone().requires_grad_()]

        def run(name: str = name, leaves: list[Tensor] = leaves) -> Tensor:
            for leaf in leaves:
                leaf.grad = None
            return LOSSES[name](*leaves, targets)

        loss = run()  # On a GPU the first call compiles.
        grads = torch.autograd.grad(loss, leaves)
        dense = dense or grads
        errors = [
            (torch.linalg.vector_norm(ours - right) / torch.linalg.vector_norm(right)).item()
            for ours, right in zip(grads, dense, strict=True)
        ]
        row = {"method": name, "loss": loss.item(), "peak_mib": measure(run) / MIB}
        row["median_ms"] = 1e3 * statistics.median(seconds_of(run) for _ in range(5))
        rows.append({**row, "grad_hidden_error": errors[0], "grad_weight_error": errors[1]})
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
    return rows


def seconds_of(run: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    run().backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main(num_classes: int = CLASSES, steps: int = STEPS, batch: int = BATCH) -> dict[str, Any]:
    training, model = [], None
    for name in LOSSES:
        model, rows = train(name, num_classes, steps, batch)
        training += rows
    assert model is not None
    print(f"logits of one batch: {4 * batch * num_classes / MIB:.1f} MiB")
    return {"training": training, "loss": compare(model, batch)}


if __name__ == "__main__":
    main()
