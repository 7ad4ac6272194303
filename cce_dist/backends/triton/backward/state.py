"""One backward over this rank's shard in Triton: its kernels' operands, and the tail's sums.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import BackwardRequest, LateTargets, Room
from cce_dist.backends.triton.backward.hopper_fit import least_bytes, runs_on_hopper
from cce_dist.backends.triton.backward.teacher import TeacherState
from cce_dist.backends.triton.backward.upstream import TokenUpstream
from cce_dist.backends.triton.filter.kept_logits import KeptLogits
from cce_dist.backends.triton.filter.lists import TILE, ListedLogits, Lists
from cce_dist.backends.triton.filter.marks import KeptColumns, Marks
from cce_dist.backends.triton.filter.tail import centroids, padded_groups
from cce_dist.backends.triton.kernels.backward.store_hidden import store_hidden_kernel
from cce_dist.backends.triton.kernels.filter.tail import (
    entropy_tail_kernel,
    group_sums_kernel,
    token_sums_kernel,
)
from cce_dist.backends.triton.launch.arguments import for_kernels, with_unit_inner_stride
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import KernelTiles, interpreted, num_programs, tiles_for
from cce_dist.core.streams import start_on_side_stream
from cce_dist.core.types import Head, Tokens
from cce_dist.options import TOKEN_BLOCK

# The fewest columns of a piece. Fewer would take as long: a program's start and its sum then take
# most of the time.
LEAST_OF_A_PIECE = 1024


def _pieces_and_room(
    num_tokens: int, weight: Tensor, kept: KeptColumns | None, whole: Room, splits: bool
) -> tuple[int, int]:
    """Returns the number of pieces of the columns (one unless `splits`), each with a separate
    hidden gradient, and the bytes of the workspace that are left for chunks.

    A task of the hidden gradient is a block of tokens and some dims, over all columns of a piece.
    Few tokens with one piece would leave most of a device idle.
    """
    num_columns, dim = weight.shape
    workspace_bytes = whole.workspace_bytes
    num_blocks, tiles = triton.cdiv(num_tokens, TOKEN_BLOCK), tiles_for(weight)
    if kept is None:
        room, slice_dims = workspace_bytes - 160 * num_blocks * TOKEN_BLOCK, tiles.columns
    else:
        room, slice_dims = kept.marks.room(workspace_bytes, num_blocks), tiles.slice_dims
    tasks, num_bytes = num_blocks * triton.cdiv(dim, slice_dims), 4 * num_tokens * dim
    pieces = min(
        num_programs(weight) // max(tasks, 1),
        num_columns // LEAST_OF_A_PIECE,
        room // 4 // max(num_bytes, 1),
    )
    return (pieces, room - pieces * num_bytes) if splits and pieces > 1 else (1, room)


@dataclass(frozen=True)
class GradBuffers:
    """Memory of the gradients, written; None where not needed."""

    hidden: Tensor | None  # [pieces, N, D] fp32
    weight: Tensor | None  # [V_local, D], of inner stride 1
    bias: Tensor | None  # [V_local] fp32
    accumulate: bool  # the weight's gradient is added to its memory
    late: LateTargets | None  # left out of the weight's gradient

    @property
    def weight_stride(self) -> int:
        """Elements between two rows of the weight's gradient; 0 without it."""
        return 0 if self.weight is None else self.weight.stride(0)


