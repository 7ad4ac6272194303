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

from cce_dist.kernels.backward import backward_kernel
from cce_dist.kernels.dds import unkept_kernel
from cce_dist.kernels.spread import spread_kernel
from cce_dist.kernels.tail import token_sums_kernel
from cce_dist.local_triton_inputs import (
    for_kernels,
    pad_tokens,
    padded_dim,
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
    run = Backward.of(tokens, head, lse, target_logit, upstream, entropy, kept, workspace_bytes)
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
    tiles_per_chunk: int
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
        workspace_bytes: int,
    ) -> Backward:
        head = for_kernels(head)
        weight = head.weight
        rows, count = rows_of(tokens)
        num_blocks = triton.cdiv(len(tokens), TOKEN_BLOCK)
        num_tiles = triton.cdiv(weight.shape[0], TILE)
        hidden = with_unit_inner_stride(tokens.hidden)
        layout = Layout.of(hidden, weight, rows, count, num_blocks)
        state = 0 if kept is None else kept.marks.num_bytes
        per_chunk = choose_tiles_per_chunk(weight, num_blocks, num_tiles, workspace_bytes - state)
        lists = None
        if kept is not None:
            lists = Lists.of(kept.marks, layout, num_blocks, num_tiles, per_chunk)
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
            tiles_per_chunk=per_chunk,
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
        self.centroid, inverse = centroids(self.head, self.weight, self.share, with_mean=with_mean)
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
        """SDD, DSD, DDS over the chunks that hold a kept column, then the columns beyond."""
        table, weight, head, lists = self.table, self.weight, self.head, self.lists
        num_columns, dim = weight.shape
        num_chunks = triton.cdiv(self.num_tiles, self.tiles_per_chunk)
        queue = torch.zeros(2 * num_chunks + 2, dtype=torch.int32, device=weight.device)
        # The tail's shares and sums are fp32; tf32 keeps more digits than the 16-bit inputs have.
        tail_precision = "tf32" if weight.element_size() == 2 else "ieee"
        common = {
            "order_ptr": self._or_dummy(None if lists is None else lists.order),
            "num_active_ptr": self._or_dummy(None if lists is None else lists.num_active),
            "share_ptr": self._or_dummy(self.share),
            "class_weight_ptr": self._or_dummy(head.class_weight),
            "tail_ptr": self._or_dummy(self.sums),
            "tail_bias_ptr": self._or_dummy(self.bias_sums),
            "grad_weight_ptr": self._or_dummy(grad_weight),
            "grad_bias_ptr": self._or_dummy(grad_bias),
            "V": num_columns,
            "D": dim,
            "tiles_per_chunk": self.tiles_per_chunk,
            "groups": self.groups,
            "stride_gv": 0 if grad_weight is None else grad_weight.stride(0),
            "TILE": TILE,
            "GROUPS": GROUPS,
            "HAS_TAIL": self.share is not None,
            "HAS_MEAN": self.mean is not None,
            "HAS_CLASS_WEIGHT": head.class_weight is not None,
            "HAS_GRAD_WEIGHT": grad_weight is not None,
            "HAS_GRAD_BIAS": grad_bias is not None,
            "ACCUMULATE": accumulate,
        }
        backward_kernel[(num_programs(weight),)](
            **common,
            **self._inputs(),
            **self._workspace(gathers=lists is not None and grad_hidden is not None),
            grad_hidden_ptr=self._or_dummy(grad_hidden),
            queue_ptr=queue,
            num_chunks=num_chunks,
            TAIL_PRECISION=tail_precision,
            SLICE=table.slice_dims,
            HAS_GRAD_HIDDEN=grad_hidden is not None,
            num_warps=table.warps,
            **({} if interpreted() else {"launch_cooperative_grid": True}),
        )
        if lists is None or (grad_weight is None and grad_bias is None):
            return
        slice_dims = 64
        slices = 1 if grad_weight is None else triton.cdiv(dim, slice_dims)
        unkept_kernel[(self.num_tiles,)](
            **common, num_slices=slices, PRECISION=tail_precision, SLICE=slice_dims, num_warps=4
        )

    def _inputs(self) -> dict[str, Any]:
        """Arguments of the backward kernel that are there before it runs."""
        head, table, lists = self.head, self.table, self.lists
        listed = ("bits", "tile_bits", "tiles", "start")
        of_tiles: Lists | Layout = self.layout if lists is None else lists
        return {
            "hidden_ptr": self.hidden,
            "rows_ptr": self.layout.rows,
            "straight_ptr": self.layout.straight,
            "blocks_ptr": of_tiles.blocks,
            "num_straight_ptr": of_tiles.num_straight,
            "num_blocks_ptr": of_tiles.num_blocks,
            "stride_bt": 0 if lists is None else self.num_blocks,
            "weight_ptr": self.weight,
            "bias_ptr": self._or_dummy(head.bias),
            "place_ptr": self._places(),
            "count_ptr": self.count,
            "pull_ptr": self.pull,
            "unit_ptr": self.unit,
            **{
                f"{name}_ptr": self._or_dummy(None if lists is None else getattr(lists, name))
                for name in listed
            },
            "num_blocks": self.num_blocks,
            "num_tiles": self.num_tiles,
            "words": 1 if lists is None else lists.bits.shape[1],
            "stride_hn": self.hidden.stride(0),
            "stride_wv": self.weight.stride(0),
            "scale": head.logit_scale,
            "softcap": head.softcap or 1.0,
            "TOKENS": TOKEN_BLOCK,
            "PAIR": table.pair,
            "BLOCK_K": table.backward_dims,
            "EVEN_K": self.weight.shape[1] % table.backward_dims == 0,
            "STAGES": table.backward_stages,
            "PRECISION": "ieee",
            "IS_INTERPRETED": interpreted(),
            "EVERY": lists is None,
            "HAS_BIAS": head.bias is not None,
            "HAS_SOFTCAP": head.softcap is not None,
            "HAS_ENTROPY": self.has_entropy,
            "HAS_SMOOTH": self.has_smooth,
        }

    def _places(self) -> Tensor:
        """Where in the order of columns each token's target stands: [num_blocks * 128] int32."""
        targets = self.tokens.local_targets
        if self.lists is None:
            places = targets.int()
        else:
            places = self.lists.rank[targets.clamp_min(0)].masked_fill(targets < 0, -1)
        return pad_tokens(places, self.num_blocks * TOKEN_BLOCK, -1)

    def _workspace(self, *, gathers: bool) -> dict[str, Any]:
        """The chunk's d_logits and rows of the weight, and how the products read them."""
        weight, table = self.weight, self.table
        use_tma = self.layout.use_tma
        columns = self.tiles_per_chunk * TILE
        workspace = weight.new_empty(columns * self.num_blocks, TOKEN_BLOCK)
        gathered = workspace
        stride = 0
        if gathers and use_tma:
            stride = padded_dim(weight)
            gathered = weight.new_empty(columns, stride)
        found = {
            "workspace_ptr": workspace,
            "gathered_ptr": gathered,
            "stride_cd": stride,
            "USE_TMA": use_tma,
        }
        names = ("weight_tile", "columns_rows", "workspace_rows", "workspace_columns")
        names += ("hidden_rows", "hidden_slices")
        if not use_tma:
            return found | dict.fromkeys(names, workspace)
        dim = weight.shape[1]
        rows_of_weight = [columns, dim], [stride, 1]
        if not gathers:
            gathered, rows_of_weight = weight, (list(weight.shape), [weight.stride(0), 1])
        block_k, tokens = table.backward_dims, TOKEN_BLOCK
        rows_of_hidden = list(self.hidden.shape), [self.hidden.stride(0), 1]
        return found | {
            "hidden_rows": TensorDescriptor(self.hidden, *rows_of_hidden, [tokens, block_k]),
            "hidden_slices": TensorDescriptor(
                self.hidden, *rows_of_hidden, [block_k, table.slice_dims]
            ),
            "weight_tile": TensorDescriptor(
                weight, list(weight.shape), [weight.stride(0), 1], [table.pair * TILE, block_k]
            ),
            "columns_rows": TensorDescriptor(
                gathered, *rows_of_weight, [block_k, table.slice_dims]
            ),
            "workspace_rows": TensorDescriptor(
                workspace, list(workspace.shape), [tokens, 1], [block_k, tokens]
            ),
            "workspace_columns": TensorDescriptor(
                workspace, list(workspace.shape), [tokens, 1], [TILE, block_k]
            ),
        }

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
            self._or_dummy(None if self.lists is None else self.lists.num_active),
            self._or_dummy(self.tail_mass),
            self._or_dummy(self.mean),
            out,
            num_tokens,
            dim,
            self.groups,
            self.tokens_per_group,
            BLOCK_N=TOKEN_BLOCK,
            BLOCK_D=block_d,
            HAS_TAIL=self.share is not None,
            HAS_MEAN=self.mean is not None,
            EVERY=self.lists is None,
            PERMUTE=complete,
        )
        return out
