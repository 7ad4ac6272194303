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
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.nvidia import compiler
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from cce_dist.ahead.stand_in import DEVICES, stand_in
from cce_dist.backends.protocol import (
    BackwardRequest,
    ColumnFilter,
    ForwardRequest,
    Mixture,
    PairsGrads,
    PairsRequest,
    Room,
    TeacherPart,
    WeightGrad,
)
from cce_dist.backends.torch.tiles import GPU_COLUMNS
from cce_dist.backends.triton.filter.kept_logits import KeptLogits
from cce_dist.backends.triton.filter.lists import ListedLogits
from cce_dist.backends.triton.filter.marks import keep
from cce_dist.backends.triton.forward.largest import largest
from cce_dist.backends.triton.grads import backward, scale
from cce_dist.backends.triton.launch import start as launch_start
from cce_dist.backends.triton.pairs import PART, pair_gradients, pair_logits
from cce_dist.backends.triton.stats import forward, statistics_of_segments
from cce_dist.backends.triton.teacher.forward import forward_of_heads
from cce_dist.backends.triton.teacher.tiles import KINDS, TileKernels
from cce_dist.backends.triton.teacher.top import add_tile
from cce_dist.backends.triton.tokens.loss import KERNELS as LOSS_KERNELS
from cce_dist.backends.triton.tokens.merge import merge_lse_and_target, pack_lse_and_target
from cce_dist.backends.triton.tokens.pick import pick_on_device
from cce_dist.backends.triton.warm_up import NoSum
from cce_dist.core.types import Head, Pairs, Tokens, Upstream, Wanted
from cce_dist.distillation.divergences import Divergence
from cce_dist.options import Screen
from cce_dist.vocab_shard import VocabShard

# Multiprocessors, whatever the GPU.
PROGRAMS = 132
# Not more: other tests run beside.
PROCESSES = 2
TOKENS, COLUMNS = 256, 4096
WORKSPACE_BYTES = 2**26


@dataclass(frozen=True)
class Call:
    """What of a call decides which kernels are compiled for it."""

    dtype: torch.dtype = torch.bfloat16
    dim: int = 256
    exact: bool = False  # the gradients of every column
    screen: str | None = None  # e4m3 with statistics, int8 without
    softcap: float | None = None
    everything: bool = False  # a bias, class weights, smoothing, all statistics and their gradients
    ranks: bool = False  # exchange bounds, and sum the hidden gradient while the rest is made
    keeps: bool = True  # logits, for the backward
    temperature: bool = False  # of each token
    chunk: bool = False  # all logits are kept, and torch multiplies their gradients


CALLS = {
    "bf16": Call(),
    "everything": Call(everything=True, ranks=True),
    "exact": Call(exact=True),
    "exact-everything": Call(exact=True, everything=True, softcap=30.0, ranks=True, keeps=False),
    "chunk": Call(exact=True, chunk=True),
    "fp16": Call(torch.float16),
    "fp32": Call(torch.float32),
    "fp32-everything": Call(torch.float32, everything=True, ranks=True),
    "fp32-exact": Call(torch.float32, exact=True),
    "int8": Call(dim=4096, screen="int8"),
    "int8-softcap": Call(screen="int8", softcap=30.0, ranks=True),
    # Dims that are not whole steps, of which filtered_kernel takes more memory.
    "e4m3": Call(dim=200, screen="e4m3"),
    "e4m3-softcap": Call(screen="e4m3", softcap=30.0, keeps=False),
    "temperature": Call(temperature=True),
    "temperature-softcap": Call(temperature=True, softcap=30.0),
    "temperature-fp32": Call(torch.float32, temperature=True, softcap=30.0),
    "temperature-exact": Call(exact=True, everything=True, temperature=True, keeps=False),
    # Rows that no descriptor has.
    "odd": Call(dim=17),
    "odd-int8": Call(dim=17, screen="int8"),
    "odd-exact": Call(dim=17, exact=True),
}


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
        setattr(owner, name, of_garbage(getattr(owner, name.replace("empty", "zeros"))))


# Not empty: memory is full of it.
_garbage: list[Call] = []


