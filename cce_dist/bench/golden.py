"""Golden losses and gradients in float64, and the errors of a method against them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import IGNORE_INDEX, BenchInputs

# hidden [N, D], weight [V, D], targets [N] -> mean loss over the tokens that are not ignored
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]

# Our methods are timed only if each gradient's relative Frobenius error is at most this many times
# that of the dense recipe in the same dtype.
WORST_ERROR_RATIO = 1.5
GRADIENT_ERRORS = ("grad_hidden_error", "grad_weight_error")
# Loss scale in fp16: gradients of a mean over tokens then lie well above fp16's smallest number.
FP16_SCALE = 2.0**12
# Numbers in a float64 temporary: 1 GiB.
CHUNK_ELEMENTS = 2**27
# Rows of each gradient in a sample.
SAMPLE_ROWS = 512


@dataclass(frozen=True)
class Gradients:
    loss: Tensor
    hidden: Tensor
    weight: Tensor


def dense_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    softcap: float | None = None,
    entropy_bonus: float = 0.0,
) -> Tensor:
    """Computes the mean loss by the dense recipe, minus `entropy_bonus` times the mean entropy.

    Logits are in the inputs' dtype, softcap and softmax in fp32 (in float64 for float64).
    """
    logits = hidden @ weight.T
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    loss = F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX)
    if not entropy_bonus:
        return loss
    log_p = wide.log_softmax(-1)
    return loss - entropy_bonus * mean_of(-(log_p.exp() * log_p).sum(-1), targets)


def num_counted(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum().clamp(min=1)


def mean_of(nll: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of per-token losses over the tokens that are not ignored, in fp32 (float64
    for float64)."""
    wide = nll if nll.dtype == torch.float64 else nll.float()
    return wide.masked_fill(targets == IGNORE_INDEX, 0.0).sum() / num_counted(targets)


def gradients(method: LossFunction, inputs: BenchInputs) -> Gradients:
    """Computes a method's loss and gradients.

    In fp16 the loss is multiplied by FP16_SCALE, as a loss scaler does; the gradients are divided
    by it in fp32.
    """
    hidden = inputs.hidden.detach().requires_grad_()
    weight = inputs.weight.detach().requires_grad_()
    loss = method(hidden, weight, inputs.targets)
    if hidden.dtype != torch.float16:
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return Gradients(loss.detach(), hidden.grad, weight.grad)
    (loss.float() * FP16_SCALE).backward()
    assert hidden.grad is not None and weight.grad is not None
    unscaled = (grad.float() / FP16_SCALE for grad in (hidden.grad, weight.grad))
    return Gradients(loss.detach(), *unscaled)


def golden_gradients(inputs: BenchInputs, chunk: int | None = None) -> Gradients:
    """Computes loss and gradients in float64 by dense code.

    It takes `chunk` tokens at a time, since the logits of all tokens would not fit.
    """
    weight = inputs.weight.double()
    chunk = chunk or _chunk_of(inputs)
    loss = weight.new_zeros(())
    grad_weight = torch.zeros_like(weight)
    grad_hidden = torch.zeros_like(inputs.hidden, dtype=torch.float64)
    valid = (inputs.targets != IGNORE_INDEX).nonzero().squeeze(1)
    for tokens in valid.split(chunk):
        rows, ids = inputs.hidden[tokens].double(), inputs.targets[tokens]
        nll, grad = _nll_and_grad(rows @ weight.T, ids, inputs)
        loss += nll
        grad_hidden[tokens] = grad @ weight
        grad_weight.addmm_(grad.T, rows)
    count = max(len(valid), 1)
    return Gradients(loss / count, grad_hidden.div_(count), grad_weight.div_(count))


