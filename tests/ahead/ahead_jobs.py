"""A script that prints what Triton is asked to compile: `python ahead_jobs.py JOB ARGUMENT...`.

A process of its own, in which kernels are not interpreted. Each job prints JSON; a key has a
kernel's name, and what Triton tells its binaries apart by.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs

from cce_dist import Filter, LossOptions, VocabShard, linear_cross_entropy
from cce_dist.ahead.calls import HeadCalls
from cce_dist.ahead.compile import compile_ahead
from cce_dist.ahead.stand_in import DEVICES, Device, stand_in, tensors_without_memory
from cce_dist.backends.triton.launch import start as launch_start
from cce_dist.backends.triton.launch.start import compile_only, is_compiling_only, start
from cce_dist.backends.triton.tokens.pick import pick_on_device
from cce_dist.cli.main import app

CPU = torch.device("cpu")
SMALL = HeadCalls(5000, 96, torch.bfloat16, 256, (LossOptions(),))
KINDS = {
    "filtered": SMALL,
    # The warm-up leaves their gradients out: what it compiles must serve the loss's own.
    "statistics": replace(
        SMALL, trained=(LossOptions(softcap=20.0, z_loss=1e-4, stats=("lse", "entropy")),)
    ),
    "everything": replace(
        SMALL,
        trained=(LossOptions(gradient="exact", stats=("lse", "entropy", "logit_moments")),),
        num_ranks=2,
        tensors={"bias": torch.bfloat16, "grad_weight_into": torch.float32},
    ),
}
KEPT, PRODUCTS = "exact, with logits kept", "three products"
# Dims and elements that are no multiples of 16.
ODD = HeadCalls(
    *(20001, 100, torch.bfloat16, 4096),
    (LossOptions(gradient="in_forward", filter=Filter(keep=0)),),
    tensors={"bias": torch.bfloat16},
)
KINDS["three products"] = ODD
# All of whose kernels compile before the first launch.
COMPILED_TOGETHER = {
    "filtered": LossOptions(),
    "screened": LossOptions(logits="screened"),
    "in_forward": LossOptions(gradient="in_forward"),
    "exact": LossOptions(gradient="exact"),
    KEPT: LossOptions(gradient="exact", keep_logits=True),
    PRODUCTS: LossOptions(gradient="in_forward", filter=Filter(keep=0)),
}
Key = tuple[str, str]


@contextmanager
def asked(*, compiles: bool) -> Iterator[set[Key]]:
    """Collects what Triton is asked for; without `compiles` it neither compiles nor launches."""
    keys: set[Key] = set()

    def note(key: str, fn: Any, **rest: object) -> bool:
        keys.add((fn.name, key))
        return not compiles

    with mock.patch.object(knobs.runtime, "jit_cache_hook", note):
        yield keys


def ahead(calls: HeadCalls, device: Device) -> set[Key]:
    with (
        stand_in(device),
        tensors_without_memory(),
        asked(compiles=False) as keys,
        compile_only(CPU),
    ):
        calls.make()
    return keys


def launched(calls: HeadCalls, device: Device) -> set[Key]:
    """As a job asks: by its warm-up, and then by launches."""
    launch_start._compiled.clear()
    with stand_in(device), tensors_without_memory(), asked(compiles=False) as keys:
        calls.make()
    return keys


def with_memory(calls: HeadCalls, device: Device) -> set[Key]:
    """Of tensors that have memory, as a job's have."""
    nothing: Callable[..., None] = lambda *args: None  # noqa: E731
    with (
        stand_in(device),
        mock.patch.object(torch.Tensor, "is_cuda", True, create=True),
        # What no kernel has written is no index, and has no truth.
        mock.patch.multiple(torch, empty=torch.zeros, empty_like=torch.zeros_like),
        mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        mock.patch("cce_dist.frontend.validation.require", nothing),
        mock.patch("cce_dist.ranks.merge.require", nothing),
        mock.patch("cce_dist.algorithm.plan.require_same_sizes", nothing),
        mock.patch("cce_dist.ranks.merge.require_same_sizes", nothing),
        asked(compiles=False) as keys,
        compile_only(CPU),
    ):
        calls.make()
    return keys


def compare(calls: HeadCalls) -> dict[str, Any]:
    """Returns, for each other way to ask, the keys that differ from those asked for ahead."""
    device = DEVICES[90]
    first = ahead(calls, device)
    others = {
        "launched": launched(calls, device),
        "tensors with memory": with_memory(calls, device),
        "a GPU with fewer multiprocessors": ahead(calls, replace(device, multiprocessors=16)),
        "a GPU with less cache": ahead(calls, replace(device, cache_bytes=2**21)),
        "another number of tokens": ahead(replace(calls, num_tokens=31 * 130), device),
    }
    return {"keys": len(first), **{way: sorted(first ^ keys) for way, keys in others.items()}}


