"""Launches by the driver: the parameters that it gets, and the launches that are left to Triton."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from cce_dist import linear_cross_entropy
from cce_dist.ahead.launchers import compiler
from cce_dist.backends.triton.launch import driver, replay
from cce_dist.backends.triton.launch.driver import (
    Address,
    Batch,
    Descriptor,
    NotReady,
    launch_of,
    wait_of,
    zero_of,
)
from cce_dist.backends.triton.launch.replay import forget_recordings
from cce_dist.backends.triton.launch.steps import Recording, Steps

# Two addresses, a constant, numbers of 4 and 8 bytes, and Triton's two addresses of its own.
SIGNATURE = {"x": "*bf16", "n": "i32", "B": "constexpr", "y": "*fp32", "scale": "fp32", "m": "i64"}
VALUES = [Address(0, 16), 7, 64, Address(1, 0), 0.5, 2**40]
STARTS, SIZES = [0, 8, 16, 24, 32, 40, 48], [8, 4, 8, 4, 8, 8, 8]


class FakeDriver:
    """A driver that notes what it is told, of kernels with these parameters."""

    def __init__(self, starts: list[int] = STARTS, sizes: list[int] = SIZES) -> None:
        self.starts, self.sizes = starts, sizes
        self.launches: list[tuple[Any, list[bytes]]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0
        address, number = ctypes.c_uint64, ctypes.c_int

        def of_c(method: Any, *types: Any) -> Any:
            return ctypes.CFUNCTYPE(number, *types)(method)

        self.has_context = True
        # What C calls by an address.
        self.cuCtxGetCurrent = of_c(self._context, address)
        self.cuLaunchKernelEx = of_c(self._launch, *(4 * [address]))
        self.cuTensorMapReplaceAddress = of_c(self._replace, address, address)
        self.cuMemsetD8Async = of_c(self._zero, address, ctypes.c_ubyte, ctypes.c_size_t, address)
        self.cuEventRecord = of_c(self._record, address, address)
        self.cuStreamWaitEvent = of_c(self._wait, address, address, ctypes.c_uint)

    def _context(self, place: int) -> int:
        ctypes.c_uint64.from_address(place).value = self.has_context
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.calls.append(("retain", device))
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.has_context = True
        return 0

    def _launch(self, config: int, function: int, parameters: int, extra: int) -> int:
        at = (ctypes.c_uint64 * len(self.sizes)).from_address(parameters)
        contents = [ctypes.string_at(x, size) for x, size in zip(at, self.sizes, strict=True)]
        about = driver._Config.from_address(config)
        attributes = [
            (about.attributes[i].id, about.attributes[i].value[0])
            for i in range(about.num_attributes)
        ]
        shape = tuple(about.grid), tuple(about.block)
        self.launches.append(((*shape, about.shared_bytes, about.stream, attributes), contents))
        self.calls.append(("launch", about.stream))
        assert (function, extra) == (99, 0)
        return self.code

    def _replace(self, place: int, address: int) -> int:
        assert not place % 64
        ctypes.c_uint64.from_address(place).value = address
        return 0

    def _zero(self, address: int, value: int, size: int, stream: int) -> int:
        self.calls.append(("zero", address, value, size, stream))
        return 0

    def _record(self, event: int, stream: int) -> int:
        self.calls.append(("record", event, stream))
        return 0

    def _wait(self, stream: int, event: int, flags: int) -> int:
        self.calls.append(("wait", stream, event))
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:
        event._obj.value = 1000 + len(self.calls)
        self.calls.append(("create", event._obj.value))
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:
        self.calls.append(("destroy", event.value))
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, start: Any, size: Any) -> int:
        if index.value >= len(self.starts):
            return 1
        start._obj.value, size._obj.value = self.starts[index.value], self.sizes[index.value]
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"an illegal address"
        return 0


def compiled(signature: dict[str, str] = SIGNATURE, **about: Any) -> Any:
    metadata = {"num_warps": 4, "shared": 1024, "num_ctas": 1} | about
    return SimpleNamespace(
        metadata=SimpleNamespace(**metadata), src=SimpleNamespace(signature=signature), function=99
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    if compiler() is None:
        pytest.skip("no C compiler")
    new = FakeDriver()
    monkeypatch.setattr(driver, "_driver", lambda: new)
    # Earlier events are those of another driver.
    monkeypatch.setattr(driver, "_events", driver._Events())
    driver._table.cache_clear()
    yield new
    driver._table.cache_clear()


def play(steps: list[Any], bases: list[int], streams: list[int], device: int = 0) -> None:
    arrays = [(ctypes.c_uint64 * len(values))(*values) for values in (bases, streams)]
    Batch(steps).run(device, *map(ctypes.addressof, arrays))


def test_parameters_have_the_plays_addresses(fake: FakeDriver) -> None:
    launch = launch_of(compiled(), (3, 2, 1), VALUES, stream=1)
    for base in (4096, 8192):
        play([launch], [base, base + 512], streams=[4, 5])
        about, contents = fake.launches[-1]
        assert about == ((3, 2, 1), (128, 1, 1), 1024, 5, [])
        formats = ("Q", "i", "Q", "f", "q", "Q", "Q")
        numbers = [
            struct.unpack(code, content)[0] for code, content in zip(formats, contents, strict=True)
        ]
        assert numbers == [base + 16, 7, base + 512, 0.5, 2**40, 0, 0]


def test_a_cooperative_kernel_is_started_as_one(fake: FakeDriver) -> None:
    launch = launch_of(compiled(launch_cooperative_grid=True), (3, 1, 1), VALUES, stream=0)
    play([launch], [0, 0], streams=[0])
    assert fake.launches[0][0][-1] == [(2, 1)]


def test_a_descriptor_gets_another_base(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver as of_triton

    base = SimpleNamespace(data_ptr=lambda: 4096)
    content = struct.pack("Q", 4096) + bytes(range(120))
    monkeypatch.setattr(of_triton, "make_tensordesc_arg", lambda *about: [None, 300, 48, 48, 1])
    monkeypatch.setattr(driver, "_content_of", lambda descriptor: content)
    fake.starts, fake.sizes = [0, 128, 132, 136, 144, 152], [128, 4, 4, 8, 8, 4]
    signature = {"matrix": "tensordesc<bf16[64, 64]>", "n": "i32"}
    value = Descriptor(Address(0, 32), SimpleNamespace(base=base, shape=[300, 48]))
    launch = launch_of(compiled(signature, tensordesc_meta=[{}]), (1, 1, 1), [value, 7], stream=0)
    play([launch], [8192], streams=[0])
    contents = fake.launches[0][1]
    assert contents[0] == struct.pack("Q", 8192 + 32) + content[8:]
    assert [int.from_bytes(x, "little") for x in contents[1:]] == [300, 48, 48, 1, 7]


LEFT_TO_TRITON: dict[str, dict[str, Any]] = {
    "memory of its own": {"about": {"global_scratch_size": 128}},
    "a cluster": {"about": {"num_ctas": 2}},
    "no programs": {"grid": (0, 1, 1)},
    "a tuple": {"signature": SIGNATURE | {"n": ("i32", "i32")}},
    "a number of another type": {"signature": SIGNATURE | {"scale": "fp16"}},
    "a number that does not fit": {"values": [*VALUES[:1], 2**31, *VALUES[2:]]},
    "fewer arguments": {"values": VALUES[:-1]},
    "another size": {"sizes": [8, 8, *SIZES[2:]]},
    "fewer parameters": {"starts": STARTS[:4], "sizes": SIZES[:4]},
    "more parameters": {"starts": [*STARTS, 56], "sizes": [*SIZES, 8]},
    "too many bytes": {"starts": [*STARTS[:-1], 4096]},
    "a descriptor without the driver's bytes": {
        "signature": {"matrix": "tensordesc<bf16[64, 64]>"},
        "values": [Descriptor(Address(0, 0), None)],
    },
}


@pytest.mark.parametrize("reason", LEFT_TO_TRITON)
def test_a_launch_is_left_to_triton(fake: FakeDriver, reason: str) -> None:
    case = {"signature": SIGNATURE, "values": VALUES, "grid": (1, 1, 1), "about": {}}
    case |= {"starts": STARTS, "sizes": SIZES} | LEFT_TO_TRITON[reason]
    fake.starts, fake.sizes = case["starts"], case["sizes"]
    with pytest.raises(NotReady):
        launch_of(compiled(case["signature"], **case["about"]), case["grid"], case["values"], 0)


def test_an_old_driver_leaves_launches_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(cuLaunchKernelEx=None)
    monkeypatch.setattr(driver, "_driver", lambda: old)
    with pytest.raises(NotReady, match="does not tell"):
        launch_of(compiled(), (1, 1, 1), VALUES, stream=0)


def test_a_batch_keeps_its_order_and_ends_at_an_error(fake: FakeDriver) -> None:
    launch = launch_of(compiled(), (1, 1, 1), VALUES, stream=1)
    zero = zero_of(Address(1, 64), num_bytes=512, stream=0)
    steps = [zero, wait_of(1, other=0), launch, wait_of(0, other=1)]
    play(steps, [0, 4096], streams=[5, 6])
    event = 1000
    assert fake.calls == [
        ("create", event),
        ("zero", 4160, 0, 512, 5),
        *(("record", event, 5), ("wait", 6, event), ("launch", 6)),
        *(("record", event, 6), ("wait", 5, event)),
    ]
    fake.code = 700
    fake.calls.clear()
    with pytest.raises(RuntimeError, match="CUDA error 700: an illegal address"):
        play(steps, [0, 4096], streams=[5, 6])
    assert fake.calls[-1] == ("launch", 6)


def test_a_thread_without_a_context_gets_one(fake: FakeDriver) -> None:
    fake.has_context = False
    zero = zero_of(Address(0, 0), num_bytes=512, stream=0)
    for _ in range(2):
        play([zero], [4096], streams=[5], device=3)
    assert fake.calls == [("retain", 3), *(2 * [("zero", 4096, 0, 512, 5)])]


def test_a_thread_waits_by_one_event_of_each_device(fake: FakeDriver) -> None:
    def wait_twice() -> None:
        for device in (0, 0, 1):
            play([wait_of(0, other=1)], [], streams=[5, 6], device=device)

    thread = threading.Thread(target=wait_twice)
    thread.start()
    thread.join()
    first = [("create", 1000), ("record", 1000, 6), ("wait", 5, 1000)]
    second = [("create", 1005), ("record", 1005, 6), ("wait", 5, 1005)]
    assert fake.calls[:8] == [*first, *first[1:], *second]
    assert sorted(fake.calls[8:]) == [("destroy", 1000), ("destroy", 1005)]


def test_without_a_compiler_a_warning_says_that_calls_are_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def extension() -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(driver, "extension", extension)
    driver.has_extension.cache_clear()
    play, calls = SimpleNamespace(on_gpu=True, hooks=None), []
    steps: Any = [SimpleNamespace(run=lambda play, i=i: calls.append(i)) for i in range(3)]
    with pytest.warns(match="Failed to find C compiler"):
        Steps(steps).run(cast("Any", play))
    assert calls == [0, 1, 2]
    driver.has_extension.cache_clear()


def test_threads_play_the_same_steps_at_once(fake: FakeDriver) -> None:
    # Each thread is in the driver until the others are there, too.
    together, note = threading.Barrier(3), fake._launch

    def wait_and_note(*args: int) -> int:
        together.wait(timeout=60)
        return note(*args)

    # A batch takes the driver's functions by their addresses when it is made.
    fake.cuLaunchKernelEx = type(fake.cuLaunchKernelEx)(wait_and_note)
    launch = launch_of(compiled(), (1, 1, 1), VALUES, stream=0)
    batch, streams = Batch([launch]), (ctypes.c_uint64 * 1)(0)

    def run(base: int) -> None:
        bases = (ctypes.c_uint64 * 2)(base, base)
        batch.run(0, ctypes.addressof(bases), ctypes.addressof(streams))

    threads = [threading.Thread(target=run, args=(512 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = sorted(struct.unpack("Q", contents[0])[0] for _, contents in fake.launches)
    assert starts == [16, 528, 1040]


def played() -> list[Steps]:
    kinds = [kind for function in replay._functions for kind in function.kinds.values()]
    steps = [step for kind in kinds if isinstance(kind, Recording) for step in kind.steps]
    return [step for step in steps if isinstance(step, Steps)]


def results(options: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 128, device="cuda", generator=generator).bfloat16().requires_grad_()
        for rows in (2100, 5000)
    )
    targets = torch.randint(5000, (2100,), device="cuda", generator=generator)
    loss = linear_cross_entropy(hidden, weight, targets, backend="triton", **options)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["filtered", "screened", "exact"])
def test_the_driver_starts_every_kernel(way: str) -> None:
    options = {"logits": "screened"} if way == "screened" else {"gradient": way}
    forget_recordings()
    expected = results(options)
    for _ in range(3):
        held = results(options)
    steps = played()
    assert steps and all(len(step.by_driver or ()) == 1 for step in steps)
    assert all(isinstance(part, Batch) for step in steps for part in step.by_driver or ())
    for step in steps:
        step.by_driver = [*step.steps]
    by_triton = results(options)
    for first, second, third in zip(expected, held, by_triton, strict=True):
        assert torch.equal(first, second) and torch.equal(first, third)


@pytest.mark.gpu
def test_a_new_thread_has_a_context() -> None:
    options = {"gradient": "filtered"}
    forget_recordings()
    for _ in range(4):
        expected = results(options)
    answers: list[Any] = []

    def play_too() -> None:
        context = ctypes.c_void_p()
        # It allocates nothing, and torch is not asked for anything.
        driver.Batch([]).run(torch.cuda.current_device(), 0, 0)
        driver._driver().cuCtxGetCurrent(ctypes.byref(context))
        answers.append(context.value)
        answers.append(results(options))

    thread = threading.Thread(target=play_too)
    thread.start()
    thread.join()
    assert answers[0]
    for first, second in zip(expected, answers[1], strict=True):
        assert torch.equal(first, second)