def _chunk_of(inputs: BenchInputs) -> int:
    return max(64, min(2048, CHUNK_ELEMENTS // len(inputs.weight)))


def _nll_and_grad(
    logits: Tensor,  # [n, V] without a softcap
    targets: Tensor,  # [n] int64
    inputs: BenchInputs,
    columns: Tensor | None = None,  # int64
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the tokens' losses, and its gradient of those columns of the logits."""
    softcap, bonus = inputs.softcap, inputs.entropy_bonus
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = logits.log_softmax(-1)
    nll = -log_p.gather(1, targets[:, None]).sum()
    of_entropy = 0.0
    if bonus:
        entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
        nll -= bonus * entropy.sum()
        chosen = log_p if columns is None else log_p[:, columns]
        of_entropy = bonus * chosen.exp() * (chosen + entropy)
    if columns is None:
        grad = log_p.exp_()
        grad[torch.arange(len(targets), device=targets.device), targets] -= 1
    else:
        grad, logits = log_p[:, columns].exp_(), logits[:, columns]
        grad -= (targets[:, None] == columns).to(grad.dtype)
    grad += of_entropy
    if softcap is not None:
        grad *= 1 - (logits / softcap) ** 2
    return nll, grad


@dataclass(frozen=True)
class Reference:
    """Loss and gradients in float64, and the errors that the dense recipe has in the inputs' dtype.

    Args:
        tokens, ids: rows of the hidden and the weight gradient to compare; None: all rows.
    """

    golden: Gradients
    dense: dict[str, float]
    tokens: Tensor | None = None
    ids: Tensor | None = None

    def errors_of(self, method: LossFunction, inputs: BenchInputs) -> dict[str, float]:
        grads = gradients(method, inputs)
        if self.tokens is not None:
            grads = Gradients(grads.loss, grads.hidden[self.tokens], grads.weight[self.ids])
        return errors(grads, self.golden)


def full_reference(inputs: BenchInputs) -> Reference:
    golden = golden_gradients(inputs)
    recipe = functools.partial(
        dense_loss, softcap=inputs.softcap, entropy_bonus=inputs.entropy_bonus
    )
    return Reference(golden, errors(gradients(recipe, inputs), golden))


def sampled_reference(inputs: BenchInputs) -> Reference:
    """Returns the reference of SAMPLE_ROWS rows of each gradient, in a third of the time.

    Half of the weight's rows are those of drawn tokens' targets, so that frequent ids are among
    them; the others are any ids. No target may be ignored.
    """
    device = inputs.targets.device
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, vocab_size = len(inputs.targets), len(inputs.weight)
    tokens = torch.randperm(num_tokens, generator=generator, device=device)[:SAMPLE_ROWS]
    any_ids = torch.randperm(vocab_size, generator=generator, device=device)[: SAMPLE_ROWS // 2]
    ids = torch.cat([inputs.targets[tokens[: SAMPLE_ROWS // 2]], any_ids]).unique()
    golden = sampled_gradients(inputs, tokens, ids, torch.float64)
    dense = sampled_gradients(inputs, tokens, ids, inputs.hidden.dtype)
    return Reference(golden, errors(dense, golden), tokens, ids)


@torch.no_grad()
def sampled_gradients(
    inputs: BenchInputs, tokens: Tensor, ids: Tensor, dtype: torch.dtype
) -> Gradients:
    """Computes the loss, and rows of both gradients, as the dense recipe does in `dtype`.

    It takes some tokens at a time, and their logits alone are complete.

    Args:
        tokens, ids: rows of the hidden and the weight gradient, int64.
    """
    hidden, weight = inputs.hidden.to(dtype), inputs.weight.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    count, parts = len(hidden), []
    step = _chunk_of(inputs)
    for rows, targets in zip(hidden.split(step), inputs.targets.split(step), strict=True):
        logits = (rows @ weight.T).to(wide)
        nll, grad = _nll_and_grad(logits, targets, inputs, ids)
        loss += nll
        parts.append(grad.div_(count).to(dtype))
    grad_weight = torch.cat(parts).T @ hidden
    logits = (hidden[tokens] @ weight.T).to(wide)
    _, grad = _nll_and_grad(logits, inputs.targets[tokens], inputs)
    return Gradients(loss / count, grad.div_(count).to(dtype) @ weight, grad_weight)


def relative_error(ours: Tensor, golden: Tensor) -> float:
    """Returns the Frobenius norm of the difference over that of `golden`.

    It needs no large temporaries.
    """
    step = max(1, 2**24 // max(golden.shape[-1], 1))
    difference = golden.new_zeros(())
    total = golden.new_zeros(())
    for rows, golden_rows in zip(ours.split(step), golden.split(step), strict=True):
        difference += (rows.double() - golden_rows).square_().sum()
        total += golden_rows.square().sum()
    return float((difference / total).sqrt())


def require_correct(
    name: str,
    ours: Mapping[str, float],
    dense: Mapping[str, float],
    *,
    worst_ratio: float,
    slack: float,
) -> None:
    """Compares a method's errors of the gradients with those of the dense recipe.

    Raises:
        RuntimeError: an error is NaN, or more than worst_ratio times the dense one plus slack.
    """
    for key in GRADIENT_ERRORS:
        # `ours > ...` would let a NaN pass.
        if not ours[key] <= worst_ratio * dense[key] + slack:
            raise RuntimeError(
                f"{name}: {key} is {ours[key]:.2e}, more than {worst_ratio:g} times that of the "
                f"dense computation ({dense[key]:.2e}); nothing was timed"
            )


def errors(ours: Gradients, golden: Gradients) -> dict[str, float]:
    """Returns the relative errors of the loss, and of both gradients in the Frobenius norm."""
    golden_loss = float(golden.loss)
    return {
        "loss_error": abs(float(ours.loss) - golden_loss) / abs(golden_loss),
        "grad_hidden_error": relative_error(ours.hidden, golden.hidden),
        "grad_weight_error": relative_error(ours.weight, golden.weight),
    }
