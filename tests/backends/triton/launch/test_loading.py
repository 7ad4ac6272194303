"""Kernels loaded by several threads at a time: each thread gets the one it asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.compiler import CompiledKernel
from triton.compiler import compiler as triton_compiler
from triton.runtime import build

from cce_dist.backends.triton.launch.loading import InTurn, load_one_at_a_time, turn

NAME = "__triton_launcher"
# Its functions differ in what they return alone; single-phase, as Triton's launchers are.
SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME", 0, -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) {
    PyObject *made = PyModule_Create(&module);
    PyModule_AddFunctions(made, methods);
    return made;
}
"""


@pytest.fixture
def extensions(tmp_path: Path) -> list[str]:
    """Paths of eight extensions of one module name, each loaded once."""
    paths = []
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = folder / "launcher.c"
        source.write_text(SOURCE.replace("NUMBER", str(number)).replace("NAME", NAME))
        made = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
        include = f"-I{sysconfig.get_paths()['include']}"
        command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", include]
        subprocess.run([*command, str(source), "-o", str(made)], check=True)
        paths.append(str(made))
        build._load_module_from_path(NAME, str(made))
    return paths


@pytest.fixture
def fast_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# Unguarded, some 15 of 10,000 loads give another extension's function.
def test_a_launcher_is_the_one_that_was_asked_for(
    extensions: list[str], fast_switches: None
) -> None:
    load_one_at_a_time()

    def load(number: int) -> bool:
        module = build._load_module_from_path(NAME, extensions[number % 8])
        return module.launch() == number % 8

    with ThreadPoolExecutor(16) as executor:
        assert all(executor.map(load, range(10_000)))


class SlowDriver:
    """A driver whose launcher and whose kernel take a while each, and which counts them."""

    def __init__(self) -> None:
        self.loads, self.fails = 0, False
        self.utils = SimpleNamespace(load_binary=self.load_binary, get_device_properties=dict)
        self.get_current_device = lambda: 0
        self.get_current_target = lambda: SimpleNamespace(warp_size=32)

    def launcher_cls(self, *args: Any) -> Any:
        time.sleep(0.02)
        return lambda: None

    def load_binary(self, *args: Any) -> tuple[Any, ...]:
        time.sleep(0.02)
        self.loads += 1
        if self.fails:
            raise MemoryError("no room for it")
        return "module", "function", 1, 0, 1024


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SlowDriver:
    made = SlowDriver()
    monkeypatch.setattr(triton_compiler, "driver", SimpleNamespace(active=made))
    monkeypatch.setattr(triton_compiler, "max_shared_mem", lambda device: 10**6)
    # Of these kernels, which have nothing to be freed.
    monkeypatch.delattr(CompiledKernel, "__del__", raising=False)
    return made


def unloaded() -> Any:
    kernel = CompiledKernel.__new__(CompiledKernel)
    metadata = SimpleNamespace(shared=0, num_warps=4, warp_size=32)
    names = dict.fromkeys(("src", "kernel", "name", "hash", "metadata_group", "_module_pid"))
    vars(kernel).update(names, metadata=metadata, module=None, function=None, _run=None)
    return kernel


def test_a_kernel_is_whole_before_any_thread_starts_it(driver: SlowDriver) -> None:
    load_one_at_a_time()
    kernel, together = unloaded(), threading.Barrier(4)

    def begin() -> tuple[Any, Any]:
        together.wait()
        # As a launch reads them: Triton evaluates the launcher first.
        return kernel.run, kernel.function

    with ThreadPoolExecutor(4) as executor:
        found = [task.result() for task in [executor.submit(begin) for _ in range(4)]]
    assert all(function == "function" and run is found[0][0] for run, function in found)
    assert driver.loads == 1


def test_a_load_that_failed_is_tried_again(driver: SlowDriver) -> None:
    load_one_at_a_time()
    kernel, driver.fails = unloaded(), True
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            _ = kernel.run
    driver.fails = False
    assert callable(kernel.run) and kernel.function == "function" and driver.loads == 3


# A process's first call loads all of its kernels by sixteen threads, from a cache that is warm.
WARM_UP = """
import torch
from cce_dist import linear_cross_entropy

made = torch.Generator("cuda").manual_seed(0)
hidden = torch.randn(512, 256, generator=made, device="cuda").bfloat16().requires_grad_()
weight = torch.randn(8192, 256, generator=made, device="cuda").bfloat16().requires_grad_()
targets = torch.randint(0, 8192, (512,), generator=made, device="cuda")
loss = linear_cross_entropy(hidden, weight, targets)
loss.backward()
print(loss.item(), hidden.grad.float().sum().item(), weight.grad.float().sum().item())
"""
NUM_PROCESSES = int(os.environ.get("CCE_DIST_WARM_UPS", "8"))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_warm_ups_of_fresh_processes_agree() -> None:
    def warm_up(_: int) -> str:
        command = [sys.executable, "-W", "ignore", "-c", WARM_UP]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = warm_up(0)
    with ThreadPoolExecutor(min(24, os.cpu_count() or 1)) as executor:
        assert set(executor.map(warm_up, range(NUM_PROCESSES))) == {first}


def test_the_lowest_turn_goes_first() -> None:
    lock, passed = InTurn(), []

    def take(number: int) -> None:
        turn.set(number)
        with lock:
            passed.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in (2, 0, 2, 1)]
    with lock:
        for thread in threads:
            thread.start()
        while len(lock._waiting) < len(threads):
            time.sleep(0.001)
        assert passed == []
    for thread in threads:
        thread.join(30)
    assert passed == [0, 1, 2, 2]


def test_an_interrupted_thread_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = InTurn()

    def interrupt(predicate: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lock._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), lock:
            pass
    assert lock._waiting == []
    with lock:
        pass


def test_an_error_gives_the_turn_to_the_next() -> None:
    lock = InTurn()
    with pytest.raises(RuntimeError, match="no code"), lock:
        raise RuntimeError("no code")
    with lock:
        pass
