"""Launches by the driver: the parameters that it gets, and the launches that are left to Triton."""

from __future__ import annotations

import ctypes
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cce_dist import linear_cross_entropy
from cce_dist.backends.triton.launch import driver, replay
from cce_dist.backends.triton.launch.driver import Address, Descriptor, NotReady, Ready
from cce_dist.backends.triton.launch.replay import forget_recordings
from cce_dist.backends.triton.launch.steps import Launch, Recording

# Two addresses, a constant, numbers of 4 and 8 bytes, and Triton's two addresses of its own.
SIGNATURE = {"x": "*bf16", "n": "i32", "B": "constexpr", "y": "*fp32", "scale": "fp32", "m": "i64"}
VALUES = [Address(0, 16), 7, 64, Address(1, 0), 0.5, 2**40]
STARTS, SIZES = [0, 8, 16, 24, 32, 40, 48], [8, 4, 8, 4, 8, 8, 8]


class FakeDriver:
    """A driver that notes the parameters of each launch, of kernels with these parameters."""

    def __init__(self, starts: list[int] = STARTS, sizes: list[int] = SIZES) -> None:
        self.starts, self.sizes = starts, sizes
        self.launches: list[tuple[Any, list[bytes]]] = []
        self.code = 0
        self.calls: list[tuple[Any, ...]] = []

    def cuMemsetD8Async(self, address: Any, value: Any, size: Any, stream: Any) -> int:
        self.calls.append(("zero", address.value, value.value, size.value, stream.value))
        return self.code

    def cuEventCreate(self, event: Any, flags: int) -> int:
        event._obj.value = 1000 + len(self.calls)
        self.calls.append(("create", event._obj.value))
        return 0

    def cuEventDestroy_v2(self, event: Any) -> int:
        self.calls.append(("destroy", event.value))
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.calls.append(("record", event.value, stream.value))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        self.calls.append(("wait", stream.value, event.value))
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, start: Any, size: Any) -> int:
        if index.value >= len(self.starts):
            return 1
        start._obj.value, size._obj.value = self.starts[index.value], self.sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        contents = [
            ctypes.string_at(at, size) for at, size in zip(parameters, self.sizes, strict=True)
        ]
        about = config._obj
        grid, block = tuple(about.grid), tuple(about.block)
        attributes = [
            (about.attributes[i].id, about.attributes[i].value[0])
            for i in range(about.num_attributes)
        ]
        self.launches.append(
            ((grid, block, about.shared_bytes, about.stream, attributes), contents)
        )
        return self.code

    def cuTensorMapReplaceAddress(self, place: Any, address: Any) -> int:
        ctypes.c_uint64.from_address(place.value).value = address.value
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
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    new = FakeDriver()
    monkeypatch.setattr(driver, "_driver", lambda: new)
    return new


def test_parameters_have_the_plays_addresses(fake: FakeDriver) -> None:
    launch = Ready(compiled(), (3, 2, 1), VALUES)
    for base in (4096, 8192):
        assert launch.start([base, base + 512], stream=5)
        about, contents = fake.launches[-1]
        assert about == ((3, 2, 1), (128, 1, 1), 1024, 5, [])
        formats = ("Q", "i", "Q", "f", "q", "Q", "Q")
        numbers = [
            struct.unpack(code, content)[0] for code, content in zip(formats, contents, strict=True)
        ]
        assert numbers == [base + 16, 7, base + 512, 0.5, 2**40, 0, 0]


def test_a_cooperative_kernel_is_started_as_one(fake: FakeDriver) -> None:
    Ready(compiled(launch_cooperative_grid=True), (3, 1, 1), VALUES).start([0, 0], stream=0)
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
    launch = Ready(compiled(signature, tensordesc_meta=[{}]), (1, 1, 1), [value, 7])
    launch.start([8192], stream=0)
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
        Ready(compiled(case["signature"], **case["about"]), case["grid"], case["values"])


def test_an_old_driver_leaves_launches_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(cuLaunchKernelEx=None)
    monkeypatch.setattr(driver, "_driver", lambda: old)
    with pytest.raises(NotReady, match="does not tell"):
        Ready(compiled(), (1, 1, 1), VALUES)


def test_a_failing_launch_raises(fake: FakeDriver) -> None:
    launch = Ready(compiled(), (1, 1, 1), VALUES)
    fake.code = 700
    with pytest.raises(RuntimeError, match="CUDA error 700: an illegal address"):
        launch.start([0, 0], stream=0)
    fake.code = 0
    assert launch.start([0, 0], stream=0)


def test_one_thread_at_a_time_writes_the_parameters(fake: FakeDriver) -> None:
    launch = Ready(compiled(), (1, 1, 1), VALUES)
    answers: list[bool] = []

    def start_too(*args: Any) -> int:
        other = threading.Thread(target=lambda: answers.append(launch.start([1, 1], 0)))
        other.start()
        other.join()
        return 0

    launch._start = start_too
    assert launch.start([0, 0], stream=0)
    assert answers == [False]


def test_zeros(fake: FakeDriver) -> None:
    driver.zero(4096, 512, stream=5)
    assert fake.calls == [("zero", 4096, 0, 512, 5)]
    fake.code = 1
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        driver.zero(4096, 512, stream=5)


def test_a_thread_waits_by_one_event_of_each_device(fake: FakeDriver) -> None:
    def wait_twice() -> None:
        for device in (0, 0, 1):
            driver.wait(device, stream=5, other=6)

    thread = threading.Thread(target=wait_twice)
    thread.start()
    thread.join()
    first = [("create", 1000), ("record", 1000, 6), ("wait", 5, 1000)]
    second = [("create", 1005), ("record", 1005, 6), ("wait", 5, 1005)]
    assert fake.calls[:8] == [*first, *first[1:], *second]
    assert sorted(fake.calls[8:]) == [("destroy", 1000), ("destroy", 1005)]


def launches() -> list[Launch]:
    kinds = [kind for function in replay._functions for kind in function.kinds.values()]
    steps = [step for kind in kinds if isinstance(kind, Recording) for step in kind.steps]
    return [step for step in steps if isinstance(step, Launch)]


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
    played = launches()
    assert played and all(isinstance(launch.ready, Ready) for launch in played)
    for launch in played:
        launch.ready = False
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

    def play() -> None:
        context = ctypes.c_void_p()
        driver.enter_context(torch.cuda.current_device())
        driver._driver().cuCtxGetCurrent(ctypes.byref(context))
        answers.append(context.value)
        answers.append(results(options))

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    assert answers[0]
    for first, second in zip(expected, answers[1], strict=True):
        assert torch.equal(first, second)
