"""A teacher on other ranks than its student: its K likeliest ids of each token are what travels.

Ranks 0 and 1 hold the student, ranks 2 and 3 the teacher, each half of its model's head. The text
is the README's bytes. First the teacher learns it; the student learns from the teacher alone.

    torchrun --nproc-per-node 4 docs/examples/teacher_elsewhere.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist import TeacherLogprobs, linear_cross_entropy, listed_distillation, teacher_topk
from cce_dist.distributed import init, leave

VOCAB, LENGTH, BATCH, K, TEMPERATURE = 256, 32, 8, 16, 1.5
WIDTH, TEACHER_DIM, TEACHER_STEPS, STUDENT_DIM, STEPS = 5, 64, 40, 32, 30
TEXT = Path(__file__).parents[2] / "README.md"


class LanguageModel(nn.Module):
    """The same body on each of `parts` ranks, and the rank's rows of the head."""

    def __init__(self, dim: int, part: int, parts: int) -> None:
        super().__init__()
        torch.manual_seed(dim)
        self.embedding = nn.Embedding(VOCAB, dim)
        self.mix = nn.Conv1d(dim, 4 * dim, WIDTH)
        self.down = nn.Linear(4 * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Parameter((torch.randn(VOCAB, dim) / dim**0.5).chunk(parts)[part].clone())

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> hidden [B, T, dim], each of the last WIDTH bytes."""
        x = self.embedding(ids)
        mixed = self.mix(nn.functional.pad(x.transpose(1, 2), (WIDTH - 1, 0))).transpose(1, 2)
        return self.norm(x + self.down(nn.functional.gelu(mixed)))


def draw_batch(text: Tensor, step: int) -> Tensor:
    """[B, T] of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    return text[first.to(text.device) + torch.arange(LENGTH, device=text.device)]


def text_loss(model: LanguageModel, ids: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return linear_cross_entropy(model(ids), model.head, ids, shift=1, group=group)


def list_teacher(
    teacher: LanguageModel, ids: Tensor, group: dist.ProcessGroup | None
) -> TeacherLogprobs:
    """[B, T, K] of the whole vocabulary's softmax, on every rank of the group."""
    with torch.no_grad():
        hidden = teacher(ids)
    return teacher_topk(hidden, teacher.head, K, temperature=TEMPERATURE, group=group)


def compute_loss(
    student: LanguageModel,
    ids: Tensor,
    lists: TeacherLogprobs,
    group: dist.ProcessGroup | None,
) -> Tensor:
    return listed_distillation(
        student(ids), student.head, lists, temperature=TEMPERATURE, group=group
    )


def teach(text: Tensor, group: dist.ProcessGroup, part: int, student_rank: int) -> None:
    teacher = LanguageModel(TEACHER_DIM, part, 2).to(text.device)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
    for step in range(TEACHER_STEPS):
        optimizer.zero_grad()
        text_loss(teacher, draw_batch(text, step), group).backward()
        optimizer.step()
    for step in range(STEPS):
        lists = list_teacher(teacher, draw_batch(text, step), group)
        for each in lists:
            dist.send(each, student_rank)


def learn(text: Tensor, group: dist.ProcessGroup, part: int, teacher_rank: int) -> None:
    student = LanguageModel(STUDENT_DIM, part, 2).to(text.device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    shape = (BATCH, LENGTH, K)
    lists = TeacherLogprobs(
        torch.empty(shape, dtype=torch.int64, device=text.device),
        torch.empty(shape, device=text.device),
    )
    losses, of_text = [], []
    for step in range(STEPS):
        for each in lists:
            dist.recv(each, teacher_rank)
        ids = draw_batch(text, step)
        loss = compute_loss(student, ids, lists, group)
        with torch.no_grad():
            of_text.append(text_loss(student, ids, group).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if part == 0:
        print(f"divergence {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
        print(f"cross-entropy of the text {of_text[0]:.3f} -> {of_text[-1]:.3f}")
        of_lists = sum(each.nbytes for each in lists) / 1024
        of_logits = BATCH * LENGTH * VOCAB * torch.float32.itemsize / 1024
        print(f"a batch's lists: {of_lists:.0f} KiB; its logits: {of_logits:.0f} KiB")


def main() -> None:
    ranks = init(tp=2, dp=2)  # NCCL on GPUs, gloo on CPUs; a group of two for each model
    text = torch.tensor(list(TEXT.read_bytes()), device=ranks.device)
    part = ranks.rank % 2
    if ranks.rank < 2:
        learn(text, ranks.tp_group, part, teacher_rank=2 + part)
    else:
        teach(text, ranks.tp_group, part, student_rank=part)
    leave(ranks)


if __name__ == "__main__":
    main()
