"""Calls of losses and of distillation that reach every kernel, for compile_jobs.py.

Their tensors lie on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from cce_dist.backends.protocol import (
    BackwardRequest,
    ColumnFilter,
    ForwardRequest,
    LateTargets,
    Mixture,
    PairsGrads,
    PairsRequest,
    Room,
    TeacherPart,
    WeightGrad,
)
from cce_dist.backends.torch.tiles import GPU_COLUMNS
from cce_dist.backends.triton.backward.exact import launch_targets
from cce_dist.backends.triton.backward.late_targets import add_late_targets
from cce_dist.backends.triton.backward.state import BackwardState
from cce_dist.backends.triton.filter.kept_logits import KeptLogits
from cce_dist.backends.triton.filter.lists import ListedLogits
from cce_dist.backends.triton.filter.marks import keep
from cce_dist.backends.triton.forward.largest import largest
from cce_dist.backends.triton.grads import backward, scale
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

TOKENS, COLUMNS = 256, 4096
WORKSPACE_BYTES = 2**26
# Not empty: memory is full of numbers that index nothing.
GARBAGE: list[Call] = []


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


def compile_call(call: Call) -> None:
    """Forward and backward of one shard, as autograd has them."""
    GARBAGE[:] = [] if call.exact else [call]
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
    if isinstance(store, KeptLogits) and store.of_chunk:
        late = LateTargets(torch.zeros(TOKENS), torch.zeros(COLUMNS), TOKENS, TOKENS)
        launch_targets(BackwardState.of(tokens, head, later), store.regions[0], late)
        add_late_targets(tokens, late.grads, torch.zeros_like(head.weight))


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
    GARBAGE[:] = [call]
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