@dataclass
class BackwardState:
    """One backward: its operands as the kernels read them, and the tail's sums."""

    num_tokens: int
    head: Head
    kept: KeptColumns | None
    tiles: KernelTiles
    weight: Tensor
    hidden: Tensor  # [num_rows, D]
    count: Tensor
    per_token: TokenUpstream
    has_entropy: bool
    has_smooth: bool
    by_torch: bool  # torch multiplies d_logits, which all lie in `logits`
    num_blocks: int
    num_tiles: int
    pieces: int  # of the columns; each has a separate hidden gradient
    room: int  # bytes of the workspace for chunks
    drawn_total: Tensor  # [num_blocks * 128] sum of the drawn columns' d_logits
    lists: Lists | None
    logits: KeptLogits | None  # kept by the forward, of the last columns; overwritten
    listed: ListedLogits | None  # kept by the forward, of the last chunk of `lists`; overwritten
    invariant: bool = False  # see `BackwardRequest`
    teacher: TeacherState | None = None
    centroid: Tensor | None = None  # [padded_groups, D] mean of the columns that a group drops
    sums: Tensor | None = None  # [padded_groups, D] gradient of a row with share 1 of the group
    bias_sums: Tensor | None = None  # [padded_groups] the same of the bias

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        head: Head,
        request: BackwardRequest,
    ) -> BackwardState:
        head, kept, store = for_kernels(head), request.kept, request.store
        assert kept is None or isinstance(kept, KeptColumns)
        weight, upstream = head.weight, request.upstream
        num_blocks = triton.cdiv(len(tokens), TOKEN_BLOCK)
        # The workspace of kept logits already takes all of the room.
        splits = request.hidden is not None and store is None and not request.invariant
        pieces, room = _pieces_and_room(len(tokens), weight, kept, request.room, splits)
        listed = store if kept is not None and isinstance(store, ListedLogits) else None
        logits = store if isinstance(store, KeptLogits) else None
        by_torch = logits is not None and logits.by_torch
        marks, part, beside = None if kept is None else kept.marks, request.teacher, None
        if marks is not None and part is not None and part.upstream is None:
            beside = part.lse, marks.of_dropped
        per_token = TokenUpstream.of(
            tokens,
            head,
            request,
            marks.log_dropped if kept is not None and marks is not None and kept.tail else None,
            None if marks is None else marks.order,
            num_blocks,
            by_torch=by_torch,
            beside=beside,
        )
        teacher = None
        if part is not None:
            teacher = TeacherState.of(tokens, head, request, part, per_token, num_blocks)
        state = cls(
            num_tokens=len(tokens),
            head=head,
            kept=kept,
            tiles=tiles_for(weight),
            weight=weight,
            hidden=with_unit_inner_stride(tokens.hidden),
            count=per_token.count,
            per_token=per_token,
            has_entropy=upstream.entropy is not None,
            has_smooth=upstream.smooth_logit is not None and per_token.mean is None,
            by_torch=by_torch,
            num_blocks=num_blocks,
            num_tiles=triton.cdiv(weight.shape[0], TILE),
            pieces=pieces,
            room=room,
            drawn_total=request.stats.lse.new_empty(num_blocks * TOKEN_BLOCK),
            lists=None,
            logits=logits,
            listed=listed,
            invariant=request.invariant,
            teacher=teacher,
        )
        draws = kept is not None and kept.draws and request.hidden is not None
        state._list_and_sum(tokens, marks, state._every_column(request), draws=draws)
        return state

    def _every_column(self, request: BackwardRequest) -> tuple[Tensor, int] | None:
        """Returns `every_column` of `Lists.of`; None: the lists must do."""
        if self.kept is None or not self.kept.keeps_flat or request.teacher is not None:
            return None
        if not runs_on_hopper(
            self.weight,
            self.tiles,
            has_hidden=request.hidden is not None,
            has_bias_alone=request.bias and request.weight is None,
        ):
            return None
        return self.count, least_bytes(self.weight, self.num_blocks)

    def _list_and_sum(
        self,
        tokens: Tokens,
        marks: Marks | None,
        every_column: tuple[Tensor, int] | None,
        *,
        draws: bool,
    ) -> None:
        """Makes the lists of kept columns, and the tail's sums beside them."""
        steps = [step for step in (tokens.fill, self._tail_sums(draws)) if step is not None]

        def fill_and_sum() -> None:
            for step in steps:
                step()

        # The lists of kept columns don't depend on this, and both are small kernels.
        wait = start_on_side_stream(self.weight.device, fill_and_sum) if steps else None
        try:
            if self.listed is not None:
                self.lists = self.listed.lists
            elif marks is not None:
                of_call = marks, self.weight, self.num_blocks, self.room
                self.lists = Lists.of(*of_call, draws=draws, every_column=every_column)
        finally:
            if wait is not None:
                wait()

    @property
    def tail_mass(self) -> Tensor | None:
        """[P] d_logits of each token's dropped columns, summed; without the entropy's part, which
        drawn columns add to the hidden gradient by themselves."""
        return self.per_token.tail_mass

    @property
    def whole_tail_mass(self) -> Tensor | None:
        """[P] the same with the entropy's part, as a product of marginals has it."""
        of_entropy = self.per_token.entropy_tail
        return self.tail_mass if of_entropy is None else of_entropy[0]

    @property
    def has_ratios(self) -> bool:
        """A second tail has the log ratios of the shares to a teacher's: of the weight alone."""
        return self.teacher is not None and self.per_token.entropy_tail is not None

    @property
    def mean(self) -> Tensor | None:
        return self.per_token.mean

    @property
    def share(self) -> Tensor | None:
        if self.kept is None or self.tail_mass is None:
            return None
        marks = self.kept.marks
        alone = marks.of_dropped is not None and not self.has_two_tails
        return marks.share[: len(marks.share) // 2] if alone else marks.share

    @property
    def groups(self) -> int:
        """The groups of all tails: a second one has as many as the first."""
        return 0 if self.share is None else self.share.shape[0]

    @property
    def groups_of_tail(self) -> int:
        return self.groups // 2 if self.has_two_tails else self.groups

    @property
    def has_two_tails(self) -> bool:
        return self.teacher_mass is not None or self.has_ratios

    @property
    def teacher_mass(self) -> Tensor | None:
        """[P] `tail_mass` of a teacher's tail; None: there is none."""
        return None if self.teacher is None else self.teacher.tail_mass

    @property
    def second_mass(self) -> Tensor | None:
        """[P] upstream of the mean logit or of a second tail, which have the same place."""
        of_entropy = self.per_token.entropy_tail
        if self.has_ratios and of_entropy is not None:
            return of_entropy[1]
        return self.mean if self.teacher_mass is None else self.teacher_mass

    @property
    def padded_groups(self) -> int:
        return padded_groups(self.groups, self.mean is not None)

    @property
    def tail_precision(self) -> str:
        """The precision of the tail's products, whose operands, shares and sums, are fp32: tf32 has
        more digits than 16-bit inputs."""
        return "tf32" if self.weight.element_size() == 2 else "ieee"

    @property
    def tokens_per_group(self) -> int:
        return TOKEN_BLOCK * (1 if self.kept is None else self.kept.marks.blocks_per_group)

    def or_dummy(self, tensor: Tensor | None) -> Tensor:
        """Returns the tensor, or any pointer in place of None: the kernel will not read it."""
        return self.count if tensor is None else tensor

    def _tail_sums(self, draws: bool) -> Callable[[], None] | None:
        """Allots memory for what dropped columns and the mean logit add to the gradients, by group.

        Returns: a function that launches the kernels that fill it; None: they add nothing.
        """
        if self.share is None and self.mean is None:
            return None
        with_mean = self.mean is not None
        # Where columns are drawn, an error of a centroid adds no bias: an estimate will do.
        estimates = draws and not with_mean
        self.centroid, inverse, sum_columns = centroids(
            self.head, self.weight, self.share, with_mean=with_mean, every=16 if estimates else 1
        )
        dim, block_d = self.weight.shape[1], 128
        part = self.weight.new_empty(2, self.num_blocks, dim, dtype=torch.float32)
        part_bias = part.new_empty(2, self.num_blocks)
        sum_tokens = functools.partial(
            start(token_sums_kernel, (self.num_blocks, triton.cdiv(dim, block_d))),
            self.hidden,
            self.per_token.rows,
            self.count,
            self.or_dummy(self.whole_tail_mass),
            self.or_dummy(self.second_mass),
            part,
            part_bias,
            dim,
            self.hidden.stride(0),
            TOKENS=TOKEN_BLOCK,
            BLOCK_D=block_d,
            HAS_TAIL=self.share is not None,
            HAS_MEAN=self.second_mass is not None,
        )
        self.sums, self.bias_sums = torch.empty_like(self.centroid), torch.empty_like(inverse)
        sum_groups = functools.partial(
            start(group_sums_kernel, (self.padded_groups, triton.cdiv(dim, block_d))),
            part,
            part_bias,
            inverse,
            self.sums,
            self.bias_sums,
            dim,
            self.groups_of_tail,
            self.num_blocks,
            self.tokens_per_group // TOKEN_BLOCK,
            BLOCK_D=block_d,
            HAS_MEAN=with_mean,
            HAS_TEACHER=self.has_two_tails,
            OF_RATIOS=self.has_ratios,
        )

        add_spread = self._add_spread()

        def launch() -> None:
            sum_columns()
            if add_spread is not None:
                add_spread()
            sum_tokens()
            sum_groups()

        return launch

    def _add_spread(self) -> Callable[[], None] | None:
        """Prepares the last term of `TokenUpstream.entropy_tail`; None: there is none."""
        share, entropy_tail = self.share, self.per_token.entropy_tail
        if share is None or entropy_tail is None:
            return None
        block_v, num_warps = (4096, 4) if interpreted() else (2048, 8)
        return functools.partial(
            start(entropy_tail_kernel, (self.groups_of_tail,)),
            share,
            entropy_tail,
            share.shape[1],
            entropy_tail.shape[1],
            self.tokens_per_group,
            BLOCK_V=block_v,
            BLOCK_N=TOKEN_BLOCK,
            HAS_TEACHER=self.has_ratios,
            num_warps=num_warps,
        )

    def finish_hidden(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Adds the tail to `part`, [num_rows, D] fp32. Returns it in `dtype`; in place for fp32."""
        if self.by_torch and dtype == part.dtype:
            return part
        draws = self.lists is not None and self.lists.draws
        dim, out = self.weight.shape[1], part
        if dtype != part.dtype:
            out = torch.empty_like(part, dtype=dtype)
        block_d = 128
        start(store_hidden_kernel, (self.num_blocks, triton.cdiv(dim, block_d)))(
            part,
            self.or_dummy(self.centroid),
            self.per_token.rows,
            self.count,
            self.or_dummy(None if self.lists is None else self.lists.num_chunks),
            self.or_dummy(self.tail_mass if draws or self.has_ratios else self.whole_tail_mass),
            self.drawn_total,
            self.per_token.grad_scale,
            self.or_dummy(self.second_mass),
            out,
            self.num_tokens,
            dim,
            self.groups_of_tail,
            self.tokens_per_group,
            BLOCK_N=TOKEN_BLOCK,
            BLOCK_D=block_d,
            HAS_TAIL=self.share is not None,
            HAS_DRAWN=draws,
            HAS_MEAN=self.mean is not None,
            HAS_TEACHER=self.teacher_mass is not None,
            EVERY=self.lists is None,
        )
        return out
