"""What only a device shows of the Triton backend: graphs, waiting, memory, very large shapes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, linear_cross_entropy, token_logprobs
from cce_dist.testing import gaussian_inputs, zipf_inputs
from tests.support.loss_cases import generator

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": Filter(keep=0.02)},
    "default": {},
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward"},
    "chunks": {"gradient": "in_forward", "filter": Filter(keep=0)},
    "small_chunks": {"gradient": "in_forward", "filter": Filter(keep=0), "workspace_bytes": 2**20},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def tensors(seed: int, dtype: torch.dtype, ignored: float) -> dict[str, Tensor]:
    """One batch; the seed decides how sparse its softmax is as well."""
    maker = (zipf_inputs, gaussian_inputs)[seed % 2]
    inputs = maker(700, 5000, 64, generator=generator(seed), dtype=dtype)
    inputs = inputs.with_options(generator(seed), "bias").ignoring(generator(seed), ignored)
    return {
        name: getattr(inputs, name).to("cuda") for name in ("hidden", "weight", "bias", "targets")
    }


def step(given: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Forward and backward; loss, lse and gradients, still on the device."""
    leaves = {name: given[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")}
    result = linear_cross_entropy(
        leaves["hidden"],
        leaves["weight"],
        given["targets"],
        bias=leaves["bias"],
        backend="triton",
        stats=("lse",),
        **options,
    )
    grads = torch.autograd.grad(result.loss, list(leaves.values()))
    names = [f"grad_{name}" for name in leaves]
    return {"loss": result.loss, "lse": result.lse, **dict(zip(names, grads, strict=True))}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_triton_in_a_cuda_graph(way: str, dtype: str) -> None:
    static = tensors(0, DTYPES[dtype], 0.3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and lets libraries allocate
        for _ in range(2):
            step(static, WAYS[way])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, WAYS[way])
    # More and fewer columns kept, more and fewer tokens ignored, none and all of them.
    for seed, ignored in ((0, 0.3), (1, 0.0), (2, 0.8), (3, 1.0), (4, 0.1)):
        fresh = tensors(seed, DTYPES[dtype], ignored)
        for name, tensor in fresh.items():
            static[name].copy_(tensor)
        graph.replay()
        expected = step(fresh, WAYS[way])
        for name in expected:
            assert torch.equal(captured[name], expected[name]), (seed, name)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Any operation by which the host waits for the device is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


UNWAITED: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward"},
    "chunks": {"gradient": "in_forward", "filter": Filter(keep=0), "label_smoothing": 0.1},
    "filtered": {"filter": Filter(keep=0.02)},
    "tail_mass": {"filter": Filter(keep=0.02), "stats": ("lse", "tail_mass")},
    "stats": {"stats": ("lse", "entropy", "sum_p2", "correct", "logit_moments", "tail_mass")},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 0.01},
    "softcap": {"softcap": 5.0, "logit_scale": 0.9},
    "sum": {"reduction": "sum", "shift": 1},
    "none": {"reduction": "none", "gradient": "exact"},
}


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("options", UNWAITED.values(), ids=UNWAITED)
def test_triton_never_waits_for_the_device(options: dict[str, Any], weighted: bool) -> None:
    made = tensors(0, torch.bfloat16, 0.3)
    more: dict[str, Any] = {"bias": made["bias"].requires_grad_()}
    if weighted:
        more["class_weight"] = torch.rand(5000, device="cuda") + 0.5
        more["token_weight"] = torch.rand(700, device="cuda") + 0.5
    hidden, weight = made["hidden"].requires_grad_(), made["weight"].requires_grad_()

    def run() -> Tensor:
        result = linear_cross_entropy(
            hidden, weight, made["targets"], backend="triton", **more, **options
        )
        loss = result.loss if "stats" in options else result
        loss.backward(torch.ones_like(loss))
        return loss

    expected = run().detach()  # compiles
    hidden.grad = weight.grad = more["bias"].grad = None
    with no_waiting():
        found = run().detach()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("learned", [False, True], ids=["given", "learned"])
def test_token_logprobs_never_wait_for_the_device(learned: bool) -> None:
    made = tensors(0, torch.bfloat16, 0.3)
    names = ("hidden", "weight", "targets", "bias")
    given = {name: made[name] for name in names}
    hidden = given["hidden"].requires_grad_()
    shape = given["targets"].shape
    temperature = (torch.rand(shape, device="cuda") + 0.5).requires_grad_(learned)

    def run() -> Tensor:
        found = token_logprobs(**given, temperature=temperature, backend="triton").logprobs
        found.backward(torch.ones_like(found))
        return found

    expected = run().detach()  # compiles
    hidden.grad = temperature.grad = None
    with no_waiting():
        found = run().detach()
    assert torch.equal(found, expected)


def test_no_waiting_notices_waiting() -> None:
    values = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        values.nonzero()


