"""Runs of training that a command appends to a record, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from benchmarks.converge.converge import Work
    from benchmarks.converge.plan import Sizes
    from cce_dist.train.ranks import Ranks

SequenceLength = Annotated[int, typer.Option(min=2)]
Evaluations = Annotated[int, typer.Option(min=1, help="Number, at even distances.")]
Warmup = Annotated[int, typer.Option(min=0, help="Steps of warmup.")]
Megabytes = Annotated[float, typer.Option(min=0, help="Size of the text.")]
Data = Annotated[
    list[Path] | None,
    typer.Option(help="A file, folder or JSONL; may be repeated. [the Python installation]"),
]
Slice = Annotated[
    str, typer.Option("--slice", help="K/N: this process is the K-th of N, from 0 on.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Repeat failed runs.")]
PrepareOnly = Annotated[
    bool, typer.Option("--prepare", help="Make only the token ids, which takes no GPU.")
]
RecordFile = Annotated[Path, typer.Option(help="File that gets each finished run.")]
Title = Annotated[str, typer.Option(help="The record's title.")]
Cache = Annotated[Path, typer.Option(help="Folder of token ids and trained weights.")]


def prepare_work(work: Work[Any, Any], sizes: Sizes, starts: Sequence[str]) -> None:
    """Makes the token ids of each vocabulary, and says where they are."""
    from benchmarks.converge.converge import prepare

    for vocab_size in work.plan.vocab_sizes:
        vocabulary = prepare(work, sizes, vocab_size, starts, typer.echo)
        typer.echo(f"V={vocab_size}: {work.cache / vocabulary.key}")


def train_work(work: Work[Any, Any], train: Callable[[Ranks], None]) -> bool:
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
