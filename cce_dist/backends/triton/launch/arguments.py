"""Tensors in the form that kernels take: strides, padding, descriptors."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist.core.types import Head, Tokens


def with_unit_inner_stride(matrix: Tensor) -> Tensor:
    """Returns the matrix itself, or a contiguous copy if the elements of a row lie apart."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def padded_dim(matrix: Tensor) -> int:
    """Rounds D up to 16 bytes, as descriptors need."""
    multiple = 16 // matrix.element_size()
    return triton.cdiv(matrix.shape[1], multiple) * multiple


def pad_tokens(values: Tensor, size: int, fill: float) -> Tensor:
    """Pads [..., N] to [..., size]."""
    short = size - values.shape[-1]
    return torch.nn.functional.pad(values, (0, short), value=fill) if short else values


def for_kernels(head: Head) -> Head:
    """Returns the head with contiguous vectors and fp32 class weights, as kernels read them."""
    bias, class_weight = head.bias, head.class_weight
    return replace(
        head,
        weight=with_unit_inner_stride(head.weight),
        bias=None if bias is None else bias.contiguous(),
        class_weight=None if class_weight is None else class_weight.float().contiguous(),
    )


def rows_of(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Returns the tokens' rows of hidden, [N] int64, where tokens that count come first, and the
    number of those, [1] int32."""
    device = tokens.local_targets.device
    rows, count = tokens.rows, tokens.count
    if rows is None:
        rows = torch.arange(len(tokens), device=device)
    if count is None:
        count = torch.full((1,), len(tokens), dtype=torch.int32, device=device)
    return rows, count


def descriptor_of(matrix: Tensor, rows: int, columns: int, use_tma: bool) -> Any:
    """Returns a descriptor of the matrix for tiles of [rows, columns], or the matrix itself if the
    kernel takes a pointer."""
    if not use_tma:
        return matrix
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])
