"""What holds for every test: seed 0, uninitialised memory that gives itself away, markers."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import pkgutil
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor

from cce_dist.backends.triton import kernels
from cce_dist.frontend.inputs import Extension
from cce_dist.testing import Place, RankPool, shared_pool, speed_up_interpreter
from cce_dist.testing.forks import GARBAGE, start_fork_server
from tests.gpu_runs.smoke import is_smoke

pytest_plugins = ["tests.gpu_runs.plugin"]

# Triton reads it when a kernel is decorated, so it must stand here before any is imported. The
# processes of a RankPool inherit it. All are imported at once: some tests set it to 0 for a while.
if torch.cuda.device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")
speed_up_interpreter()
# Ranks inherit it. A message wakes gloo's thread, which preempts the thread that holds the lock on
# the message's pair, and then polls without a pause. Batch processes preempt nobody when they wake:
# that saves a third of the core seconds of ranks.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
if importlib.util.find_spec("triton"):
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        # Gluon's have no interpreter, and not every Triton has their parts.
        if not module.name.rpartition(".")[2].startswith(("hopper", "gluon")):
            importlib.import_module(module.name)
# A test may be the first to need half a dozen kernels, while as many tests as there are cores do.
COMPILING_SECONDS = 300
# Whose processes are forks; fixtures whose processes are.
FORKING = (
    *(f"cce_dist.testing.{name}" for name in ("forks", "ranks")),
    *(f"tests.support.{name}" for name in ("agents", "faults", "torchrun")),
)
FORKING_FIXTURES = {"megatron_pools", "pools"}
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

# Reproducible, and no deadline: the machine's load must not decide whether a test passes.
hypothesis.settings.register_profile("cce_dist", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("cce_dist")

UNINITIALISED = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    torch.Tensor: ("new_empty", "new_empty_strided"),
}


def fill_with_poison(tensor: Tensor) -> Tensor:
    """NaN, or the integer that is farthest from any valid index, in place."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        info = torch.iinfo(tensor.dtype)
        return tensor.fill_(info.min or info.max)


def _poisoning(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return fill_with_poison(function(*args, **kwargs))

    return wrapper


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Until it ends, Python code gets poison from torch.empty and its relatives.

    PyTorch's own filling, torch.utils.deterministic, needs deterministic algorithms, which would
    test other kernels than users run.
    """
    # PyTorch remembers at the first use which functions `with torch.device(...)` redirects.
    with torch.device("cpu"):
        torch.empty(0)
    with ExitStack() as stack:
        for owner, names in UNINITIALISED.items():
            replacements = {name: _poisoning(getattr(owner, name)) for name in names}
            stack.enter_context(mock.patch.multiple(owner, **replacements))
        yield


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Of exactly two and four processes, which some jobs need, and the module's own: what stands in
    for torch.cuda, say, stays in them."""
    pools = {size: RankPool(size) for size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module", autouse=True)
def no_idle_pool() -> Iterator[None]:
    """Ends the shared pool with the module: idle, its threads take 5 % of a core; a start takes
    0.4 s."""
    yield
    if shared_pool.cache_info().currsize:
        shared_pool().close()


@pytest.fixture(scope="module")
def megatron_pools() -> Iterator[dict[int, RankPool]]:
    """The same, of forks of a process that has imported Megatron without CUDA, which takes seconds.
    The module's own: threads of their groups wake a hundred times a second."""
    from tests.megatron.megatron_setup import import_megatron

    prepare = functools.partial(import_megatron, "cpu")
    pools = {size: RankPool(size, prepare=prepare) for size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def gpu_pools() -> Iterator[dict[int, RankPool]]:
    """The same over NCCL; a job starts no more processes than it has GPUs for."""
    pools = {size: RankPool(size, backend="nccl") for size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="session", autouse=True)
def small_calls_are_screened() -> None:
    # Triton's interpreter screens them anyway.
    if torch.cuda.is_available() and importlib.util.find_spec("triton"):
        from cce_dist.backends.triton.screened.quantize import screen_small_calls

        screen_small_calls()


@pytest.fixture(autouse=True)
def no_recordings() -> Iterator[None]:
    """A test may replace what a recorded call has called."""
    yield
    replay = sys.modules.get("cce_dist.backends.triton.launch.replay")
    if replay is not None:
        replay.forget_recordings()


@pytest.fixture(autouse=True)
def no_patch() -> Iterator[None]:
    """A test's patch of transformers ends with the test."""
    yield
    integration = sys.modules.get("cce_dist.integrations.transformers")
    if integration is not None:
        integration.remove()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call prepares everything: a test sees the Python functions that a played call skips."""
    with contextlib.suppress(ImportError):
        from cce_dist.backends.triton.launch import replay

        monkeypatch.setattr(replay, "MOST_KINDS", 0)


@pytest.fixture
def unextended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has the tokens that it was given: a test looks at tensors within it."""
    monkeypatch.setattr(Extension, "of", lambda inputs, options: None)


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # The same; but for a GPU that may come torch.manual_seed keeps each call with its stack.
        torch.default_generator.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "Show each failure when it comes: a run may be ended before its summary."
    parser.addoption("--failures-at-once", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--failures-at-once") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce())


class FailuresAtOnce:
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            heading = f"{report.nodeid}, {report.when}, {report.duration:.0f} s"
            print(f"\n{heading}\n{report.longreprtext}", file=sys.stderr, flush=True)


# Before -m chooses by the markers that are given here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = getattr(item, "callspec", None) and item.callspec.params.get("place")
        if isinstance(place, Place) and place.device == "cuda":
            item.add_marker("gpu")
        if isinstance(place, Place) and place.interprets:
            item.add_marker("interpreter")
        if is_smoke(item.nodeid) and any(map(item.get_closest_marker, ("gpu", "multigpu"))):
            item.add_marker("smoke")
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(COMPILING_SECONDS))
        for reason in reasons_to_skip(item):
            item.add_marker(pytest.mark.skip(reason=reason))


# Before a test's time begins.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if forks(item):
        start_fork_server()
    return (yield)


def forks(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    names = vars(item.module).values()
    uses = any(getattr(each, "__module__", None) in FORKING for each in names)
    return uses or not FORKING_FIXTURES.isdisjoint(item.fixturenames)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    # What is imported and collected is never garbage, and slow to look through.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(GARBAGE)
        gc.enable()


def reasons_to_skip(item: pytest.Item) -> Iterator[str]:
    num_devices = torch.cuda.device_count()
    callspec = getattr(item, "callspec", None)
    world_size = callspec.params.get("world_size", 2) if callspec else 2
    for marker, needed in (("gpu", 1), ("multigpu", world_size)):
        if item.get_closest_marker(marker) and num_devices < needed:
            yield f"needs {needed} CUDA device(s), found {num_devices}"
    if item.get_closest_marker("gpu") and INTERPRETS and num_devices:
        yield "TRITON_INTERPRET=1: kernels are not compiled"
    if item.get_closest_marker("interpreter") and not INTERPRETS:
        yield "needs TRITON_INTERPRET=1, the default where there is no CUDA device"
    if item.get_closest_marker("interpreter") and importlib.util.find_spec("triton") is None:
        yield "needs Triton"
