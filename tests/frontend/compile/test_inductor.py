"""Compiled to machine code, with loops of the caller's around the loss: the numbers of eager calls.

The compiler joins its own loops with those that read the loss. The other tests' has no loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from cce_dist import TokenSupport, linear_cross_entropy, linear_distillation, token_logprobs
from tests.frontend.compile.compile_cases import WARNING, poison  # noqa: F401

pytestmark = pytest.mark.filterwarnings(f"ignore:{WARNING}:DeprecationWarning")
CLASSES, DIM = 5000, 32


def policy(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Reads values of tokens by rows and as a whole, as a trainer does."""
    values = (0.0 - values.float()).masked_fill(~mask, 0.0)
    return values, -(values.sum() / mask.sum().clamp_min(1))


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, token_weight: Tensor) -> Any:
    out: Any = linear_cross_entropy(hidden, weight, labels, reduction="none", stats=("lse",))
    return policy(out.loss, labels != -100)


def loss(hidden: Tensor, weight: Tensor, labels: Tensor, token_weight: Tensor) -> Any:
    stats: Any = {"reduction": "none", "stats": ("lse", "entropy")}
    out: Any = linear_cross_entropy(hidden, weight, labels, token_weight=token_weight, **stats)
    return policy(out.loss + 0.1 * out.entropy, labels != -100)


def logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, token_weight: Tensor) -> Any:
    ids, mask, temperature = labels.clamp_min(0), labels != -100, 1 + token_weight
    out = token_logprobs(hidden, weight, ids, mask=mask, temperature=temperature)
    return policy(out.logprobs, mask)


def supported(hidden: Tensor, weight: Tensor, labels: Tensor, token_weight: Tensor) -> Any:
    ids, mask = labels.clamp_min(0), labels != -100
    listed = torch.stack([ids, ids, (ids + 7) % CLASSES, (ids + 9) % CLASSES], -1)
    support = TokenSupport(torch.arange(ids.numel() + 1) * 4, listed.reshape(-1))
    options: Any = {"support": support, "candidates": listed[..., :2], "stats": ("entropy",)}
    out = token_logprobs(hidden, weight, ids, mask=mask, **options)
    assert out.candidates is not None
    return policy(out.candidates.sum(-1) * token_weight + out.entropy, mask)


def distillation(hidden: Tensor, weight: Tensor, labels: Tensor, token_weight: Tensor) -> Any:
    teacher = (1.5 * hidden.detach(), weight.detach() + 0.01)
    out: Any = linear_distillation(
        *(hidden, weight, *teacher, labels), reduction="none", token_weight=token_weight
    )
    return policy(out, labels != -100)


FUNCTIONS = [plain, loss, logprobs, supported, distillation]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_compiler_sees_no_scatter(function: Callable[..., Any]) -> None:
    """Forward and backward: it may join a scatter with loops that read its memory first."""
    seen: set[str] = set()

    def note(graph: Any, inputs: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    labels = torch.arange(48).view(4, 12)
    leaves = [torch.randn(4, 12, DIM), torch.randn(CLASSES, DIM), torch.rand(4, 12)]
    hidden, weight, token_weight = (x.requires_grad_() for x in leaves)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    values, mean = compiled(hidden, weight, labels, token_weight)
    (values.square().sum() + mean).backward()
    assert hidden.grad is not None and any("cce_dist" in name for name in seen)
    scatters = ("scatter", "index_put", "index_copy", "index_add")
    assert not [name for name in seen if any(scatter in name for scatter in scatters)]


# Each kernel takes a second of C++: without gradients, the values that a rollout asks for. `plain`
# has no loop that `loss` lacks, and the gradient of `logprobs` none beside that of `loss`.
@pytest.mark.parametrize(
    ("function", "grad"),
    [(logprobs, False), *((each, True) for each in (loss, supported, distillation))],
)
def test_as_eager(function: Callable[..., Any], grad: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    body, labels = randn(DIM, DIM) / DIM**0.5, torch.randint(CLASSES, (4, 12), generator=generator)
    labels[:, :5], labels[2, 9:] = -100, -100
    leaves = [randn(4, 12, DIM), randn(CLASSES, DIM) / 4, randn(4, 12).sigmoid()]

    def run(x: Tensor, weight: Tensor, token_weight: Tensor) -> Any:
        hidden, targets = (x @ body).tanh(), labels[:, 1:]
        return function(hidden[:, :-1], weight, targets, token_weight[:, 1:])

    results = []
    for call in (run, torch.compile(run, fullgraph=True)):
        inputs = [x.clone().requires_grad_(grad) for x in leaves]
        with torch.set_grad_enabled(grad):
            values, mean = call(*inputs)
        results.append([values, mean])
        if grad:
            total = (values * values.detach()).sum() + mean
            results[-1] += torch.autograd.grad(total, inputs, allow_unused=True)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
