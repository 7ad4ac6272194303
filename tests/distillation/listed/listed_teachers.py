"""Students beside listed teachers, and their divergences by dense logits in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cce_dist import DistillationOutput, TeacherLogprobs, listed_distillation
from cce_dist.reference import divergence_reference, reference_logits

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
RESTS = ("class", "left_out")
TOKENS, CLASSES, DIM, LISTED = (3, 23), 90, 24, 6
LEAVES = ("hidden", "weight", "bias")
BETA = 0.3  # of "jsd"
OPTIONS: dict[str, Any] = {
    "temperature": 1.7,
    "alpha": 0.25,
    "softcap": 6.0,
    "logit_scale": 0.8,
    "shift": 1,
}


@dataclass(frozen=True)
class Student:
    """A student's tensors, and a teacher's largest log-probabilities with some padding."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    teacher: TeacherLogprobs

    @classmethod
    def make(cls, dtype: torch.dtype, width: int = LISTED) -> Student:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        targets = torch.randint(CLASSES, TOKENS, generator=generator)
        targets[0, 3], targets[2, -1] = -100, -100
        logits = 2 * torch.randn(*TOKENS, CLASSES, generator=generator, dtype=torch.float64)
        logprobs, ids = logits.log_softmax(-1).topk(width)
        if 2 < width < CLASSES:
            # Padding: listed beside it, or not.
            logprobs[..., -2:][:, ::3] = -torch.inf
            ids[..., -2:][:, ::3] = ids[:, ::3, :1]
            logprobs[:, 1::5, 1] = -torch.inf
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return cls(
            randn(*TOKENS, DIM),
            randn(CLASSES, DIM),
            randn(CLASSES),
            targets,
            TeacherLogprobs(ids, logprobs.to(wide)),
        )

    def on(self, device: str) -> Student:
        there = {name: getattr(self, name).to(device) for name in (*LEAVES, "targets")}
        return replace(
            self, **there, teacher=TeacherLogprobs(*(x.to(device) for x in self.teacher))
        )

    def leaves(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        tensors = {name: getattr(self, name).detach().clone() for name in LEAVES}
        return {name: x.to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()}

    def run(self, leaves: dict[str, Tensor], **options: Any) -> DistillationOutput:
        beta = {"beta": BETA} if options.get("divergence") == "jsd" else {}
        listed = listed_distillation(
            **leaves,
            teacher=self.teacher,
            targets=self.targets,
            **{
                **OPTIONS,
                **beta,
                "reduction": "none",
                "stats": ("divergence", "nll"),
                "gradient": "exact",
                **options,
            },
        )
        assert isinstance(listed, DistillationOutput)
        return listed

    def dense(self, leaves: dict[str, Tensor], rest: str, divergence: str) -> DistillationOutput:
        """In float64, by a softmax of K or K + 1 columns of dense logits."""
        z = reference_logits(
            leaves["hidden"],
            leaves["weight"],
            leaves["bias"],
            softcap=OPTIONS["softcap"],
            logit_scale=OPTIONS["logit_scale"],
        )[..., :-1, :]
        targets = self.targets[..., 1:]
        counts, index = targets >= 0, targets.clamp_min(0)[..., None]
        nll = torch.where(counts, -z.log_softmax(-1).gather(-1, index)[..., 0], 0)
        value = torch.zeros_like(nll)
        ids, log_p = self.teacher.ids[..., :-1, :], self.teacher.logprobs[..., :-1, :].double()
        log_q = (z / OPTIONS["temperature"]).log_softmax(-1)
        for at in counts.nonzero().tolist():
            place = tuple(at)
            real = log_p[place] > -torch.inf
            value[place] = one_token(
                log_q[place], ids[place][real], log_p[place][real], rest, divergence
            )
        alpha = OPTIONS["alpha"]
        return DistillationOutput((1 - alpha) * value + alpha * nll, value, nll)


def one_token(log_q: Tensor, ids: Tensor, log_p: Tensor, rest: str, divergence: str) -> Tensor:
    student, teacher = log_q[ids], log_p
    if rest == "class" and len(ids) < len(log_q):
        outside = torch.ones_like(log_q, dtype=torch.bool).index_fill(0, ids, False)
        student = torch.cat([student, log_q[outside].logsumexp(0, keepdim=True)])
        teacher = torch.cat([teacher, (1 - log_p.exp().sum(0, keepdim=True)).log()])
    return divergence_reference(student, teacher, divergence, BETA)


def upstream_of(loss: Tensor) -> Tensor:
    return torch.linspace(-1, 2, loss.numel()).view(loss.shape).to(loss)


def error(computed: Tensor, expected: Tensor) -> float:
    difference = (computed.double().cpu() - expected).norm() / expected.norm()
    return float(difference.detach())
