"""Backward over this rank's shard in Triton: lists of what is kept, the tail, the products.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist.kernels.backward import exact_kernel, filtered_kernel
from cce_dist.kernels.dds import unkept_kernel
from cce_dist.kernels.spread import spread_kernel
from cce_dist.kernels.tail import token_sums_kernel
from cce_dist.local_triton_inputs import (
    for_kernels,
    pad_tokens,
    rows_of,
    with_unit_inner_stride,
)
from cce_dist.local_triton_lists import TILE, KeptColumns, Layout, Lists, choose_tiles_per_chunk
from cce_dist.local_triton_tail import GROUPS, centroids
from cce_dist.local_triton_tiles import (
    Tiles,
    interpreted,
    num_programs,
    tiles_for,
)
from cce_dist.local_triton_upstream import choose_unit, probability_pull, token_pull
from cce_dist.options import TOKEN_BLOCK
from cce_dist.partials import Head, LocalGrads, Needs, Tokens, Upstream


def local_grads(
    tokens: Tokens,
    head: Head,
    lse: Tensor,  # [N] over all ranks
    upstream: Upstream,
    *,
    target_logit: Tensor,  # [N] over all ranks
    entropy: Tensor | None,  # [N] over all ranks; needed if upstream.entropy is given
    kept: KeptColumns | None,  # None: every column
    needs: Needs,
    grad_weight: Tensor | None,  # [V_local, D], written; None: not needed
    accumulate: bool,  # add to grad_weight (fp32) instead of overwriting it
    workspace_bytes: int,
    logits: Tensor | None = None,
    complete: bool = False,
) -> LocalGrads:
    """Gradients of this rank's shard (no communication). Deterministic.

    Args, returns: those of `local_torch_grads.local_grads`. With `complete`, no rank has a part
    to add: hidden is then [num_rows, D] in hidden's dtype, 0 for tokens that don't count.
    Source: block-sparse products as in MegaBlocks, arXiv:2211.15841; docs/numerics.md#the-tail.
    """
    run = Backward.of(
        tokens, head, lse, target_logit, upstream, entropy, kept, needs, workspace_bytes
    )
    weight, grad_hidden, grad_bias = run.weight, None, None
    if needs.bias:
        grad_bias = weight.new_empty(weight.shape[0], dtype=torch.float32)
    if needs.hidden:
        rows = run.num_blocks * TOKEN_BLOCK
        grad_hidden = weight.new_empty(rows, weight.shape[1], dtype=torch.float32)
    if grad_weight is not None and grad_weight.stride(1) != 1 and grad_weight.shape[1] != 1:
        # A buffer whose rows are not contiguous: through a copy, rather than a slower kernel.
        rows = grad_weight.contiguous()
        run.products(grad_hidden, rows, grad_bias, accumulate)
        grad_weight.copy_(rows)
    else:
        run.products(grad_hidden, grad_weight, grad_bias, accumulate)
    if grad_hidden is not None:
        grad_hidden = run.finish_hidden(grad_hidden, complete)
    return LocalGrads(grad_hidden, grad_bias)


@dataclass
class Backward:
    """One backward: its inputs as the kernels read them, and the tail's sums."""

    tokens: Tokens
    head: Head
    kept: KeptColumns | None
    table: Tiles
    weight: Tensor
    hidden: Tensor  # [num_rows, D]
    rows: Tensor
    count: Tensor
    layout: Layout
    pull: Tensor  # [7, num_blocks * 128]: see `sdd_task`
    unit: Tensor  # [1] power of two that the upstream gradients in `pull` were divided by
    tail_mass: Tensor | None  # [N] upstream times dropped mass
    mean: Tensor | None  # [N] upstream of the mean logit, where it is linear
    has_entropy: bool
    has_smooth: bool
    num_blocks: int
    num_tiles: int
    workspace_bytes: int
    drawn_total: Tensor  # [num_blocks * 128] sum of the drawn columns' d_logits
    lists: Lists | None
    centroid: Tensor | None = None  # [GROUPS, D] mean column of what a group drops
    sums: Tensor | None = None  # [GROUPS, D] what a unit of a group's share adds to a column
    bias_sums: Tensor | None = None  # [GROUPS]

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        head: Head,
        lse: Tensor,
        target_logit: Tensor,
        upstream: Upstream,
        entropy: Tensor | None,
        kept: KeptColumns | None,
        needs: Needs,
        workspace_bytes: int,
    ) -> Backward:
        head = for_kernels(head)
        weight = head.weight
        rows, count = rows_of(tokens)
        num_blocks = triton.cdiv(len(tokens), TOKEN_BLOCK)
        num_tiles = triton.cdiv(weight.shape[0], TILE)
        hidden = with_unit_inner_stride(tokens.hidden)
        layout = Layout.of(hidden, weight, rows, count, num_blocks)
        lists = None
        if kept is not None:
            room = workspace_bytes - kept.marks.num_bytes
            lists = Lists.of(kept.marks, layout, weight, room, draws=kept.draws and needs.hidden)
        mean = None
        if upstream.smooth_logit is not None and head.softcap is None:
            mean = upstream.smooth_logit * (head.logit_scale / head.vocab_size)
        probability = probability_pull(upstream, lse) * head.logit_scale
        unit = choose_unit(upstream, head, weight, lse)
        run = cls(
            tokens=tokens,
            head=head,
            kept=kept,
            table=tiles_for(weight),
            weight=weight,
            hidden=hidden,
            rows=rows,
            count=count,
            layout=layout,
            pull=token_pull(
                tokens, head, lse, target_logit, upstream, entropy, unit, count, num_blocks
            ),
            unit=unit,
            tail_mass=None if kept is None or not kept.tail else probability * kept.dropped_mass,
            mean=mean,
            has_entropy=upstream.entropy is not None,
            has_smooth=upstream.smooth_logit is not None and head.softcap is not None,
            num_blocks=num_blocks,
            num_tiles=num_tiles,
            workspace_bytes=workspace_bytes,
            drawn_total=lse.new_empty(num_blocks * TOKEN_BLOCK),
            lists=lists,
        )
        run._sum_tail()
        return run

    @property
    def share(self) -> Tensor | None:
        return None if self.kept is None or self.tail_mass is None else self.kept.marks.share

    @property
    def groups(self) -> int:
        return 0 if self.share is None else self.share.shape[0]

    @property
    def tokens_per_group(self) -> int:
        return TOKEN_BLOCK * (1 if self.kept is None else self.kept.marks.blocks_per_group)

    def _or_dummy(self, tensor: Tensor | None) -> Tensor:
        """A pointer for an argument that the kernel was compiled not to read."""
        return self.count if tensor is None else tensor

    def _sum_tail(self) -> None:
        """What the dropped columns, and the mean logit, add to either gradient, by group."""
        if self.share is None and self.mean is None:
            return
        with_mean = self.mean is not None
        # Where columns are drawn, no centroid biases the gradient: an estimate of it will do.
        estimates = self.lists is not None and self.lists.draws and not with_mean
        self.centroid, inverse = centroids(
            self.head, self.weight, self.share, with_mean=with_mean, every=8 if estimates else 1
        )
        self.sums = torch.empty_like(self.centroid)
        self.bias_sums = torch.empty_like(inverse)
        dim, block_d = self.weight.shape[1], 32
        token_sums_kernel[(GROUPS, triton.cdiv(dim, block_d))](
            self.hidden,
            self.rows,
            self.count,
            self._or_dummy(self.tail_mass),
            self._or_dummy(self.mean),
            inverse,
            self.sums,
            self.bias_sums,
            dim,
            self.groups,
            self.tokens_per_group,
            self.hidden.stride(0),
            BLOCK_N=256,
            BLOCK_D=block_d,
            HAS_TAIL=self.share is not None,
            HAS_MEAN=with_mean,
            num_stages=3,
        )

    def products(
        self,
        grad_hidden: Tensor | None,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None,
        accumulate: bool,
    ) -> None:
        """SDD, DSD, DDS: of every column, or of what is kept, and the tail of what is not."""
        weight, head, lists = self.weight, self.head, self.lists
        # The tail's shares and sums are fp32; tf32 keeps more digits than the 16-bit inputs have.
        tail_precision = "tf32" if weight.element_size() == 2 else "ieee"
        stored = {
            "class_weight_ptr": self._or_dummy(head.class_weight),
            "tail_ptr": self._or_dummy(self.sums),
            "tail_bias_ptr": self._or_dummy(self.bias_sums),
            "grad_weight_ptr": self._or_dummy(grad_weight),
            "grad_bias_ptr": self._or_dummy(grad_bias),
            "V": weight.shape[0],
            "D": weight.shape[1],
            "stride_gv": 0 if grad_weight is None else grad_weight.stride(0),
            "TILE": TILE,
            "GROUPS": GROUPS,
            "HAS_MEAN": self.mean is not None,
            "HAS_CLASS_WEIGHT": head.class_weight is not None,
            "HAS_GRAD_WEIGHT": grad_weight is not None,
            "HAS_GRAD_BIAS": grad_bias is not None,
            "ACCUMULATE": accumulate,
        }
        common = {
            **stored,
            **self._inputs(),
            "grad_hidden_ptr": self._or_dummy(grad_hidden),
            "HAS_GRAD_HIDDEN": grad_hidden is not None,
            "TAIL_PRECISION": tail_precision,
            "num_warps": self.table.backward_warps,
            **({} if interpreted() else {"launch_cooperative_grid": True}),
        }
        if lists is None:
            self._every(common)
            return
        tail = {
            "order_ptr": lists.order,
            "num_active_ptr": lists.num_active,
            "share_ptr": self._or_dummy(self.share),
            "groups": self.groups,
            "HAS_TAIL": self.share is not None,
        }
        self._listed(lists, {**common, **tail})
        if grad_weight is None and grad_bias is None:
            return
        slice_dims = 64
        unkept_kernel[(self.num_tiles,)](
            **stored,
            **tail,
            num_slices=1 if grad_weight is None else triton.cdiv(weight.shape[1], slice_dims),
            PRECISION=tail_precision,
            SLICE=slice_dims,
            num_warps=4,
        )

    def _inputs(self) -> dict[str, Any]:
        """Arguments of both backward kernels that are there before they run."""
        head, table = self.head, self.table
        dim = self.weight.shape[1]
        targets = self.tokens.local_targets.int()
        shape = list(self.hidden.shape), [self.hidden.stride(0), 1]
        block_k = table.backward_dims
        return {
            "hidden_ptr": self.hidden,
            "hidden_rows": self._described(self.hidden, *shape, TOKEN_BLOCK, block_k),
            "hidden_slices": self._described(self.hidden, *shape, block_k, table.slice_dims),
            "rows_ptr": self.layout.rows,
            "straight_ptr": self.layout.straight,
            "weight_ptr": self.weight,
            "bias_ptr": self._or_dummy(head.bias),
            "target_ptr": pad_tokens(targets, self.num_blocks * TOKEN_BLOCK, -1),
            "count_ptr": self.count,
            "pull_ptr": self.pull,
            "unit_ptr": self.unit,
            "num_blocks": self.num_blocks,
            "num_tiles": self.num_tiles,
            "stride_hn": self.hidden.stride(0),
            "stride_wv": self.weight.stride(0),
            "scale": head.logit_scale,
            "softcap": head.softcap or 1.0,
            "TOKENS": TOKEN_BLOCK,
            "SLICE": table.slice_dims,
            "BLOCK_K": block_k,
            "EVEN_K": dim % block_k == 0,
            "STAGES": table.backward_stages,
            "PRECISION": "ieee",
            "USE_TMA": self.layout.use_tma,
            "IS_INTERPRETED": interpreted(),
            "HAS_BIAS": head.bias is not None,
            "HAS_SOFTCAP": head.softcap is not None,
        }

    def _described(
        self, matrix: Tensor, shape: list[int], strides: list[int], rows: int, columns: int
    ) -> Any:
        """A descriptor of tiles of the matrix, or a pointer where nothing is read through one."""
        if not self.layout.use_tma:
            return matrix
        return TensorDescriptor(matrix, shape, strides, [rows, columns])

    def _rows_of(self, matrix: Tensor, rows: int, columns: int) -> Any:
        return self._described(matrix, list(matrix.shape), [matrix.stride(0), 1], rows, columns)

    @property
    def _programs(self) -> int:
        return num_programs(self.weight) * (1 if interpreted() else self.table.residents)

    def _every(self, common: dict[str, Any]) -> None:
        weight, table = self.weight, self.table
        room = self.workspace_bytes
        per_chunk = choose_tiles_per_chunk(weight, self.num_blocks, self.num_tiles, room)
        num_chunks = triton.cdiv(self.num_tiles, per_chunk)
        workspace = weight.new_empty(per_chunk * TILE * self.num_blocks, TOKEN_BLOCK)
        block_k = table.backward_dims
        exact_kernel[(self._programs,)](
            **common,
            blocks_ptr=self.layout.blocks,
            num_straight_ptr=self.layout.num_straight,
            num_blocks_ptr=self.layout.num_blocks,
            weight_tile=self._rows_of(weight, table.pair * TILE, block_k),
            weight_rows=self._rows_of(weight, block_k, table.slice_dims),
            workspace_ptr=workspace,
            workspace_rows=self._rows_of(workspace, block_k, TOKEN_BLOCK),
            workspace_columns=self._rows_of(workspace, TILE, block_k),
            queue_ptr=torch.zeros(2 * num_chunks + 1, dtype=torch.int32, device=weight.device),
            num_chunks=num_chunks,
            tiles_per_chunk=per_chunk,
            PAIR=table.pair,
            HAS_ENTROPY=self.has_entropy,
            HAS_SMOOTH=self.has_smooth,
        )

    def _listed(self, lists: Lists, common: dict[str, Any]) -> None:
        assert self.kept is not None
        weight, table, marks = self.weight, self.table, self.kept.marks
        segment = table.pair * TILE
        max_tasks = triton.cdiv(lists.max_rows, segment) + self.num_blocks

        def int32(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=weight.device)

        workspace = weight.new_empty(lists.max_rows, TOKEN_BLOCK)
        filtered_kernel[(self._programs,)](
            **common,
            seed_ptr=marks.seed,
            kept_ptr=marks.kept,
            drawn_ptr=marks.drawn,
            starts_ptr=lists.starts,
            blocks_ptr=lists.blocks,
            position_ptr=lists.position,
            num_straight_ptr=lists.num_straight,
            num_blocks_ptr=lists.num_blocks,
            first_ptr=lists.first,
            num_chunks_ptr=lists.num_chunks,
            base_ptr=lists.base,
            segment_ptr=lists.segment,
            entries_ptr=int32(2, lists.max_rows),
            place_ptr=torch.empty(
                2, lists.max_pairs, TILE, dtype=torch.uint8, device=weight.device
            ),
            pair_row_ptr=int32(2, lists.max_pairs),
            workspace_ptr=workspace,
            workspace_rows=self._rows_of(workspace, table.backward_dims, TOKEN_BLOCK),
            drawn_sum_ptr=weight.new_empty(max_tasks, TOKEN_BLOCK, dtype=torch.float32),
            drawn_total_ptr=self.drawn_total,
            queue_ptr=torch.zeros(
                2 * lists.max_chunks + 2, dtype=torch.int32, device=weight.device
            ),
            max_chunks=lists.max_chunks,
            max_rows=lists.max_rows,
            max_pairs=lists.max_pairs,
            words=marks.kept.shape[1],
            SEGMENT=segment,
            BLOCKS=lists.blocks_padded,
            HAS_DRAWN=lists.draws,
        )

    def finish_hidden(self, packed: Tensor, complete: bool) -> Tensor:
        """Adds the tail; `complete`: as hidden's rows and dtype, else packed [N, D] fp32."""
        num_tokens, dim = len(self.tokens), self.weight.shape[1]
        out = packed[:num_tokens]
        if complete:
            out = self.weight.new_empty(num_tokens, dim)
        block_d = 128
        spread_kernel[(self.num_blocks, triton.cdiv(dim, block_d))](
            packed,
            self._or_dummy(self.centroid),
            self.rows,
            self.count,
            self._or_dummy(None if self.lists is None else self.lists.num_chunks),
            self._or_dummy(self.tail_mass),
            self.drawn_total,
            self.unit,
            self._or_dummy(self.mean),
            out,
            num_tokens,
            dim,
            self.groups,
            self.tokens_per_group,
            BLOCK_N=TOKEN_BLOCK,
            BLOCK_D=block_d,
            HAS_TAIL=self.share is not None,
            HAS_DRAWN=self.lists is not None and self.lists.draws,
            HAS_MEAN=self.mean is not None,
            EVERY=self.lists is None,
            PERMUTE=complete,
        )
        return out
