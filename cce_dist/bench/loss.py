"""Loss and gradients: time, memory and error of each gradient mode beside dense torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist import Filter, LinearCrossEntropy, LossOutput, linear_cross_entropy
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.machine import interleaved_times, peak_extra_bytes
from cce_dist.bench.table import median_and_spread
from cce_dist.options import GradientMode

# What a run must not exceed before it is timed: relative Frobenius error of a gradient, over that
# of the dense recipe in the same dtype.
WORST_ERROR_RATIO = 1.5


@dataclass(frozen=True)
class Gradients:
    loss: Tensor
    hidden: Tensor
    weight: Tensor


def dense_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The dense recipe: logits in the inputs' dtype, softmax in fp32 (float64 for float64)."""
    logits = hidden @ weight.T
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets)


def methods(names: list[str] | None = None) -> dict[str, Callable[..., Tensor]]:
    """Every method by name, each (hidden, weight, targets) -> mean loss."""

    def ours(gradient: GradientMode) -> Callable[..., Tensor]:
        return LinearCrossEntropy(gradient=gradient)

    found: dict[str, Callable[..., Tensor]] = {
        "dense": dense_loss,
        "filtered": ours("filtered"),
        "exact": ours("exact"),
        "in_forward": ours("in_forward"),
    }
    chunked = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if chunked is not None:
        found["torch chunked"] = lambda hidden, weight, targets: F.linear_cross_entropy(
            hidden, weight, targets, options=chunked()
        )
    unknown = sorted(set(names or ()) - set(found))
    if unknown:
        raise ValueError(f"methods must be among {sorted(found)}, got {unknown}")
    return {name: run for name, run in found.items() if names is None or name in names}


def gradients(method: Callable[..., Tensor], inputs: BenchInputs) -> Gradients:
    hidden = inputs.hidden.detach().requires_grad_()
    weight = inputs.weight.detach().requires_grad_()
    loss = method(hidden, weight, inputs.targets)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Gradients(loss.detach(), hidden.grad, weight.grad)


def golden_gradients(inputs: BenchInputs, chunk: int = 512) -> Gradients:
    """float64, dense, a chunk of tokens at a time: the logits of all would not fit."""
    hidden, weight = inputs.hidden.double(), inputs.weight.double()
    loss = hidden.new_zeros(())
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    for start in range(0, len(hidden), chunk):
        rows, ids = hidden[start : start + chunk], inputs.targets[start : start + chunk]
        log_p = (rows @ weight.T).log_softmax(-1)
        loss -= log_p.gather(1, ids[:, None]).sum()
        grad = log_p.exp_()
        grad[torch.arange(len(ids)), ids] -= 1
        grad_hidden[start : start + chunk] = grad @ weight
        grad_weight.addmm_(grad.T, rows)
    return Gradients(loss / len(hidden), grad_hidden / len(hidden), grad_weight / len(hidden))


def relative_error(ours: Tensor, golden: Tensor) -> float:
    """Frobenius norm of the difference over that of the golden."""
    return float((ours.double() - golden).norm() / golden.norm())


def errors(found: Gradients, golden: Gradients) -> dict[str, float]:
    return {
        "loss_error": abs(float(found.loss) - float(golden.loss)),
        "grad_hidden_error": relative_error(found.hidden, golden.hidden),
        "grad_weight_error": relative_error(found.weight, golden.weight),
    }


def mean_tail_mass(inputs: BenchInputs, filter: Filter) -> float:
    with torch.no_grad():
        out = linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.targets, filter=filter, stats=("tail_mass",)
        )
    assert isinstance(out, LossOutput) and out.tail_mass is not None
    return float(out.tail_mass.mean())


def bench_loss(
    inputs: BenchInputs, *, repeats: int, only: list[str] | None = None
) -> list[dict[str, str]]:
    """One row a method; its errors are checked before anything is timed.

    Raises:
        RuntimeError: one of our gradients is further from float64 than WORST_ERROR_RATIO times
            the dense one.
    """
    device = inputs.hidden.device
    variants = methods(only)
    golden = golden_gradients(inputs)
    found = {name: errors(gradients(run, inputs), golden) for name, run in variants.items()}
    _require_correct(found)

    hidden = inputs.hidden.detach().requires_grad_()
    weight = inputs.weight.detach().requires_grad_()

    def step(method: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> None:
            hidden.grad = weight.grad = None
            method(hidden, weight, inputs.targets).backward()

        return run

    steps = {name: step(method) for name, method in variants.items()}
    times = interleaved_times(steps, repeats=repeats, device=device)
    roofline = 3 * matmul_seconds(inputs, repeats)
    flop = 6 * len(hidden) * len(weight) * hidden.shape[1]
    dense = statistics.median(times["dense"]) if "dense" in times else float("nan")
    rows = []
    for name, run in steps.items():
        median = statistics.median(times[name])
        rows.append(
            {
                "method": name,
                **median_and_spread(times[name]),
                "of_dense": f"{median / dense:.2f}",
                "tflop_per_s": f"{flop / median / 1e12:.3f}",
                "of_roofline": f"{roofline / median:.2f}",
                "peak_extra_mib": f"{peak_extra_bytes(run, device) / 2**20:.0f}",
                **{key: f"{value:.1e}" for key, value in found[name].items()},
                "tail_mass": f"{mean_tail_mass(inputs, Filter()):.1e}"
                if name == "filtered"
                else "0",
            }
        )
    return rows


def matmul_seconds(inputs: BenchInputs, repeats: int) -> float:
    """Median time of one bare hidden @ weight.T: loss and gradients are three such products."""
    device = inputs.hidden.device
    out = inputs.hidden.new_empty(len(inputs.hidden), len(inputs.weight))

    def matmul() -> None:
        torch.mm(inputs.hidden, inputs.weight.T, out=out)

    times = interleaved_times({"matmul": matmul}, repeats=repeats, device=device)
    return statistics.median(times["matmul"])


def _require_correct(found: dict[str, dict[str, float]]) -> None:
    if "dense" not in found:
        return
    for name in ("filtered", "exact", "in_forward"):
        for key in ("grad_hidden_error", "grad_weight_error"):
            if name not in found:
                continue
            got, bound = found[name][key], WORST_ERROR_RATIO * found["dense"][key]
            if got > bound:
                raise RuntimeError(
                    f"{name}: {key} is {got:.2e}, more than {WORST_ERROR_RATIO} times that of the "
                    f"dense computation ({bound / WORST_ERROR_RATIO:.2e}); nothing was timed"
                )
