"""Description of the machine, and measurement of time and memory of a method's parts."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import random
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cce_dist.core.allocations import track_allocations

from .golden import LossFunction
from .inputs import IGNORE_INDEX, BenchInputs

# About 5 ms on the device: more than the host needs for the first launches of any method.
HEAD_START_CYCLES = 8_000_000
# The host's times scatter less than a tenth over so many calls.
HOST_REPEATS = 15
FLUSH_BYTES = 256 * 2**20

Part = Literal["loss", "forward", "gradient", "loss+grad"]
# Number of [N, V, D] matrix products that each part needs at least.
NUM_PRODUCTS: dict[Part, int] = {"loss": 1, "forward": 1, "gradient": 2, "loss+grad": 3}
FLOORS: dict[str, Part] = {"one matmul": "loss", "three matmuls": "loss+grad"}

Key = TypeVar("Key")


def describe_machine(device: torch.device) -> dict[str, str]:
    """Returns date, device, software and commit, which every published table names."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": _device_name(device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "commit": _output_of("git", "describe", "--always", "--dirty") or "unknown",
    }


def version_of(package: str, otherwise: str = "none") -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}{_driver(device)}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else platform.processor() or "CPU"


def _driver(device: torch.device) -> str:
    query = ("--query-gpu=clocks.max.sm,driver_version", "--format=csv,noheader")
    lines = _output_of("nvidia-smi", *query).splitlines()
    return ", {}, driver {}".format(*lines[device.index or 0].split(", ")) if lines else ""


def _output_of(*command: str) -> str:
    """Returns what a command prints; empty if it is absent or fails."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


@dataclass(frozen=True)
class Variant:
    """A call to time: `run` is timed, and gets the result of `prepare`, called just before."""

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    # Frees what `run` left.
    finish: Callable[[], None] = lambda: None

    @contextmanager
    def prepared(self) -> Iterator[Callable[[], object]]:
        """Prepares the call and yields it; frees what it left."""
        prepared = self.prepare()
        try:
            yield lambda: self.run(prepared)
        finally:
            self.finish()


class Timer:
    """A timer of single launches; before each it overwrites a buffer, so that caches are cold.

    Args:
        align: called just before each launch, so that the devices of all ranks start together.
    """

    def __init__(
        self,
        device: torch.device,
        head_start_cycles: int = HEAD_START_CYCLES,
        align: Callable[[], object] = lambda: None,
    ) -> None:
        self.device = device
        self.head_start_cycles = head_start_cycles
        self.align = align
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def seconds(self, variant: Variant) -> float:
        with variant.prepared() as call:
            if self.device.type == "cuda":
                return self._seconds_on_device(call)
            self.flush.zero_()
            self.align()
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

    def start_ahead(self) -> None:
        """Keeps the device busy while the host launches: in a training step the host is ahead."""
        torch.cuda._sleep(self.head_start_cycles)
        self.align()

    def _seconds_on_device(self, call: Callable[[], object]) -> float:
        synchronize(self.device)
        self.flush.zero_()
        self.start_ahead()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        synchronize(self.device)
        return start.elapsed_time(end) / 1e3


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """Forgets compiled code, and lets many methods and shapes be compiled in the context.

    Code that was compiled for another shape would run as a generic kernel. Beyond the usual limit,
    methods that share a code object would fall back to eager mode.
    """
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def interleaved_times(
    variants: Mapping[Key, Variant],
    repeats: Mapping[Key, int],
    timer: Timer,
    failed: Callable[[Key, Exception], None] | None = None,
) -> dict[Key, list[float]]:
    """Returns the seconds of each variant, `repeats` times, taken in turns: drift hits all alike.

    Each turn has another order. A variant that heats the device makes the next one a fifth slower,
    so no variant may always follow the same one. The first turn warms up and is thrown away.

    Args:
        failed: called with the error of a variant that raises, which is left out from then on;
            None: the error is raised.
    """
    times: dict[Key, list[float]] = {key: [] for key in variants}
    live = dict(variants)
    order = random.Random(0)
    for turn in range(max(repeats.values(), default=0) + 1):
        for key, variant in order.sample(list(live.items()), len(live)):
            if turn > repeats[key]:
                continue
            try:
                times[key].append(timer.seconds(variant))
            except Exception as error:
                if failed is None:
                    raise
                del live[key]
                failed(key, error)
    return {key: taken[1:] for key, taken in times.items()}


def peak_extra_bytes(variant: Variant, device: torch.device) -> int:
    """Returns the peak memory of `run` beyond the memory in use before; its results count."""
    with variant.prepared() as call:
        if device.type == "cuda":
            synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            call()
            synchronize(device)
            return torch.cuda.max_memory_allocated(device) - before
        with track_allocations() as allocations:
            call()
        return allocations.peak_bytes


def host_seconds(variants: Iterable[Variant], device: torch.device) -> list[float]:
    """Returns the host's times of calls, each from an idle device until `run` returns.

    Other memory is allocated and freed between the calls, as a training step does: each call gets
    other addresses.
    """
    taken, sizes = [], random.Random(0)
    others: deque[list[torch.Tensor]] = deque(maxlen=4)
    for variant in variants:
        num_bytes = [sizes.randrange(1, most) for most in (2**12, 2**18, 2**22) for _ in range(3)]
        others.append([torch.empty(size, dtype=torch.uint8, device=device) for size in num_bytes])
        with variant.prepared() as call:
            synchronize(device)
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
            synchronize(device)
    return taken


def count_launches(variant: Variant, device: torch.device) -> int:
    """Returns the number of kernels, copies and fills that `run` starts on a CUDA device."""
    with variant.prepared() as call:
        synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            call()
            synchronize(device)
    events = profiler.events() or []
    return sum(event.device_type == DeviceType.CUDA for event in events)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_parts(option: str, names: Sequence[str]) -> tuple[Part, ...]:
    """Returns the named parts in their usual order.

    Raises:
        ValueError: a name is no part; the message names the option.
    """
    unknown = sorted(set(names) - set(get_args(Part)))
    if unknown:
        raise ValueError(f"{option} must be among {list(get_args(Part))}, got {unknown}")
    return tuple(part for part in get_args(Part) if part in names)


def compacting(function: LossFunction) -> LossFunction:
    """Returns a loss that calls `function` on the tokens that are not ignored."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        counted = targets != IGNORE_INDEX
        return function(hidden[counted], weight, targets[counted])

    return loss


