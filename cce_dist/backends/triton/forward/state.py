"""One forward over this rank's shard in Triton: allocations, grids, launches.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cce_dist.backends.protocol import ColumnFilter
from cce_dist.backends.triton.filter.kept_logits import KeptLogits
from cce_dist.backends.triton.forward.extras import NUM_EXTRAS, sums_softcapped
from cce_dist.backends.triton.forward.hopper import Groups, launch_forward, num_groups
from cce_dist.backends.triton.forward.hopper_logits import launch_logits
from cce_dist.backends.triton.forward.operands import (
    EightBit,
    Finished,
    ForwardBuffers,
    ForwardLaunch,
)
from cce_dist.backends.triton.kernels.forward.finish import finish_kernel
from cce_dist.backends.triton.kernels.forward.forward import forward_kernel
from cce_dist.backends.triton.kernels.forward.launches import (
    AFTER_PROBE,
    ALONE,
    FIRST,
    LAST,
    PROBE,
    SEGMENTS,
    SLOTS,
)
from cce_dist.backends.triton.kernels.tokens.pack import pack_kernel
from cce_dist.backends.triton.launch.arguments import (
    descriptor_of,
    for_kernels,
    pad_tokens,
    padded_dim,
    rows_of,
    with_unit_inner_stride,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import (
    KernelTiles,
    cached_blocks,
    interpreted,
    is_wide,
    num_programs,
    splits_of_segment,
    takes_tma,
    tiles_for,
    warn_of_layout,
)
from cce_dist.core.types import Head, Tokens, Wanted
from cce_dist.options import TOKEN_BLOCK


@dataclass
class ForwardState:
    """One forward: its inputs, packed, and the buffers that its launches fill."""

    tokens: Tokens
    head: Head
    scale: float | Tensor  # factor of all logits, or [N_padded] fp32 of each token's
    wanted: Wanted
    tiles: KernelTiles
    rows: Tensor
    count: Tensor
    targets: Tensor
    weight: Tensor
    packed: Tensor
    shape: Tensor  # [3] int32: blocks that count, splits of the vocabulary, blocks at a time
    segment: int  # columns of a segment of the shard, which has splits of its own; 0: all columns
    splits: int  # of a segment; 0: as many as the tokens' number asks for
    programs: int  # at least blocks x splits / groups
    groups: int  # splits that one program computes side by side
    grid: int  # programs x groups
    num_blocks: int
    buffers: ForwardBuffers
    score: bool
    keep_logits: KeptLogits | None
    eight: EightBit | None = None

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        head: Head,
        wanted: Wanted,
        score: bool,
        keep_logits: KeptLogits | None,
        screened: bool = False,
        segment: int = 0,
        tiles: KernelTiles | None = None,
        beside: int = 0,
    ) -> ForwardState:
        """Args: beside: bytes of a token's hidden states of another model, which a launch reads."""
        warn_of_layout(head.weight)
        head = for_kernels(head)
        weight = head.weight
        tiles = tiles or tiles_for(weight)
        num_blocks = triton.cdiv(len(tokens), TOKEN_BLOCK)
        cached = cached_blocks(weight, weight.element_size(), beside)
        programs = 2 * num_programs(weight)
        if num_blocks > cached:
            least = triton.cdiv(num_programs(weight), cached)
            programs = max(programs, num_blocks * triton.cdiv(3 * least, 2))
        programs = max(programs, num_blocks)
        padded = num_blocks * TOKEN_BLOCK
        rows, count = rows_of(tokens)
        new, fp32 = weight.new_empty, torch.float32
        has_largest = wanted.correct or wanted.moments
        has_extras = has_largest or wanted.sum_p2 or sums_softcapped(wanted, head)
        has_extras = has_extras or (screened and head.softcap is not None)
        # Hopper's kernel sums no softcapped logits, and seeks the largest product, not logit.
        portable = sums_softcapped(wanted, head) or (has_largest and head.logit_scale <= 0)
        if keep_logits is not None:
            # The kernel of chunks has no statistics.
            portable = portable or has_extras or wanted.entropy
            portable = portable or not keep_logits.of_chunk or tokens.scale is not None
        groups = 1 if portable else num_groups(weight, tiles)
        splits, segments = 0, 1
        if segment:
            segments = triton.cdiv(weight.shape[0], segment)
            # Those of a whole segment, also where this rank's last one is cut by padding.
            splits = splits_of_segment(segment, weight, tiles)
            programs = num_blocks * segments * splits
        size = programs * groups * TOKEN_BLOCK + padded  # the splits' sums, and those merged
        buffers = ForwardBuffers(
            lower=new(segments * padded, dtype=fp32),
            split_states=new(1 if segment else SLOTS.value, 4, size, dtype=fp32),
            mass=new(num_blocks, weight.shape[0], dtype=torch.bfloat16) if score else None,
            extras=weight.new_zeros(NUM_EXTRAS, size, dtype=fp32) if has_extras else None,
            keys=new(size, dtype=torch.int64) if has_largest and groups > 1 else None,
        )
        return cls(
            tokens=tokens,
            head=head,
            scale=_scale_of(tokens, head, padded),
            wanted=wanted,
            tiles=tiles,
            rows=rows,
            count=count,
            targets=pad_tokens(tokens.local_targets.int(), padded, -1),
            weight=weight,
            packed=_memory_of_packed(weight, padded, keep_logits),
            shape=torch.empty(3, dtype=torch.int32, device=weight.device),
            segment=segment,
            splits=groups * splits,
            programs=programs,
            groups=groups,
            grid=programs * groups,
            num_blocks=num_blocks,
            buffers=buffers,
            score=score,
            keep_logits=keep_logits,
        )._pack(1 if screened else weight.element_size(), beside)

    def for_shape(self, element_size: int, beside: int = 0) -> tuple[int, int, int, int, int]:
        """Returns the arguments of `shape_of` for hidden states of that element size, in bytes, and
        another model's beside them."""
        return (
            triton.cdiv(self.weight.shape[0], self.tiles.columns),
            num_programs(self.weight),
            cached_blocks(self.weight, element_size, beside),
            self.programs,
            self.weight.shape[1] * element_size + beside,
        )

    @property
    def segments(self) -> int:
        return triton.cdiv(self.weight.shape[0], self.segment) if self.segment else 1

    @property
    def columns(self) -> int:
        """The number of columns in one tile of one split."""
        return self.tiles.columns // self.groups

    @property
    def num_tiles(self) -> int:
        return triton.cdiv(self.weight.shape[0], self.columns)

    @property
    def counts(self) -> Tensor:
        """Tells which tokens count, [N] bool in the order of the packed tokens."""
        return torch.arange(len(self.tokens), device=self.weight.device) < self.count

    @property
    def has_unkept(self) -> bool:
        """Tells whether dropped columns have two sums: one weighted by softcap', one not."""
        return self.eight is not None and self.head.softcap is not None

    @property
    def has_screened_stats(self) -> bool:
        """Tells whether kept columns have sums for statistics, of exact logits."""
        wanted = self.wanted
        has_stats = wanted.entropy or wanted.sum_p2 or wanted.correct or wanted.moments
        return self.eight is not None and has_stats

    def alone(self, robust: bool = False) -> ForwardLaunch:
        """Returns a launch of all tiles at once, which starts from `buffers.lower`."""
        number = SEGMENTS.value if self.segment else ALONE.value
        return ForwardLaunch(number, 0, self.num_tiles, robust=robust)

    def launches(self, ranks_exchange: bool) -> tuple[ForwardLaunch, ...]:
        """Returns the launches. Each starts from the sums of the one before."""
        kept, columns = self.keep_logits, self.tiles.columns
        if kept is None:
            # One program at a time makes one split: no other split's sums can help it.
            alone = num_programs(self.weight) == 1 and not ranks_exchange
            numbers = (ALONE.value,) if alone else range(LAST.value + 1)
            return tuple(ForwardLaunch(number, 0, self.num_tiles) for number in numbers)
        if kept.of_chunk:
            probe = ForwardLaunch(PROBE.value, 0, self.num_tiles)
            return probe, ForwardLaunch(AFTER_PROBE.value, 0, self.num_tiles, kept.regions[0])
        end = kept.first_column // columns
        # PROBE's sums give references alone, so any columns do: it takes the first ones.
        launches = [ForwardLaunch(PROBE.value, 0, self.num_tiles)]
        launches += [ForwardLaunch(number, 0, end) for number in range(FIRST.value, LAST.value + 1)]
        for number, region in enumerate(kept.ascending, LAST.value + 1):
            start_tile = end
            if region is not None:
                end = triton.cdiv(region.last_column, columns)
            launches.append(ForwardLaunch(number, start_tile, end, region))
        return tuple(launches)

    def _pack(self, element_size: int, beside: int) -> ForwardState:
        """Packs the tokens. Args: element_size: bytes of an element of the forward's operands."""
        hidden = with_unit_inner_stride(self.tokens.hidden)
        padded, stride = self.packed.shape
        block = TOKEN_BLOCK if interpreted() else 16
        start(pack_kernel, (triton.cdiv(padded, block),))(
            hidden,
            self.weight,
            self.or_dummy(self.head.bias),
            self.rows,
            self.targets,
            self.count,
            self.packed,
            self.buffers.lower,
            self.shape,
            len(self.tokens),
            self.weight.shape[1],
            padded,
            *self.for_shape(element_size, beside),
            self.segments,
            hidden.stride(0),
            self.weight.stride(0),
            stride,
            self.scale,
            self.head.softcap or 1.0,
            BLOCK_N=block,
            BLOCK_D=256,
            HAS_BIAS=self.head.bias is not None,
            HAS_SOFTCAP=self.head.softcap is not None,
            TOKENS=TOKEN_BLOCK,
            GROUPS=self.groups,
            SEGMENT=self.segment,
            SPLITS=self.splits,
        )
        return self

    def or_dummy(self, tensor: Tensor | None) -> Tensor:
        """Returns the tensor, or any pointer in place of None: the kernel will not read it."""
        return self.count if tensor is None else tensor

    def launch(self, rule: ColumnFilter | None, launch: ForwardLaunch) -> None:
        threshold, by_largest = (0.0, False) if rule is None else (rule.threshold, rule.by_largest)
        dim, eight, tiles = self.weight.shape[1], self.eight, self.tiles
        hidden, weight = self.packed[:, :dim], self.weight
        if eight is not None:
            tiles = tiles_for(eight.weight)
            hidden, weight = eight.hidden[:, :dim], eight.weight[:, :dim]
        grouping = Groups(self.programs, self.groups, tiles, threshold, by_largest)
        if self.groups == 1 or launch.robust:
            self._launch_portable(hidden, weight, launch, grouping)
            return
        operands = (self.buffers, self.count, self.shape, launch.number, grouping)
        if launch.region is not None:
            launch_logits(hidden, weight, self.head, *operands, launch.region)
            return
        of_call = (eight, self.wanted, self.segment)
        launch_forward(hidden, weight, self.head, self.scale, *operands, *of_call)

    def _launch_portable(
        self, hidden: Tensor, weight: Tensor, launch: ForwardLaunch, grouping: Groups
    ) -> None:
        head, wanted, buffers, eight = self.head, self.wanted, self.buffers, self.eight
        tiles, region, use_tma = grouping.tiles, launch.region, takes_tma(weight)
        logits = self.count if region is None else region.as_logits()
        start(forward_kernel, (self.grid,))(
            descriptor_of(hidden, TOKEN_BLOCK, tiles.dims, use_tma),
            descriptor_of(weight, self.columns, tiles.dims, use_tma),
            self.or_dummy(head.bias),
            self.or_dummy(head.class_weight),
            self.or_dummy(None if eight is None else eight.of_columns),
            self.or_dummy(None if eight is None else eight.of_tokens),
            self.count,
            self.shape,
            buffers.lower,
            buffers.split_states,
            self.or_dummy(buffers.mass),
            self.or_dummy(buffers.extras),
            descriptor_of(logits, self.columns, TOKEN_BLOCK, use_tma and region is not None),
            logits,
            self.or_dummy(None if region is None else region.ref),
            launch.number,
            launch.start_tile,
            launch.end_tile,
            buffers.size,
            self.packed.shape[0],
            *weight.shape,
            hidden.stride(0),
            weight.stride(0),
            self.scale,
            head.softcap or 1.0,
            grouping.threshold,
            BLOCK_N=TOKEN_BLOCK, BLOCK_V=self.columns, BLOCK_D=tiles.dims, USE_TMA=use_tma,
            PRECISION="ieee", WIDE=is_wide(self.weight), HAS_BIAS=head.bias is not None,
            HAS_SOFTCAP=head.softcap is not None, HAS_SCORE=self.score,
            BY_LARGEST=grouping.by_largest, HAS_SURPLUS=wanted.entropy,
            HAS_SQUARES=wanted.sum_p2, HAS_ARGMAX=wanted.correct or wanted.moments,
            HAS_MOMENTS=wanted.moments, HAS_SMOOTH=sums_softcapped(wanted, head),
            HAS_CLASS_WEIGHT=head.class_weight is not None, HAS_LOGITS=region is not None,
            HAS_UNKEPT=self.has_unkept, IS_ROBUST=launch.robust, IS_SCREENED=eight is not None,
            ACCUMULATOR=tl.float32 if eight is None else eight.accumulator,
            NUM_EXTRAS=0 if buffers.extras is None else NUM_EXTRAS, SEGMENT=self.segment,
            num_warps=tiles.warps,
            # A tile that is stored through a descriptor takes the shared memory of a stage.
            num_stages=tiles.stages if region is None else max(2, tiles.stages - 1),
        )  # fmt: skip

    def merge(self, last: ForwardLaunch, full: Tensor | None = None) -> Finished:
        """Merges the splits of each segment after launch `last`. `add_targets` adds the targets.

        Args: full: of `Screened`. None: full precision throughout, or a merge for the guard, which
            needs lse and `unkept` but no statistics.
        """
        split_states = self.buffers.split_states[last.number % SLOTS.value]
        padded = self.packed.shape[0]
        shape = (self.segments, padded) if self.segment else (padded,)
        wide = is_wide(self.weight)
        lses = split_states.new_empty(1 + wide, *shape)
        lse = lses[0]
        dropped = torch.empty_like(lse) if self.score else None
        entropy = torch.empty_like(lse) if self.wanted.entropy else None
        sum_p2 = torch.empty_like(lse) if self.wanted.sum_p2 else None
        unkept = dropped if self.eight is not None else None
        if self.has_unkept:
            unkept = torch.empty_like(lse)
        block = 128
        start(finish_kernel, (triton.cdiv(padded, block), self.segments))(
            self.count,
            self.shape,
            self.or_dummy(full),
            split_states,
            self.or_dummy(self.buffers.extras),
            lses,
            self.or_dummy(dropped),
            self.or_dummy(entropy),
            self.or_dummy(sum_p2),
            self.or_dummy(unkept),
            padded,
            self.buffers.size,
            TOKENS=TOKEN_BLOCK,
            BLOCK_N=block,
            HAS_SCORE=self.score,
            HAS_SURPLUS=self.wanted.entropy,
            HAS_SQUARES=self.wanted.sum_p2,
            HAS_UNKEPT=self.has_unkept,
            IS_SCREENED=full is not None,
            WIDE=wide,
        )
        rest = lses[1] if wide else None
        return Finished(lse, dropped, unkept, entropy, sum_p2, lse.new_empty(padded), rest)


def _scale_of(tokens: Tokens, head: Head, padded: int) -> float | Tensor:
    if tokens.scale is None:
        return head.logit_scale
    return pad_tokens(tokens.scale * head.logit_scale, padded, 1.0)


def _memory_of_packed(weight: Tensor, padded: int, keep_logits: KeptLogits | None) -> Tensor:
    """Returns [padded, D rounded up]: a chunk's backward reads it too, and holds it."""
    if keep_logits is not None and keep_logits.packed is not None:
        return keep_logits.packed
    return weight.new_empty(padded, padded_dim(weight))
