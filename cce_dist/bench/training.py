"""Benchmark of whole training steps with this library's loss, the dense one and peers.

Every rank of the job runs this.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from cce_dist import LossOptions, VocabShard
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.data.batches import split_tokens
from cce_dist.train.data.tokens import prepare_tokens
from cce_dist.train.loop import Job, Run, start_run, train_step
from cce_dist.train.metrics import read_metrics, reset_peak_memory
from cce_dist.train.model.head import HeadLoss, head_loss_of
from cce_dist.train.progress import Display
from cce_dist.train.ranks import Ranks, connect, leave
from cce_dist.train.stop import StopRequest
from cce_dist.train.watch.heartbeat import Heartbeat

from .methods import METHODS, SCREENED, describe_failure
from .rank_methods import Place, Setup
from .report import Cells

LOSSES = ("cce", "dense")
# Keys of a config's `loss` that change the value of the loss.
OBJECTIVE = ("label_smoothing", "z_loss", "softcap", "logit_scale")
# Usable share of the device's memory; the rest is for NCCL's buffers and the allocator's gaps.
USABLE = 0.88
# Factor on a batch that did not fit: the allocator's free memory may be in pieces.
SHRINK = 0.92
GIB = 2**30
# The name "cce" means this library's loss here, so Apple's is "apple-cce".
RIVALS = {
    "apple-cce" if name == "cce" else name: method
    for name, method in METHODS.items()
    if method.origin == "peer" and method.alone
}
COLUMNS = (
    *("loss", "dp", "tp", "fsdp", "sequence_parallel"),
    *("batch", "tokens_a_step", "tokens_per_s", "last_loss", "peak_gib", "failed"),
)


def bench_training(
    config: TrainConfig,
    losses: Sequence[str],
    folder: Path,
    *,
    warmup: int,
    steps: int,
    largest: bool,
    save: Callable[[list[Cells], bool], None],
) -> None:
    """Measures each loss at the config's batch.

    With `largest` each loss also runs at twice the batch, and at about the largest batch that the
    device holds, found from the memory that both batches take.

    Args:
        save: called with all rows so far, and with whether this rank reports.

    Raises:
        ValueError: a loss is unknown or lacks an option of the config, or the config has a
            pipeline.
    """
    _check(config, losses)
    ranks = connect(config.parallel)
    display, stop = Display(False), StopRequest()
    heartbeat = Heartbeat(ranks, config.parallel.timeout_s, lambda: bool(stop))
    if ranks.is_main:
        prepare_tokens(config.data, print)
        ranks.store.set("text", "ready")
    # Poll: `wait` of the store would time out while a large vocabulary is trained.
    while not ranks.store.check(["text"]):
        time.sleep(0.1)
    cache = prepare_tokens(config.data, print)
    rows: list[Cells] = []
    for name in losses:
        peer = _peer_head(config, name) if name in RIVALS else None
        if isinstance(peer, str):
            rows.append(
                {**dict.fromkeys(COLUMNS), **layout_of(config, ranks, name), "failed": peer}
            )
            save(rows, ranks.is_main)
            continue
        batches = split_tokens(cache.tokens(), config, ranks.dp)
        job = Job(config, ranks, batches, cache.key, display, heartbeat, stop)
        run_folder = folder / f"{name}-dp{ranks.dp}-tp{ranks.tp}"
        run_folder.mkdir(parents=True, exist_ok=True)
        run = start_run(job, run_folder, "cce")
        if name == "dense":
            dense_head = _dense_head(config, ranks, run.model.shards["embedding"])
            run = dataclasses.replace(run, head="dense", head_loss=dense_head)
        elif peer is not None:
            run = dataclasses.replace(run, head=name, head_loss=peer)
        meter = Meter(job, run, name, cache.tokens())
        for row in meter.rows(warmup, steps, largest and ranks.device.type == "cuda"):
            rows.append(row)
            save(rows, ranks.is_main)
        del run, meter
        # Modules that FSDP has wrapped are in reference cycles.
        gc.collect()
        torch.cuda.empty_cache()
    leave(ranks)


def _check(config: TrainConfig, losses: Sequence[str]) -> None:
    unknown = sorted(set(losses) - {*LOSSES, *RIVALS})
    if unknown:
        raise ValueError(f"loss must be among {[*LOSSES, *RIVALS]}, got {unknown}")
    objective = {name: getattr(config.loss, name) for name in OBJECTIVE}
    others = [name for name in losses if name != "cce"]
    if others and any(value != getattr(LossOptions, name) for name, value in objective.items()):
        raise ValueError(
            f"keys {list(OBJECTIVE)} of loss must be left out with loss {others[0]}, which has "
            f"none of them, got {objective}"
        )
    peers = [name for name in losses if name in RIVALS]
    if peers and config.parallel.tp > 1:
        raise ValueError(
            f"loss {peers[0]} takes the whole vocabulary: parallel.tp must be 1, got "
            f"{config.parallel.tp}"
        )
    if config.parallel.pp > 1:
        raise ValueError(f"parallel.pp must be 1 in this benchmark, got {config.parallel.pp}")


def _peer_head(config: TrainConfig, name: str) -> HeadLoss | str:
    """Returns the peer's loss, or the reason why it cannot run here."""
    try:
        return head_loss_of(RIVALS[name].build(Setup()), getattr(torch, config.dtype))
    # A peer may raise anything, and raises the same on all ranks.
    except Exception as error:
        return describe_failure(error)


