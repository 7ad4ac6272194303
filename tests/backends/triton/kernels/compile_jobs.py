"""A script that compiles the kernels of losses and of their gradients for GPUs that need not be
there: `python compile_jobs.py 86,89 86:bf16,exact 89:e4m3` prints a record of each binary for 86
and 89.

Tensors lie on the CPU and Triton's driver is a stand-in, so that nothing is launched. A process of
its own, for torch and Triton are told lies. It stops before LLVM optimizes, which with ptxas takes
three quarters of the time: what memory a kernel takes is known by then, and what Triton cannot
compile has failed. Of all variants that the calls name it compiles the fewest that have every flag,
dtype and tile of each kernel on each generation of GPUs, and only one generation of the kernels
that Triton compiles alike for all. With "whole" as an argument too it compiles every variant for
every GPU, through all stages.
"""

# What takes the place of torch's and Triton's own has not their types.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from compile_calls import CALLS, GARBAGE, OTHERS, compile_call
from torch import Tensor
from triton.backends.nvidia import compiler
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from cce_dist.ahead.stand_in import DEVICES, stand_in
from cce_dist.backends.triton.launch import start as launch_start

# Multiprocessors, whatever the GPU.
PROGRAMS = 132
# Not more: other tests run beside.
PROCESSES = 2


PASSES = compiler.passes
# Of the stage that lowers to LLVM's dialect: what tidies up and finds no fault; what only places
# barriers, and takes no memory; what writes each of the dialect's operations as LLVM's; and LLVM's
# own work on the result.
SKIPPED = (
    (PASSES.common, "add_canonicalizer"),
    (PASSES.common, "add_cse"),
    (PASSES.common, "add_symbol_dce"),
    (PASSES.ttgpuir, "add_canonicalize_llvm_ir"),
    (PASSES.llvmir, "add_di_scope"),
    (compiler.nvidia.passes.ttgpuir, "add_membar"),
    (compiler.nvidia.passes.ttnvgpuir, "add_proxy_fence_insertion"),
    (compiler.nvidia.passes.ttnvgpuir, "add_initialize_ws_cluster_barriers"),
    (compiler.nvidia.passes.ttnvgpuir, "add_warp_specialize_to_llvm"),
    (compiler.nvidia.passes.ttnvgpuir, "add_nvgpu_to_llvm"),
    (PASSES.convert, "add_nvvm_to_llvm"),
    (compiler.nvidia, "set_nvvm_reflect_ftz"),
    (compiler.nvidia, "has_extern_deps"),
    (compiler.llvm, "to_module"),
    (compiler.llvm, "attach_datalayout"),
    (compiler.llvm, "link_extern_libs"),
    (compiler.llvm, "optimize_module"),
)


_gpu = ExitStack()


def believe_in(capability: int) -> None:
    """From here on torch and Triton believe in a GPU of that compute capability."""
    _gpu.close()
    _gpu.enter_context(stand_in(replace(DEVICES[capability], multiprocessors=PROGRAMS)))


def fill_tensors() -> None:
    """From here on no tensor is uninitialised."""
    # What no kernel has filled must not be taken for indices, but for `Call.exact`, which nobody
    # compiles only.
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, ofGARBAGE(getattr(owner, name.replace("empty", "zeros"))))


def ofGARBAGE(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, of numbers that index nothing, where `GARBAGE` says so."""

    def made(*given: Any, **named: Any) -> Tensor:
        tensor = make(*given, **named)
        if not GARBAGE:
            return tensor
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

    return made


def skip_late_stages() -> None:
    """From here on Triton lowers to LLVM's dialect, without SKIPPED, and no further."""
    make_llir = CUDABackend.make_llir

    def skipped(*given: Any, **named: Any) -> None:
        pass

    def make_untidy_llir(*given: Any) -> str:
        with ExitStack() as stack:
            # Earlier stages need some of them; Triton's earlier releases lack some.
            for owner, name in SKIPPED:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, skipped))
            return make_llir(*given)

    def make_ptx(self: CUDABackend, source: str, metadata: dict[str, Any], *given: Any) -> str:
        metadata["name"] = "none"
        return ""

    CUDABackend.make_llir = make_untidy_llir
    CUDABackend.make_ptx = make_ptx
    CUDABackend.make_cubin = lambda *given: b""


# What Triton compiles for each generation in its own way: products, descriptors, 8-bit floats.
OF_A_GENERATION = re.compile(r"\bdot\(|descriptor|float8")


@functools.cache
def source_of(kernel: JITFunction) -> str:
    """That of the kernel and of all functions that it calls."""
    missing, found = [kernel], {}
    while missing:
        one = missing.pop()
        found[one] = one.src
        names = set(re.findall(r"\w+", one.src)) & one.fn.__globals__.keys()
        called = (one.fn.__globals__[name] for name in names)
        missing += [x for x in called if isinstance(x, JITFunction) and x not in found]
    return "\n".join(found.values())


def specialized(value: Any) -> Any:
    """What Triton knows of an argument's number when it compiles."""
    return (value % 16 == 0, value == 1) if type(value) is int else type(value)