def of_garbage(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, of numbers that index nothing, where `_garbage` says so."""

    def made(*given: Any, **named: Any) -> Tensor:
        tensor = make(*given, **named)
        if not _garbage:
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


def compile_call(call: Call) -> None:
    """Forward and backward of one shard, as autograd has them."""
    _garbage[:] = [] if call.exact else [call]
    hidden = torch.zeros(TOKENS, call.dim, dtype=call.dtype)
    head = head_of(call)
    scale = torch.ones(TOKENS) if call.temperature else None
    tokens = Tokens(hidden, None, torch.zeros(TOKENS, dtype=torch.int32), scale=scale)
    wanted = Wanted()
    if call.everything:
        wanted = Wanted(smooth_logit=True, entropy=True, sum_p2=True, correct=True, moments=True)
    if call.screen is not None:
        several = call.screen == "e4m3"
        wanted = Wanted(screened=True, entropy=several, sum_p2=several, correct=several)
    room = Room(WORKSPACE_BYTES)
    store = None
    if call.keeps and call.screen is not None:
        store = ListedLogits(draws=True)
    elif call.chunk:
        store = KeptLogits.make_for_chunk(head.weight, TOKENS)
    elif call.keeps and call.exact:
        # Of fewer columns than there are: the others take a product.
        store = KeptLogits.make(head.weight, TOKENS, 2**19, None)
    # Lists may be long.
    by_largest = call.everything
    rule = ColumnFilter(1.0, by_largest, tail=True, draws=not by_largest, keeps_flat=True)
    request = ForwardRequest(
        wanted=wanted,
        filter=None if call.exact else rule,
        screen=None if call.screen is None else Screen(dtype=call.screen),
        bounds=(lambda bound: torch.stack([bound, bound])) if call.ranks else None,
        store=store,
        room=room,
    )
    stats, marks = forward(tokens, head, request)
    kept = None if marks is None else keep(tokens, head, marks, stats.lse, rule, room)
    extra = stats.lse if call.everything else None
    later = BackwardRequest(
        stats=stats,
        upstream=Upstream(stats.lse, extra, None if extra is None else stats.smooth_logit, extra),
        kept=kept,
        # torch has no such products on the CPU.
        hidden=None if call.chunk else NoSum(is_local=not call.ranks, part_dtype=call.dtype),
        weight=None if call.chunk else WeightGrad(torch.zeros_like(head.weight), accumulate=False),
        bias=head.bias is not None,
        store=store,
        room=room,
    )
    backward(tokens, head, later)


def head_of(call: Call) -> Head:
    bias, class_weight = None, None
    if call.everything:
        bias, class_weight = torch.zeros(COLUMNS, dtype=call.dtype), torch.ones(COLUMNS)
    weight = torch.zeros(COLUMNS, call.dim, dtype=call.dtype)
    return Head(weight, bias, class_weight, COLUMNS, call.softcap, 1.0)


def compile_largest() -> None:
    call = Call()
    hidden = torch.zeros(TOKENS, call.dim, dtype=call.dtype)
    tokens = Tokens(hidden, None, torch.zeros(TOKENS, dtype=torch.int32))
    largest(tokens, head_of(call), Room(WORKSPACE_BYTES))


def compile_small() -> None:
    """What picks tokens, merges ranks, sums the loss and scales gradients."""
    shard = VocabShard(0, COLUMNS, COLUMNS)
    pick_on_device(torch.zeros(TOKENS, dtype=torch.int64), -100, shard)
    part = pack_lse_and_target(torch.zeros(TOKENS), torch.zeros(TOKENS), (0,) * 8)
    count = torch.ones(1, dtype=torch.int32)
    merge_lse_and_target(torch.stack([part, part]), count)
    for divisor in (1.0, torch.ones(1)):
        LOSS_KERNELS.total(torch.zeros(TOKENS), torch.zeros(TOKENS), divisor)
        LOSS_KERNELS.share_gradient(torch.ones(()), torch.zeros(TOKENS), divisor)
    scale(torch.zeros(TOKENS, 16, dtype=torch.bfloat16), torch.ones(()))


def compile_pairs() -> None:
    # More than one part.
    number = 2 * PART
    pairs = Pairs(*(torch.zeros(number, dtype=torch.int64) for _ in Pairs.__dataclass_fields__))
    for dtype in (torch.bfloat16, torch.float32):
        hidden = torch.zeros(TOKENS, Call().dim, dtype=dtype)
        head = head_of(replace(Call(everything=True), dtype=dtype))
        request = PairsRequest(pairs, 0, Room(WORKSPACE_BYTES))
        logits = pair_logits(hidden, head, request)
        for weight in (torch.zeros_like(head.weight), None):
            out = PairsGrads(torch.zeros_like(hidden), weight, torch.zeros(COLUMNS))
            pair_gradients(hidden, head, request, logits, out)


def compile_segments() -> None:
    hidden = torch.zeros(TOKENS, Call().dim, dtype=Call().dtype)
    tokens = Tokens(hidden, None, torch.zeros(TOKENS, dtype=torch.int32))
    for wanted in (Wanted(), Wanted(entropy=True, sum_p2=True, correct=True, moments=True)):
        request = ForwardRequest(wanted, None, None, None, None, Room(0), COLUMNS // 4)
        statistics_of_segments(tokens, head_of(Call()), request)


def compile_heads(
    dtype: torch.dtype, screen: Screen | None = None, *, divergence: Divergence = "forward_kl"
) -> None:
    """A student and a teacher of another width; in fp32 with all that logits may have."""
    everything = dtype == torch.float32
    call = Call(dtype, everything=everything, softcap=30.0 if everything else None)
    _garbage[:] = [call]
    target = torch.zeros(TOKENS, dtype=torch.int32)
    head, teacher_head = head_of(call), head_of(replace(call, dim=200))
    heads = replace(head, class_weight=None), replace(teacher_head, class_weight=None)
    tokens, of_teacher = (
        Tokens(torch.zeros(TOKENS, each.weight.shape[1], dtype=dtype), None, target)
        for each in heads
    )
    rule, room = ColumnFilter(1.0, by_largest=False, tail=True, draws=True), Room(2**26)
    reverse, lse = divergence != "forward_kl", torch.zeros(TOKENS)
    mixture = Mixture(0.3, lse, lse) if divergence == "jsd" else None
    request = ForwardRequest(
        *(Wanted(), rule, screen, None, None, room), reverse=reverse, mixture=mixture
    )
    out = forward_of_heads(tokens, heads[0], (of_teacher, heads[1]), request)
    later = BackwardRequest(
        stats=replace(out.student, entropy=lse),
        upstream=Upstream(lse, entropy=lse) if reverse else Upstream(lse, lse),
        kept=keep(tokens, heads[0], out.scores, lse, rule, room),
        hidden=NoSum(is_local=True, part_dtype=dtype),
        weight=WeightGrad(torch.zeros_like(head.weight), accumulate=False),
        bias=everything,
        store=None,
        room=room,
        teacher=TeacherPart(
            *(of_teacher, heads[1], lse, None if reverse else lse), mixture and mixture.beta
        ),
    )
    backward(tokens, heads[0], later)


def compile_tiles() -> None:
    """The most columns that a tile has on a GPU, of every divergence."""
    tile, vector = torch.zeros(2, GPU_COLUMNS), torch.zeros(2)
    targets = torch.zeros(2, dtype=torch.int64)
    for name in KINDS:
        kernels = TileKernels(name, 0.3, 2.0)
        kernels.add_terms(tile, tile, 16, (vector, vector), torch.zeros(2, 2))
        for number, of_all in ((3, None), (5, targets)):
            kernels.add_sums(tile, tile, 16, torch.zeros(number, 2), of_all)
            kernels.merge(torch.zeros(2, number, 2))
            kernels.merge_messages(torch.zeros(2, 9 + 2 * number), number)
        # Sums of fp32 inputs.
        lse, number = vector.double(), torch.zeros(5, 2, dtype=torch.float64)
        kernels.add_sums(tile, tile, 16, number, targets)
        kernels.add_terms(tile, tile, 16, (lse, lse), torch.zeros(2, 2))
        at = (tile.clone(), tile, None, 16, targets, (lse, lse, vector, lse), (vector, vector))
        kernels.gradient(*at, 0.5, None, torch.float32)
    for full in (None, vector[:1]):
        TileKernels("jsd", 0.3, 2.0).pack(torch.zeros(3, 2), full, [0] * 8)
        for some, dtype in ((None, torch.bfloat16), (vector, torch.float32)):
            slope, scale = (None, None) if some is None else (tile, vector[0])
            at = (tile, tile, slope, 16, targets, (vector,) * 4, (vector, some))
            kernels.gradient(*at, 0.5, scale, dtype)
    for first in (0, GPU_COLUMNS):
        add_tile(tile, torch.zeros(2, 128, dtype=torch.int64), first)


OTHERS = {
    "heads": partial(compile_heads, torch.bfloat16),
    "heads-int8": partial(compile_heads, torch.bfloat16, Screen(dtype="int8")),
    "heads-e4m3": partial(compile_heads, torch.bfloat16, Screen(dtype="e4m3")),
    "heads-fp32": partial(compile_heads, torch.float32),
    "heads-reverse": partial(compile_heads, torch.bfloat16, divergence="reverse_kl"),
    "heads-reverse-fp32": partial(compile_heads, torch.float32, divergence="reverse_kl"),
    "heads-jsd": partial(compile_heads, torch.bfloat16, divergence="jsd"),
    "heads-jsd-fp32": partial(compile_heads, torch.float32, divergence="jsd"),
    "tiles": compile_tiles,
    "largest": compile_largest,
    "small": compile_small,
    "pairs": compile_pairs,
    "segments": compile_segments,
}


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
