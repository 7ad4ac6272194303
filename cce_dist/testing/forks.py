"""Processes that need not import torch: forks of one that has, and has done nothing else."""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing.context import ForkServerContext

# What ranks of any kind import, and what torch.optim, torch.distributed.checkpoint, torch.compile
# and Megatron's modules import when they are first used. Those not installed are left out.
IMPORTED = (
    "cce_dist.cli",
    "cce_dist.testing",
    "cce_dist.train.job",
    "cce_dist.train.pipeline_report",
    "matplotlib.backends.backend_agg",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint._fsspec_filesystem",
)


@functools.cache
def fork_context() -> ForkServerContext:
    """Of multiprocessing: a process starts in 0.1 s; a spawned one imports for 1.5 s or more.

    The server starts with the first process, from the environment of that moment. It has no
    threads, and what tests have replaced in this process is not so there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context