def peak_bytes(function: Callable[[], object]) -> int:
    """Memory that `function` needs beyond what is allocated already."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("workspace_bytes", [2**16, 2**26], ids=["small", "default"])
@pytest.mark.parametrize("way", ["default", "exact"])
def test_triton_memory_is_bounded(way: str, workspace_bytes: int) -> None:
    # Logits would take 1 GiB, and the softmax in fp32 two more.
    num_tokens, num_classes, dim = 8192, 65_536, 256
    hidden = torch.randn(num_tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(num_classes, dim, device="cuda", dtype=torch.bfloat16)
    weight = (weight / 16).requires_grad_()
    targets = torch.randint(0, num_classes, (num_tokens,), device="cuda")
    options = {**WAYS[way], "backend": "triton", "workspace_bytes": workspace_bytes}

    def run() -> None:
        hidden.grad = weight.grad = None
        linear_cross_entropy(hidden, weight, targets, **options).backward()

    gradients = 2 * weight.numel() + (2 + 4) * hidden.numel()
    # Two tiles of columns are the least, and the filter's masses take a bf16 a column and block.
    workspace = max(workspace_bytes, 2 * 128 * num_tokens * 2)
    masses = 4 * num_classes * (num_tokens // 128)
    bound = gradients + 2 * workspace + 2 * masses + 32 * 2**20
    run()
    hidden.grad = weight.grad = None
    peak = peak_bytes(run)
    assert peak <= bound, f"{peak / 2**20:.0f} MiB of {bound / 2**20:.0f}"


def test_chunks_take_a_quarter_of_dense_logits() -> None:
    num_tokens, num_classes, dim = 8192, 65_536, 1024
    hidden = torch.randn(num_tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(num_classes, dim, device="cuda", dtype=torch.bfloat16)
    weight = (weight / 32).requires_grad_()
    targets = torch.randint(0, num_classes, (num_tokens,), device="cuda")

    def run() -> None:
        hidden.grad = weight.grad = None
        linear_cross_entropy(hidden, weight, targets, **WAYS["chunks"]).backward()

    run()
    hidden.grad = weight.grad = None
    extra = peak_bytes(run) - 2 * (weight.numel() + hidden.numel())
    assert extra <= 2 * num_tokens * num_classes // 4, f"{extra / 2**20:.0f} MiB"


def product64(left: Tensor, right: Tensor) -> Tensor:
    """left [n, K] @ right [K, m] in float64, for a `right` too large to hold in it."""
    pieces = zip(left.split(65_536, 1), right.split(65_536), strict=True)
    return sum((a.double() @ b.double() for a, b in pieces), left.new_zeros((), dtype=torch.double))


def check_some(
    hidden: Tensor, weight: Tensor, targets: Tensor, found: dict[str, Tensor], rows: Tensor
) -> None:
    """lse and grad_hidden of some tokens, against the logits of those alone in float64."""
    logits = torch.cat([hidden[rows].double() @ c.double().T for c in weight.split(65_536)], 1)
    lse = logits.logsumexp(-1)
    torch.testing.assert_close(found["lse"][rows].double(), lse, rtol=1e-6, atol=1e-5)
    d_logits = (logits - lse[:, None]).exp()
    d_logits[torch.arange(len(rows), device=rows.device), targets[rows]] -= 1
    expected = product64(d_logits, weight)
    ours = found["grad_hidden"][rows].double()
    assert float((ours - expected).norm()) <= 0.01 * float(expected.norm())


LARGE: dict[str, tuple[str, int, int, int]] = {
    "513_blocks_of_tokens": ("default", 65_664, 300, 64),  # nine words of marks
    "513_blocks_exact": ("exact", 65_664, 300, 64),
    "more_than_2_31_logits": ("default", 70_000, 40_000, 64),
    "more_than_2_31_logits_exact": ("exact", 70_000, 40_000, 64),
    "more_than_2_31_logits_of_a_chunk": ("chunks", 70_000, 160_000, 64),
    "more_than_2_31_elements_of_weight": ("default", 256, 530_000, 4096),
    "more_than_2_31_elements_of_hidden": ("exact", 530_000, 256, 4096),
}


@pytest.mark.parametrize("shape", LARGE)
def test_triton_large(shape: str) -> None:
    way, num_tokens, num_classes, dim = LARGE[shape]
    seeded = torch.Generator("cuda").manual_seed(0)
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": seeded}
    hidden = torch.randn(num_tokens, dim, **made)
    weight = torch.randn(num_classes, dim, **made).mul_(dim**-0.5)
    targets = torch.randint(0, num_classes, (num_tokens,), generator=seeded, device="cuda")
    # The last rows lie beyond 2**31 elements: they must be read, and written.
    targets[-3:] = num_classes - 1
    targets[:5] = -100
    hidden.requires_grad_()
    weight.requires_grad_()
    options = {**WAYS[way], "reduction": "sum", "stats": ("lse",), "backend": "triton"}
    result = linear_cross_entropy(hidden, weight, targets, **options)
    result.loss.backward()
    assert hidden.grad is not None and weight.grad is not None and result.lse is not None
    found = {"lse": result.lse.detach(), "grad_hidden": hidden.grad}
    assert not hidden.grad[:5].any() and not found["lse"][:5].any()
    rows = torch.cat([torch.arange(5, 21), torch.arange(num_tokens - 16, num_tokens)])
    check_some(hidden.detach(), weight.detach(), targets, found, rows.to("cuda"))
    # The last class: softmax - onehot, summed over the tokens.
    logits = torch.cat(
        [h.double() @ weight.detach()[-1].double() for h in hidden.detach().split(65_536)]
    )
    p = (logits - found["lse"].double()).exp()
    p[:5] = 0
    p -= (targets == num_classes - 1).double()
    expected = product64(p[None], hidden.detach())[0]
    ours = weight.grad[-1].double()
    assert float((ours - expected).norm()) <= 0.02 * float(expected.norm())
    del hidden, weight, result, found, logits, p
    torch.cuda.empty_cache()  # other processes test on the same device
