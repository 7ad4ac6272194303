"""The arguments of one call of Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Arguments:
    """The arguments of forward_backward_pipelining_without_interleaving, with its defaults."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Any = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    grad_finalize_pgs: Any = None
    force_all_reduce: bool = False
