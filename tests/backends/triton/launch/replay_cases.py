"""Calls of the loss that are recorded, and what their tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cce_dist import Filter, LossOutput, linear_cross_entropy, linear_distillation
from cce_dist.backends.triton.launch import replay
from cce_dist.backends.triton.launch.steps import Recording
from cce_dist.testing import Place

# A loss is a forward and a backward. Ways that are recorded by parts pick their tokens apart.
PLAYED = {"distillation": 3, "reverse KL": 3, "Jensen-Shannon": 4}
FILTER = Filter(keep=0.01)
# Two blocks of tokens, and three tiles of columns, neither of them whole.
TOKENS, COLUMNS = 140, 300
# Every kernel: those of each gradient, of screened logits, of statistics and of a bias.
WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": FILTER},
    "exact": {"gradient": "exact", "softcap": 5.0, "bias": True, "stats": ("lse", "correct")},
    "in_forward": {"gradient": "in_forward", "filter": FILTER, "label_smoothing": 0.1},
    # Two chunks of tokens. In fp32 torch multiplies, in fp16 kernels do.
    "three products": {
        **{"gradient": "in_forward", "filter": Filter(keep=0), "workspace_bytes": 2**18},
        **{"dtype": torch.float32, "stats": ("lse", "tail_mass"), "bias": True},
    },
    "three products, fp16": {
        **{"gradient": "in_forward", "filter": Filter(keep=0), "workspace_bytes": 2**17},
    },
    "screened": {"logits": "screened", "filter": FILTER, "stats": ("entropy", "correct")},
    "distillation": {"teacher": True, "filter": FILTER, "bias": True, "alpha": 0.2},
    "reverse KL": {"teacher": True, "filter": FILTER, "divergence": "reverse_kl"},
    "Jensen-Shannon": {"teacher": True, "filter": FILTER, "divergence": "jsd", "alpha": 0.2},
}


def problem(place: Place, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float16
    weight = 0.3 * torch.randn(COLUMNS, 48, generator=generator).to(dtype)
    hidden = torch.randn(TOKENS, 48, generator=generator).to(dtype)
    targets = torch.randint(0, COLUMNS, (TOKENS,), generator=generator)
    targets[::7] = -100
    return tuple(x.to(place.device) for x in (hidden, weight, targets))


def run(tensors: tuple[Tensor, Tensor, Tensor], **options: Any) -> list[Tensor]:
    dtype = options.pop("dtype", tensors[0].dtype)
    hidden, weight = (x.detach().clone().to(dtype).requires_grad_() for x in tensors[:2])
    bias = None
    if options.pop("bias", False):
        bias = torch.linspace(-1, 1, len(weight), device=hidden.device)
    options |= {"backend": "triton", "bias": bias}
    if options.pop("teacher", False):
        teacher = (tensors[0].flip(0), tensors[1].flip(0))
        result: Any = linear_distillation(hidden, weight, *teacher, tensors[2], **options)
    else:
        result = linear_cross_entropy(hidden, weight, tensors[2], **options)
    loss = result.loss if isinstance(result, LossOutput) else result
    loss.backward()
    results = result if isinstance(result, LossOutput) else [loss]
    values = [x.detach() for x in results if isinstance(x, Tensor)]
    assert hidden.grad is not None and weight.grad is not None
    return [*values, hidden.grad, weight.grad]


def recordings() -> list[Recording]:
    return [kind for kind in kinds() if isinstance(kind, Recording)]


def kinds() -> list[Any]:
    return [kind for function in replay._functions for kind in function.kinds.values()]


def require_same(first: list[Tensor], second: list[Tensor]) -> None:
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)


def unaligned(tensor: Tensor) -> Tensor:
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)