def variant_of(function: LossFunction, inputs: BenchInputs, part: Part) -> Variant:
    """Returns a variant that runs one part of a loss.

    "loss" runs without grad; "forward" keeps what a backward needs; "gradient" is the backward
    alone, after a forward that is not timed.
    """
    hidden = inputs.hidden.detach().requires_grad_()
    weight = inputs.weight.detach().requires_grad_()

    def reset() -> None:
        hidden.grad = weight.grad = None

    def forward(_: object = None) -> Tensor:
        return function(hidden, weight, inputs.targets)

    def reset_and_forward() -> Tensor:
        reset()
        return forward()

    variants = {
        "loss": Variant(torch.no_grad()(forward)),
        "forward": Variant(forward),
        "gradient": Variant(Tensor.backward, reset_and_forward, reset),
        "loss+grad": Variant(lambda _: forward().backward(), reset, reset),
    }
    return variants[part]


def floor_variants(inputs: BenchInputs) -> dict[tuple[str, Part], Variant]:
    """Returns variants of bare matrix products of the tokens that are not ignored.

    One variant is hidden @ weight.T alone, the other all three products of loss and gradients.
    """
    rows, weight = inputs.without_ignored().hidden, inputs.weight
    logits = rows.new_empty(len(rows), len(weight))
    grad_hidden, grad_weight = torch.empty_like(rows), torch.empty_like(weight)

    def one(_: object) -> None:
        torch.mm(rows, weight.T, out=logits)

    def three(_: object) -> None:
        torch.mm(rows, weight.T, out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.T, rows, out=grad_weight)

    runs = {"one matmul": one, "three matmuls": three}
    return {(name, part): Variant(runs[name]) for name, part in FLOORS.items()}