def _dense_head(config: TrainConfig, ranks: Ranks, shard: VocabShard) -> HeadLoss:
    """Returns the dense recipe over ranks that share the vocabulary, as in Megatron."""
    place = Place(ranks.tp_group, shard, config.parallel.sequence_parallel)
    return head_loss_of(METHODS["dense"].build(Setup(place=place)), getattr(torch, config.dtype))


class Meter:
    """Measurements of one model in training with varying batch."""

    def __init__(self, job: Job, run: Run, name: str, tokens: np.ndarray) -> None:
        self.job, self.run, self.name, self.tokens = job, run, name, tokens
        self.step = 0

    def rows(self, warmup: int, steps: int, largest: bool) -> Iterator[Cells]:
        batch = self.job.config.batch
        once = self.measure(batch, warmup, steps)
        yield once
        if not largest:
            return
        if dist.get_world_size() > 1:
            # Estimate first: a rank out of memory would leave the others waiting in a collective.
            most = self.most_that_fits(self.measure(self.round_down(batch / 2), 1, 1), once)
            if most < 2 * batch:
                if self.round_down(most) > batch:
                    yield self.measure(self.round_down(most), 2, 3)
                return
        twice = self.measure(2 * batch, 2, 3)
        yield twice
        most = self.most_that_fits(once, twice)
        largest_row = None
        # Stop at twice the config's batch, which is known to fit.
        while largest_row is None and most > 2 * batch:
            largest_row = self.measure_if_it_fits(self.round_down(most))
            most *= SHRINK
        if largest_row is not None:
            yield largest_row

    def most_that_fits(self, small: Cells, large: Cells) -> float:
        """Returns the batch that fits, by a line through the peaks of two batches.

        0: the larger batch took no more memory, so there is no such line.
        """
        each = (large["peak_gib"] - small["peak_gib"]) / max(large["batch"] - small["batch"], 1)
        if each <= 0:
            return 0.0
        room = USABLE * torch.cuda.get_device_properties(self.job.ranks.device).total_memory / GIB
        return small["batch"] + (room - small["peak_gib"]) / each

    def round_down(self, batch: float) -> int:
        """Rounds a batch down to a multiple that tensor-parallel ranks can share."""
        tp = self.job.config.parallel.tp
        return max(int(batch) // tp, 1) * tp

    def measure_if_it_fits(self, batch: int) -> Cells | None:
        try:
            return self.measure(batch, 2, 3)
        except torch.OutOfMemoryError:
            # The other ranks wait in a collective: only the end of this rank frees them.
            if dist.get_world_size() > 1:
                raise
        # Only now has the error's traceback released its tensors.
        gc.collect()
        return None

    def measure(self, batch: int, warmup: int, steps: int) -> Cells:
        # Never log: a logged step asks the loss for statistics.
        update = {"batch": batch, "steps": 10**6, "log_every": 10**6}
        config = self.job.config.model_copy(update=update)
        batches = split_tokens(self.tokens, config, self.job.ranks.dp)
        job = dataclasses.replace(self.job, config=config, batches=batches)
        torch.cuda.empty_cache()
        reset_peak_memory(job.ranks.device)
        for _ in range(warmup + steps):
            self.step += 1
            train_step(job, self.run, self.step)
        # The main rank writes the metrics of all ranks.
        gathered = [read_metrics(self.run.folder)[-steps:] if job.ranks.is_main else None]
        dist.broadcast_object_list(gathered)
        records = gathered[0]
        assert records is not None
        return {
            **layout_of(config, job.ranks, self.name),
            "batch": batch,
            "tokens_a_step": job.ranks.dp * batch * config.data.sequence_length,
            "tokens_per_s": statistics.median(x["tokens_per_s"] for x in records),
            "last_loss": f"{records[-1]['loss']:.4f}",
            "peak_gib": max(x["peak_memory"] for x in records) / GIB,
            "failed": "",
        }


def layout_of(config: TrainConfig, ranks: Ranks, name: str) -> Cells:
    """Returns the cells that begin every row; in a row, "cce" means Apple's loss."""
    ours = SCREENED if config.loss.logits == SCREENED else config.loss.gradient
    return {
        "loss": ours if name == "cce" else name.removeprefix("apple-"),
        "dp": ranks.dp,
        "tp": ranks.tp,
        "fsdp": "yes" if config.parallel.fsdp else "",
        "sequence_parallel": "yes" if config.parallel.sequence_parallel else "",
    }