@dataclass(frozen=True)
class Variant:
    """A kernel as a call starts it."""

    kernel: Any  # a JITFunction
    args: tuple[Any, ...]
    named: dict[str, Any]
    grid: tuple[int, ...]
    call: str
    capability: int

    @property
    def residents(self) -> int:
        """Programs at a time on a multiprocessor, of a kernel whose programs wait for others."""
        return self.grid[0] // PROGRAMS if self.named.get("launch_cooperative_grid") else 1

    @functools.cached_property
    def for_all(self) -> bool:
        """Triton compiles it alike for all generations."""
        tensors = (getattr(x, "base", x) for x in (*self.args, *self.named.values()))
        dtypes = {str(x.dtype) for x in tensors if isinstance(x, Tensor)}
        return OF_A_GENERATION.search(" ".join((source_of(self.kernel), *dtypes))) is None

    def traits(self) -> set[Any]:
        """What tells it apart from the kernel's other variants, but for counts: dtypes, tiles,
        flags. GPUs of a generation have theirs in common: Triton goes through the same passes."""
        traits: set[Any] = {("residents", self.residents)}
        arguments = {each.name for each in self.kernel.params if not each.is_constexpr}
        for name, value in (*enumerate(self.args), *self.named.items()):
            tensor = getattr(value, "base", value)
            if isinstance(tensor, Tensor):
                tile = tuple(getattr(value, "block_shape", ()))
                traits.add((name, tensor.dtype, tile))
            elif name in self.named:
                traits.add((name, specialized(value) if name in arguments else value))
        generation = 0 if self.for_all else min(self.capability // 10, 10)
        return {(self.kernel, generation, *trait) for trait in traits}

    def compile(self) -> tuple[dict[str, Any], str | None]:
        """Its record, and the binary's hash, None if there is none."""
        believe_in(self.capability)
        fn = self.kernel.fn
        record = {
            "kernel": f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}",
            "call": self.call,
            "capability": self.capability,
            "for_all": self.for_all,
        }
        try:
            # Triton drops its checks of overflow again: it has them for `debug`.
            unchecked = {**self.named, "sanitize_overflow": False}
            made = self.kernel.warmup(*self.args, grid=self.grid, **unchecked)
        except Exception as error:
            return {**record, "error": f"{type(error).__name__}: {error}"}, None
        data = made.metadata
        taken = {"shared": data.shared, "tensor": getattr(data, "tmem_size", 0) or 0}
        return {**record, **taken, "residents": self.residents}, made.hash


def record_variants(jobs: list[str]) -> list[Variant]:
    """Every variant that these jobs would compile."""
    variants: list[Variant] = []
    # Of the job under way.
    place: dict[str, Any] = {}

    def recorded(self: JITFunction, *args: Any, grid: tuple[int, ...], **named: Any) -> None:
        variants.append(Variant(self, args, named, grid, **place))

    launch_start._compiling.set(launch_start._LongestFirst(torch.device("cpu")))
    with mock.patch.object(JITFunction, "warmup", recorded), torch.no_grad():
        for job in jobs:
            capability, _, names = job.partition(":")
            believe_in(int(capability))
            for name in names.split(","):
                place.update(call=name, capability=int(capability))
                if name in OTHERS:
                    OTHERS[name]()
                else:
                    compile_call(CALLS[name])
    return variants


def fewest(variants: list[Variant]) -> list[Variant]:
    """Some that have all traits of all: the next one is that with most traits which are missing.
    Without those whose traits later ones have brought."""
    by_variant = [(variant, variant.traits()) for variant in variants]
    missing = set().union(*(traits for _, traits in by_variant))
    chosen = []
    while missing:
        chosen.append(max(by_variant, key=lambda each: len(each[1] & missing)))
        missing -= chosen[-1][1]
    count = Counter(trait for _, traits in chosen for trait in traits)
    needed = []
    for variant, traits in chosen:
        if all(count[trait] > 1 for trait in traits):
            count.subtract(traits)
        else:
            needed.append(variant)
    return needed


def compile_all(variants: list[Variant]) -> list[tuple[dict[str, Any], str | None]]:
    """What `Variant.compile` returns of each, by forks, each of every PROCESSES-th variant. A fork
    whose parent has gone ends after its last one."""
    fork = get_context("fork")
    answers = []
    for first in range(PROCESSES):
        answer, end = fork.Pipe(duplex=False)
        fork.Process(target=compile_some, args=(variants[first::PROCESSES], end)).start()
        end.close()
        answers.append(answer)
    found: list[Any] = [None] * len(variants)
    for first, answer in enumerate(answers):
        found[first::PROCESSES] = answer.recv()
    return found


def compile_some(variants: list[Variant], end: Connection) -> None:
    end.send([variant.compile() for variant in variants])


def main(capabilities: list[int], jobs: list[str], *, whole: bool) -> None:
    fill_tensors()
    if not whole:
        skip_late_stages()
    variants = record_variants(jobs)
    chosen = variants if whole else fewest(variants)
    chosen = [variant for variant in chosen if variant.capability in capabilities]
    records, seen = [], set()
    for variant, (record, binary) in zip(chosen, compile_all(chosen), strict=True):
        if binary is None or (binary, variant.residents) not in seen:
            seen.add((binary, variant.residents))
            records.append(record)
    json.dump(records, sys.stdout)


if __name__ == "__main__":
    main(
        [int(each) for each in sys.argv[1].split(",")],
        [job for job in sys.argv[2:] if job != "whole"],
        whole="whole" in sys.argv,
    )