def late(
    calls: HeadCalls, device: Device, sizes: tuple[int, ...] = (700, 8192, 144, 1)
) -> list[tuple[int, str]]:
    """Returns the kernels that launches are the first to ask for, of calls of several sizes."""
    launch_start._compiled.clear()
    keys: set[Key] = set()
    found: list[tuple[int, str]] = []

    def note(key: str, fn: Any, **rest: object) -> bool:
        if (fn.name, key) not in keys and not is_compiling_only():
            found.append((number, fn.name))
        keys.add((fn.name, key))
        return True

    _, shard = calls.shards()[0]
    with (
        stand_in(device),
        tensors_without_memory(),
        mock.patch.object(knobs.runtime, "jit_cache_hook", note),
    ):
        for options in calls.trained:
            for number in sizes:
                replace(calls, num_tokens=number)._call(shard, None, options)
    assert keys
    return found


class Picks:
    """A call that picks tokens alone: three small kernels."""

    def make(self) -> None:
        pick_on_device(torch.empty(256, dtype=torch.int64), -100, VocabShard(0, 5000, 5000))


@triton.jit
def wrong_kernel(out_ptr):
    tl.store(out_ptr, no_such_name)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


class WrongPicks(Picks):
    """With a kernel that has an error."""

    def make(self) -> None:
        start(wrong_kernel, (1,))(torch.empty(1))
        super().make()


def compile_four_times(cache: Path) -> list[dict[str, Any]]:
    """Returns the reports of two compilations through all stages, of one for a small GPU, and of
    one with an error."""
    device = DEVICES[80]
    devices = (device, device, replace(device, shared_bytes=0), device)
    calls = (Picks(), Picks(), Picks(), WrongPicks())
    return [
        asdict(compile_ahead(cast("HeadCalls", call), each, cache))
        for call, each in zip(calls, devices, strict=True)
    ]


def check(cache: str) -> None:
    """Prints what a machine without a GPU can tell."""
    compared = {kind: compare(calls) for kind, calls in KINDS.items()}
    found = {
        kind: late(replace(SMALL, trained=(options,)), DEVICES[90])
        for kind, options in COMPILED_TOGETHER.items()
    }
    wide = HeadCalls(16384, 1024, torch.bfloat16, 256, (COMPILED_TOGETHER[KEPT],))
    found["kept, of wide states"] = late(wide, DEVICES[90])
    products = replace(SMALL, dtype=torch.float16, trained=(COMPILED_TOGETHER[PRODUCTS],))
    found["three products, fp16"] = late(products, DEVICES[90])
    one_chunk, several = (
        launched(replace(ODD, num_tokens=number), DEVICES[90]) for number in (1024, 8192)
    )
    found["three products of several chunks"] = sorted(several - one_chunk)
    # Where lists may be long: a mean's sums behind the tail's, no room for a chunk, and a rule that
    # drops a flat softmax before one that keeps it.
    rules = LossOptions(filter=Filter(keep=8.0)), LossOptions()
    smoothing = (LossOptions(label_smoothing=0.1),)
    found["smoothing"] = late(replace(SMALL, trained=smoothing), DEVICES[90])
    found["another rule"] = late(replace(SMALL, trained=rules), DEVICES[90])
    default = torch.bfloat16, 256, (LossOptions(),)
    found["beyond the workspace"] = late(HeadCalls(32000, 4096, *default), DEVICES[90])
    found["few tokens last"] = late(HeadCalls(128256, 2048, *default), DEVICES[90], (8192, 700, 1))
    reports = compile_four_times(Path(cache))
    print(json.dumps({"compared": compared, "late": found, "reports": reports}, default=str))


def run_command(*arguments: str) -> None:
    """Runs the command, and prints the keys that it asked for."""
    with asked(compiles=True) as keys:
        app(arguments, standalone_mode=False)
    print(json.dumps(sorted(keys)))


def train(options: str, tokens: str) -> None:
    """Computes losses on a GPU, with and without gradients. Prints the keys, and what was
    compiled."""
    compiled: list[str] = []

    def note(metadata: dict[str, Any], cache_hit: bool, **rest: object) -> None:
        if not cache_hit:
            compiled.append(metadata["name"])

    call = json.loads(options)
    inputs = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    with (
        asked(compiles=True) as keys,
        mock.patch.object(knobs.compilation, "listener", note),
    ):
        for num_tokens in (int(tokens), int(tokens) + 1):
            hidden, weight = torch.randn(num_tokens, 96, **inputs), torch.randn(5000, 96, **inputs)
            targets = torch.randint(5000, (num_tokens,), device="cuda")
            further = {name: tuple(x) if name == "stats" else x for name, x in call.items()}
            if further.get("bias"):
                further["bias"] = torch.randn(5000, **inputs)
            for _ in range(3):  # computed, recorded, played
                result = linear_cross_entropy(hidden, weight, targets, **further)
                outputs = result if isinstance(result, tuple) else (result,)
                sum(x.sum() for x in outputs if x is not None and x.requires_grad).backward()
            with torch.no_grad():
                linear_cross_entropy(hidden, weight, targets, **further)
        torch.cuda.synchronize()
    print(json.dumps({"keys": sorted(keys), "compiled": compiled}))


JOBS = {"check": check, "command": run_command, "train": train}

if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])
