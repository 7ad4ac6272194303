"""A model of Megatron's on two stages, and its schedule."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

import megatron_patch
from tests.megatron.megatron_jobs import build, forward_step, make_config, microbatch
from tests.megatron.megatron_setup import BATCH, SEQUENCE, Setup

SETUP = Setup(pp=2)
OPTIONS: dict[str, Any] = {"vocab_over_pipeline": True, "gradient": "exact", "backend": "torch"}


def make(setup: Setup = SETUP, *, ours: bool = True) -> Any:
    with megatron_patch.patched(**OPTIONS) if ours else nullcontext():
        return build(setup, make_config(setup))[0]


def is_last() -> bool:
    return dist.get_rank() == 1


def schedule(model: Any, step: Any = forward_step, **given: Any) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([microbatch(i, SETUP) for i in range(2)]),
        model=[model],
        **{
            "num_microbatches": 2,
            "seq_length": SEQUENCE,
            "micro_batch_size": BATCH,
            "forward_only": True,
            **given,
        },
    )
