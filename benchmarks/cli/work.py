"""Runs of training that a command appends to a record, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from benchmarks.converge.converge import Vocabulary, Work
    from benchmarks.distillation.students import StudentWork
    from cce_dist.train.ranks import Ranks


def prepare_work(work: Work | StudentWork, prepare: Callable[[int], Vocabulary]) -> None:
    """Makes the token ids of each vocabulary, and says where they are."""
    for vocab_size in work.plan.vocab_sizes:
        vocabulary = prepare(vocab_size)
        typer.echo(f"V={vocab_size}: {work.cache / vocabulary.key}")


def train_work(work: Work | StudentWork, train: Callable[[Ranks], None]) -> bool:
    """Trains the runs that the record lacks; tells whether the device lasted.

    Args: train: trains and records them, in a job of one rank.
    Raises:
        ConfigError, ValueError: the text cannot be used, or the record's file belongs to another
            measurement.
    """
    import torch

    from cce_dist.bench.methods import DeviceLostError
    from cce_dist.train.config.schema import ParallelConfig
    from cce_dist.train.ranks import connect, leave

    try:
        ranks = connect(ParallelConfig())
        # Joining the job takes every core: give back those that were not asked for.
        torch.set_num_threads(int(work.record.machine["threads"]))
        train(ranks)
    except DeviceLostError as error:
        typer.echo(f"the device was lost in {error}; the same command again goes on", err=True)
        return False
    leave(ranks)
    typer.echo(f"written: {work.folder / work.record.name}.json")
    return True
