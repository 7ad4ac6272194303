"""A divergence of two heads by us and by others, each under one signature.

All compute the mean over tokens of the teacher's divergence at its temperature, without a factor
temperature^2. A peer is imported when it is built. If that fails, a row says why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.contenders import Contender, import_alone
from benchmarks.distillation.inputs import JSD_BETA, Measured, Teacher, divergence_of
from cce_dist import linear_cross_entropy
from cce_dist.bench.golden import LossFunction
from cce_dist.distillation import DistillationOutput, linear_distillation
from cce_dist.options import GradientMode, LogitsMode

# Tokens whose logits a chunked contender has at a time: Liger's own default.
CHUNK = 1024
# Of TRL and Liger; between 0 and 1 theirs weighs as ours does.
BETAS: dict[Measured, float] = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": JSD_BETA}
# Tokens whose logits the bare products have at a time: 0.6 GB in bf16 at 151936 ids.
PRODUCT_CHUNK = 2048

# hidden [N, D], weight [V, D] -> divergence of each token [N], fp32
DivergenceFunction = Callable[[Tensor, Tensor], Tensor]


class Built(NamedTuple):
    loss: LossFunction
    tokens: DivergenceFunction | None  # None: the mean alone is known


def ours(gradient: GradientMode, teacher: Teacher, *, logits: LogitsMode = "full") -> Built:
    """Returns `linear_distillation`."""
    distill = partial(
        linear_distillation,
        divergence=teacher.divergence,
        beta=JSD_BETA,
        temperature=teacher.temperature,
        gradient=gradient,
        logits=logits,
    )
    tensors = teacher.hidden, teacher.weight

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        result = distill(hidden, weight, *tensors)
        assert isinstance(result, Tensor)
        return result

    def tokens(hidden: Tensor, weight: Tensor) -> Tensor:
        result = distill(hidden, weight, *tensors, stats=("divergence",))
        assert isinstance(result, DistillationOutput) and result.divergence is not None
        return result.divergence

    return Built(loss, tokens)


def _mean(tokens: DivergenceFunction) -> Built:
    return Built(lambda hidden, weight, targets: tokens(hidden, weight).mean(), tokens)


def dense_divergence(
    hidden: Tensor,  # [n, D]
    weight: Tensor,  # [V, D]
    teacher_hidden: Tensor,  # [n, D_teacher]
    teacher_weight: Tensor,  # [V, D_teacher]
    temperature: float,
    divergence: Measured = "forward_kl",
) -> Tensor:
    """Computes each token's divergence by logits in the inputs' dtype.

    The softmaxes are in fp32 (in float64 for float64).
    """
    student, teacher = hidden @ weight.T, teacher_hidden @ teacher_weight.T
    if student.dtype != torch.float64:
        student, teacher = student.float(), teacher.float()
    log_q = (student / temperature).log_softmax(-1)
    log_p = (teacher / temperature).log_softmax(-1)
    return divergence_of(log_q, log_p, divergence)


def dense(teacher: Teacher, *, compiled: bool = False) -> Built:
    """Returns the dense recipe on the logits of all tokens."""
    function: Any = torch.compile(dense_divergence, dynamic=False) if compiled else dense_divergence
    of_teacher = teacher.hidden, teacher.weight, teacher.temperature, teacher.divergence
    return _mean(lambda hidden, weight: function(hidden, weight, *of_teacher))


def compiled_in_chunks(teacher: Teacher) -> Built:
    """Returns the compiled dense recipe on the logits of some tokens at a time.

    The backward computes a chunk's logits again.
    """
    function: Any = torch.compile(dense_divergence, dynamic=False)

    def tokens(hidden: Tensor, weight: Tensor) -> Tensor:
        chunks = zip(hidden.split(CHUNK), teacher.hidden.split(CHUNK), strict=True)
        others = teacher.weight, teacher.temperature, teacher.divergence
        parts = [
            checkpoint(function, rows, weight, of_teacher, *others, use_reentrant=False)
            for rows, of_teacher in chunks
        ]
        return torch.cat(parts)

    return _mean(tokens)


def trl(teacher: Teacher) -> Built:
    """Returns the function that TRL's DistillationTrainer calls, on tiles of the logits."""
    # Its trainer's helpers import `datasets`; of these it needs one, which gathers under ZeRO-3.
    gather = {"maybe_gather_lm_head_ctx": lambda *tensors: nullcontext()}
    module = import_alone("trl.kernels.chunked_divergence", {"trl.trainer.utils": gather})
    function = module.ChunkedDivergenceFunction.apply
    options = BETAS[teacher.divergence], teacher.temperature

    def tokens(hidden: Tensor, weight: Tensor) -> Tensor:
        of_teacher = teacher.hidden, teacher.weight, None
        divergence, _ = function(hidden, weight, None, *of_teacher, *options)
        return divergence

    return _mean(tokens)


