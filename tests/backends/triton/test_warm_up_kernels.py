"""The warm-up of a first call compiles the kernels that the call then starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cce_dist import Filter, linear_cross_entropy, linear_distillation
from cce_dist.backends.triton import warm_up
from cce_dist.backends.triton.launch import replay
from cce_dist.core.observer import observer

TOKENS, COLUMNS, DIM = 300, 400, 32
FILTER = Filter(keep=0.01)


class Binaries:
    """Notes each kernel's binary: what Triton compiles one for."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, ...]] = set()

    def launch(self, kernel: Any, grid: Any, args: Any, named: Any, compiled: Any) -> None:
        signature = inspect.signature(kernel.fn)
        names = set(signature.parameters)
        bound = signature.bind(*args, **{k: v for k, v in named.items() if k in names})
        bound.apply_defaults()
        parts = [(k, v) for k, v in named.items() if k not in names]
        for name, value in bound.arguments.items():
            constant = "constexpr" in str(signature.parameters[name].annotation)
            parts.append((name, value if constant else kind_of(value)))
        self.seen.add((kernel.fn.__name__, *parts))

    def fork(self, first: bool) -> int:
        return 0

    def end_fork(self) -> None: ...

    def join(self, fork: int) -> None: ...

    def collective(self, function: Callable[..., Any], args: Any, named: Any) -> Any:
        return function(*args, **named)


def kind_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype
    return type(value).__name__


@contextmanager
def noted() -> Iterator[set[tuple[Any, ...]]]:
    binaries = Binaries()
    token = observer.set(binaries)
    try:
        yield binaries.seen
    finally:
        observer.reset(token)


def run(name: str, tokens: int) -> None:
    options: dict[str, Any] = {"backend": "triton", "filter": FILTER, "bias": torch.zeros(COLUMNS)}
    hidden = torch.randn(tokens, DIM, requires_grad=True)
    weight = torch.randn(COLUMNS, DIM, requires_grad=True)
    targets = torch.randint(COLUMNS, (tokens,))
    if name == "loss":
        loss: Any = linear_cross_entropy(hidden, weight, targets, **options)
    else:
        teacher = torch.randn(tokens, 2 * DIM), torch.randn(COLUMNS, 2 * DIM)
        if name == "with cross-entropy":
            options["alpha"] = 0.3
        loss = linear_distillation(hidden, weight, *teacher, targets, **options)
    loss.backward()


@pytest.mark.parametrize("tokens", [TOKENS, 100])
@pytest.mark.parametrize("name", ["loss", "distillation", "with cross-entropy"])
def test_no_kernel_is_compiled_later(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: set[tuple[Any, ...]] = set()
    go_through = warm_up._go_through

    def note(*arguments: Any) -> None:
        with noted() as seen:
            go_through(*arguments)
        warmed.update(seen)

    # The interpreter runs what a GPU would compile.
    monkeypatch.setattr(warm_up, "_go_through", note)
    monkeypatch.setattr(warm_up, "interpreted", lambda: False)
    monkeypatch.setattr(warm_up, "can_compile_only", lambda: True)
    monkeypatch.setattr(warm_up, "compile_only", lambda device: nullcontext())
    monkeypatch.setattr(warm_up, "_warmed_up", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    replay.forget_recordings()
    with noted() as started:
        run(name, tokens)
    assert warmed
    later = {kernel[0] for kernel in started - warmed}
    assert later <= {"count_kernel", "place_kernel"}, later
