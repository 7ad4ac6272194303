"""The first call compiles its kernels side by side, and other numbers of tokens take the same."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cce_dist import Filter, linear_cross_entropy, linear_distillation
from cce_dist.backends.triton import warm_up
from cce_dist.backends.triton.forward.hopper import why_no_gluon
from cce_dist.backends.triton.launch import replay
from cce_dist.backends.triton.launch import start as launch_start
from cce_dist.backends.triton.launch.start import (
    LONGEST,
    _compiling,
    can_compile_only,
    compile_only,
    start,
)
from cce_dist.core.observer import observer

CPU = torch.device("cpu")


class Recorded:
    """What `start` needs of a kernel."""

    __name__ = "recorded_kernel"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **_: self.calls.append(("launch", grid, args))

    def warmup(self, *args: Any, grid: tuple[int, ...], **_: Any) -> None:
        self.calls.append(("warmup", grid, args))


def test_nothing_is_started_while_kernels_compile_only() -> None:
    if not can_compile_only():
        pytest.skip("this Triton compiles in the launch alone")
    kernel = Recorded()
    with compile_only(CPU):
        start(kernel, (3,))(1, 2)
    start(kernel, (4,))(5)
    assert kernel.calls == [("warmup", (3,), (1, 2)), ("launch", (4,), (5,))]


def test_an_error_ends_compiling_only() -> None:
    if not can_compile_only():
        pytest.skip("this Triton compiles in the launch alone")
    kernel = Recorded()
    with pytest.raises(RuntimeError, match="out of memory"), compile_only(CPU):
        raise RuntimeError("out of memory")
    with compile_only(CPU):
        start(kernel, (1,))()
    start(kernel, (1,))()
    assert [call[0] for call in kernel.calls] == ["warmup", "launch"]
    assert not [t for t in threading.enumerate() if t.name.startswith("cce_dist compiles")]


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the way of compiling, and nothing is compiled."""
    monkeypatch.setattr(launch_start, "interpreted", lambda: False)
    monkeypatch.setattr(launch_start, "can_compile_only", lambda: True)
    monkeypatch.setattr(launch_start, "compile_only", lambda device: nullcontext())
    monkeypatch.setattr(launch_start, "_compiled", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.mark.usefixtures("compiling")
def test_kernels_compile_for_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.clear()

    seen: list[torch.device] = []
    monkeypatch.setattr(launch_start, "on_device", on_device)
    other = torch.device("cuda", 1)
    for _ in range(2):
        launch_start.compile_together("kind", other, lambda: seen.extend(current))
    assert seen == [other]


@pytest.mark.usefixtures("compiling")
def test_what_failed_is_compiled_again() -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        launch_start.compile_together("kind", CPU, fail)
    calls: list[int] = []
    launch_start.compile_together("kind", CPU, lambda: calls.append(1))
    assert calls == [1]


class Slow:
    """A kernel whose compilation notes its name."""

    def __init__(self, name: str, compiled: list[str]) -> None:
        self.__name__, self.compiled = name, compiled

    def warmup(self, *, grid: tuple[int, ...], **_: Any) -> Any:
        # As Triton's mode does, whose arguments differ from release to release.
        compiling = _compiling.get()
        assert compiling is not None
        return compiling.submit(self.compiled.append, self.__name__)


def test_the_longest_compilation_starts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_compile_only():
        pytest.skip("this Triton compiles in the launch alone")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    compiled: list[str] = []
    with compile_only(CPU):
        for name in ("pick_kernel", "forward_kernel", "filtered_kernel", "store_kernel"):
            start(Slow(name, compiled), (1,))()
    assert compiled == ["filtered_kernel", "forward_kernel", "pick_kernel", "store_kernel"]


def test_the_collector_waits_while_kernels_compile() -> None:
    if not can_compile_only():
        pytest.skip("this Triton compiles in the launch alone")
    gc.enable()
    with compile_only(CPU):
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with compile_only(CPU):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_longest_names_kernels_that_exist() -> None:
    kernels = Path(warm_up.__file__).parent / "kernels"
    source = "".join(path.read_text() for path in kernels.rglob("*.py"))
    assert [name for name in LONGEST if f"def {name}(" not in source] == []


# A process of its own, as the first call of a process is what it is about.
FIRST_CALLS = """
import json, sys, threading
import torch
from triton import knobs
from cce_dist import linear_cross_entropy

compiled = []

def heard(src, metadata, metadata_group, times, cache_hit):
    if not cache_hit:
        in_launch = not threading.current_thread().name.startswith("cce_dist compiles")
        compiled.append((metadata["name"], metadata["hash"], in_launch))

knobs.compilation.listener = heard
options = json.loads(sys.argv[1])
dtype = getattr(torch, options.pop("dtype"))
plain = {name: value for name, value in options.items() if name != "logits"}
made = torch.Generator().manual_seed(0)
weight = torch.randn(5000, 96, generator=made).to("cuda", dtype).requires_grad_()
report = []
for tokens in (700, 700, 8192, 257, 8191, 144, 1, 128, 100):
    compiled.clear()
    hidden = torch.randn(tokens, 96, generator=made).to("cuda", dtype).requires_grad_()
    targets = torch.randint(0, 5000, (tokens,), generator=made).cuda()
    # What the memory held before must not show.
    junk = torch.full((1 << 22,), -1, dtype=torch.int64, device="cuda")
    del junk
    loss = linear_cross_entropy(hidden, weight, targets, backend="triton", **options)
    loss.backward()
    exact = linear_cross_entropy(
        hidden.double(), weight.double(), targets, backend="torch", **plain
    )
    assert (loss.double() - exact).abs() <= 1e-4 * exact, (tokens, loss, exact)
    report.append((tokens, list(compiled)))
torch.cuda.synchronize()
print(json.dumps(report))
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16", "softcap": 20.0},
        {"dtype": "float32"},
        {"dtype": "bfloat16", "gradient": "in_forward"},
        {"dtype": "bfloat16", "label_smoothing": 0.1},
        {"dtype": "bfloat16", "logits": "screened"},
        {"dtype": "bfloat16", "gradient": "exact"},
    ],
    ids=["bf16", "fp16-softcap", "fp32", "in_forward", "smoothing", "screened", "exact"],
)
def test_first_calls_compile_side_by_side(options: dict[str, Any], tmp_path: Path) -> None:
    if not can_compile_only():
        pytest.skip("this Triton compiles in the launch alone")
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS, json.dumps(options)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, *others = json.loads(done.stdout)
    # Nothing was left for the launches, and nothing was compiled twice.
    assert not [name for name, _, in_launch in first[1] if in_launch], first
    last = "filtered_kernel"
    if options.get("gradient") == "exact":
        on_hopper = torch.cuda.get_device_capability()[0] == 9 and why_no_gluon() is None
        last = "hopper_exact_kernel" if on_hopper else "exact_products_kernel"
    assert last in [name for name, _, _ in first[1]]
    hashes = [made for _, made, _ in first[1]]
    assert len(set(hashes)) == len(hashes)
    # One block's tokens keep their order, which takes a few kernels more, once. So do columns that
    # `exact` computes in several chunks, but for Hopper's kernel.
    seen_one_block = False
    several_chunks = ["exact_products_kernel"] if last == "exact_products_kernel" else []
    for tokens, compiled in others:
        one_block = tokens <= 128
        assert not [name for name, _, in_launch in compiled if in_launch], (tokens, compiled)
        if several_chunks and [name for name, _, _ in compiled] == several_chunks:
            several_chunks = []
        elif not one_block or seen_one_block:
            assert not compiled, (tokens, compiled)
        seen_one_block |= one_block


# -- binaries ------------------------------------------------------------------------------------

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

    def call(self, function: Callable[..., Any], args: Any, named: Any) -> Any:
        return function(*args, **named)

    def enter_phase(self, phase: Any) -> None: ...

    def leave_phase(self) -> None: ...


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
    dtype = torch.float32
    if name == "screened teacher":
        options["logits"], dtype = "screened", torch.float16
    if name == "exact":
        options |= {"gradient": "exact", "filter": Filter()}
    if name in ("loss", "exact"):
        loss: Any = linear_cross_entropy(hidden, weight, targets, **options)
    else:
        teacher = (torch.randn(size, 2 * DIM).to(dtype) for size in (tokens, COLUMNS))
        if "cross-entropy" in name:
            options["alpha"] = 0.3
        if "reverse KL" in name:
            options["divergence"] = "reverse_kl"
        if "Jensen-Shannon" in name:
            options["divergence"] = "jsd"
        loss = linear_distillation(hidden, weight, *teacher, targets, **options)
    loss.backward()


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("tokens", [TOKENS, 100])
@pytest.mark.parametrize(
    "name",
    [
        *("loss", "exact", "distillation", "with cross-entropy", "screened teacher", "reverse KL"),
        *("reverse KL and cross-entropy", "Jensen-Shannon", "Jensen-Shannon and cross-entropy"),
    ],
)
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
    replay.forget_recordings()
    with noted() as started:
        run(name, tokens)
    assert warmed
    later = {kernel[0] for kernel in started - warmed}
    assert later <= {"count_kernel", "place_kernel"}, later