def liger_chunked(teacher: Teacher) -> Built:
    """Returns Liger's loss on compiled chunks of tokens."""
    make = resolve_name("liger_kernel.chunked_loss.jsd_loss:LigerFusedLinearJSDLoss")
    jsd = make(
        weight_hard_loss=0.0,
        weight_soft_loss=1.0,
        beta=BETAS[teacher.divergence],
        temperature=teacher.temperature,
        compiled=teacher.hidden.is_cuda,
        chunk_size=CHUNK,
    )

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return jsd(hidden, weight, teacher.hidden, teacher.weight, targets)

    return Built(loss, None)


def liger(accum_dtype: torch.dtype | None, teacher: Teacher) -> Built:
    """Returns Liger's loss by Triton kernels.

    Its Jensen-Shannon is NaN where both models' probabilities of an id underflow in fp32.
    """
    make = resolve_name("liger_kernel.transformers.fused_linear_jsd:LigerFusedLinearJSD")
    beta = BETAS[teacher.divergence]
    jsd = make(jsd_beta=beta, temperature=teacher.temperature, accum_dtype=accum_dtype)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return jsd(hidden, weight, teacher.hidden, teacher.weight, None)

    return Built(loss, None)


def fla(fp32: bool, teacher: Teacher) -> Built:
    """Returns flash-linear-attention's loss in chunks.

    It takes no temperature: hidden states are divided, which rounds them if it is no power of two.

    Raises:
        ValueError: it has forward KL alone.
    """
    if teacher.divergence != "forward_kl":
        raise ValueError(f"FLA has forward_kl alone, got {teacher.divergence!r}")
    make = resolve_name("fla.modules.fused_kl_div.ops:FusedKLDivLoss")
    divergence = make(accumulate_grad_in_fp32=fp32)
    T = teacher.temperature
    of_teacher = teacher.hidden if T == 1 else teacher.hidden / T

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        rows = hidden if T == 1 else hidden / T
        return divergence(rows, of_teacher, weight, teacher.weight)

    return Built(loss, None)


# -- what no distillation can do without ----------------------------------------------------------


def products(teacher: Teacher) -> LossFunction:
    """Returns the bare products of both models' logits, some tokens at a time; their value is 0.

    With gradients the two products of the student's gradients are computed too.
    """

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return _Products.apply(hidden, weight, teacher, torch.is_grad_enabled())

    return loss


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, teacher: Teacher, with_grad: bool
    ) -> Tensor:
        tensors = hidden, weight
        grads = [torch.zeros_like(tensor) for tensor in tensors] if with_grad else []
        logits = hidden.new_empty(min(PRODUCT_CHUNK, len(hidden)), len(weight))
        for tokens in torch.arange(len(hidden)).split(PRODUCT_CHUNK):
            rows, out = slice(int(tokens[0]), int(tokens[-1]) + 1), logits[: len(tokens)]
            torch.mm(teacher.hidden[rows], teacher.weight.T, out=out)
            torch.mm(hidden[rows], weight.T, out=out)
            if with_grad:
                torch.mm(out, weight, out=grads[0][rows])
                grads[1].addmm_(out.T, hidden[rows])
        ctx.save_for_backward(*grads)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.saved_tensors, None, None


def cross_entropy(teacher: Teacher) -> LossFunction:
    """Returns `linear_cross_entropy` of the student's head at the temperature, with filtered
    gradients: its backward does what a distillation's has to do by the student's columns."""
    scale = 1 / teacher.temperature

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        result = linear_cross_entropy(
            hidden, weight, targets, logit_scale=scale, gradient="filtered"
        )
        assert isinstance(result, Tensor)
        return result

    return loss


# Measured beside every contender, in turns.
PRODUCTS, CROSS_ENTROPY = "products", "cross-entropy"
REFERENCES: dict[str, Callable[[Teacher], LossFunction]] = {
    PRODUCTS: products,
    CROSS_ENTROPY: cross_entropy,
}
NOTES = {
    PRODUCTS: "bare products: both heads' logits, with gradients the student's two as well",
    CROSS_ENTROPY: "of the student alone, with filtered gradients",
}
IN_FORWARD = "its forward computes the gradients"

# In the order in which they are measured. Compilers of their own come last.
CONTENDERS = {
    "filtered": Contender("ours", partial(ours, "filtered")),
    "screened": Contender("ours", partial(ours, "filtered", logits="screened"), on_cpu=False),
    "in_forward": Contender("ours", partial(ours, "in_forward")),
    "exact": Contender("ours", partial(ours, "exact")),
    "dense": Contender("dense", dense),
    "trl": Contender("peer", trl),
    "torch-compile": Contender("peer", partial(dense, compiled=True), on_cpu=False),
    "torch-compile-chunked": Contender(
        "peer", compiled_in_chunks, on_cpu=False, note="checkpointed chunks of 1024 tokens"
    ),
    "liger-chunked": Contender("peer", liger_chunked, note=IN_FORWARD),
    "liger": Contender("peer", partial(liger, None), note=IN_FORWARD),
    "liger-fp32": Contender(
        "peer", partial(liger, torch.float32), note=f"{IN_FORWARD}, the weight's in fp32"
    ),
    "fla-16bit": Contender("peer", partial(fla, False), note=IN_FORWARD),
    "fla": Contender("peer", partial(fla, True), note=f"{IN_FORWARD}, the weight's in fp32"),
}
