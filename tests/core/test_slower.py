"""A path that costs more than a tenth of the time is named, once; no other is."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist.backends.choose import choose_backend, quantizer_for
from cce_dist.backends.triton.launch.tiles import TABLE, warn_of_layout
from cce_dist.core.slower import warn_slower
from cce_dist.options import LossOptions, Screen

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    # All of Triton is imported under one TRITON_INTERPRET, before the fixture below sets another.
    importlib.import_module("cce_dist.backends.triton.launch.loading")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Of a GPU's compute capability; what was said is forgotten before and after."""
    found = SimpleNamespace(capability=HOPPER)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found.capability)
    warn_slower.cache_clear()
    yield found
    warn_slower.cache_clear()


def said(call: Callable[[], object]) -> list[str]:
    """What two calls warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        call()
    assert all(each.category is UserWarning for each in caught)
    return [str(each.message) for each in caught]


def matrix(columns: int, stride: int, offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    memory = torch.zeros(offset + 4 * stride, dtype=dtype)
    return memory[offset:].as_strided((4, columns), (stride, 1), offset)


def on_gpu(tensor: Tensor) -> Any:
    """As choosing a backend sees a tensor of that kind on a CUDA device."""
    device = torch.device("cuda", 0)
    return SimpleNamespace(
        is_cuda=True, device=device, dtype=tensor.dtype, shape=tensor.shape, ndim=tensor.ndim
    )


@needs_triton
@pytest.mark.parametrize("capability", [HOPPER, AMPERE, BLACKWELL], ids=str)
def test_num_groups_says_that_triton_has_no_hopper_kernel(
    capability: tuple[int, int], device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cce_dist.backends.triton.forward import hopper as forward_hopper

    device.capability = capability
    reason = "triton 3.4.0 has no hopper.warpgroup_mma in Gluon"
    monkeypatch.setattr(forward_hopper, "why_no_gluon", lambda: reason)
    weight = matrix(64, 64)
    found = said(lambda: forward_hopper.num_groups(weight, TABLE["sm90", 2]))
    if capability == HOPPER:
        assert len(found) == 1
        assert "\n" not in found[0]
        assert reason in found[0]
        assert f"install a Triton from {forward_hopper.RELEASES}" in found[0]
    else:
        assert found == []
    # fp32 has no such kernel on any device.
    wide = matrix(64, 64, dtype=torch.float32)
    assert said(lambda: forward_hopper.num_groups(wide, TABLE["sm90", 4])) == []
    monkeypatch.setattr(forward_hopper, "why_no_gluon", lambda: None)
    assert said(lambda: forward_hopper.num_groups(weight, TABLE["sm90", 2])) == []


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        pytest.param(matrix(64, 64), None, id="whole"),
        pytest.param(matrix(60, 64), None, id="rows of a wider matrix"),
        pytest.param(matrix(4, 4, dtype=torch.float32), None, id="fp32"),
        pytest.param(matrix(17, 17), "rows are 34 bytes apart and begin 0 bytes after", id="odd D"),
        pytest.param(matrix(64, 65), "rows are 130 bytes apart", id="odd stride"),
        pytest.param(matrix(64, 64, offset=1), "begin 2 bytes after", id="odd address"),
        pytest.param(torch.zeros(64, 4).T, r"has strides (1, 4), and every call copies it", id="T"),
    ],
)
def test_warn_of_layout(weight: Tensor, words: str | None) -> None:
    found = said(lambda: warn_of_layout(weight))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_warn_of_layout_says_nothing_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert said(lambda: warn_of_layout(matrix(17, 17))) == []


@pytest.mark.parametrize(
    "choose",
    [
        lambda hidden: choose_backend(LossOptions(), hidden, 8, 16),
        lambda hidden: quantizer_for("auto", hidden, Screen(dtype="int8")),
    ],
    ids=["choose_backend", "quantizer_for"],
)
def test_auto_says_why_it_took_torch_on_a_gpu(
    choose: Callable[[Any], object], device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = torch.zeros(2, 8, dtype=torch.float16)
    device.capability = (7, 5)
    assert said(lambda: choose(half)) == [], "of a CPU nothing can be changed"
    if HAS_TRITON:
        (found,) = said(lambda: choose(on_gpu(half)))
        assert 'took "torch": the device has compute capability (7, 5)' in found
    device.capability = HOPPER
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if HAS_TRITON:
        (found,) = said(lambda: choose(on_gpu(half)))
        assert "TRITON_INTERPRET=1" in found
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = said(lambda: choose(on_gpu(half)))
    assert 'backend="auto" took "torch"' in found
    assert "triton is not installed; install it" in found
    assert said(lambda: choose(half)) == []


def test_auto_takes_torch_for_float64_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    double = on_gpu(torch.zeros(2, 8, dtype=torch.float64))
    assert said(lambda: choose_backend(LossOptions(), double, 8, 16)) == []


@needs_triton
def test_warm_up_says_that_kernels_are_compiled_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cce_dist.backends.triton.launch import start

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(start, "can_compile_only", lambda: False)
    monkeypatch.setattr(start, "interpreted", lambda: False)
    device = torch.device("cpu")
    (found,) = said(lambda: start.compile_together("kind", device, lambda: None))
    assert "one after the other" in found
    assert "3.6 and later" in found
