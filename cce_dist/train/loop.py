"""The training loop: a run from its first step, or the step after a checkpoint, to its last.

    ids -> Decoder (embedding sharded, body replicated or FSDP) -> hidden -> head loss (sharded)
        -> backward -> sync_gradients -> agree (norm, loss, stop) -> clip -> AdamW

With a pipeline, `Pipeline.step` (pipeline/step.py) does all up to the backward. Read this first.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist import LossOptions, LossOutput
from cce_dist.core.phases import in_phase
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.data.batches import Batches
from cce_dist.train.model.decoder import Decoder, initialize
from cce_dist.train.model.fsdp import place
from cce_dist.train.model.head import HeadLoss, Stat, head_layout, make_head_loss
from cce_dist.train.watch.heartbeat import Heartbeat

from .checkpoint import check_resumable, load_checkpoint, newest_checkpoint, save_checkpoint
from .errors import JobError
from .metrics import append_metrics, peak_memory_bytes, reset_peak_memory, truncate_metrics
from .optimizer import (
    StepTotals,
    agree,
    clip_gradients,
    learning_rate,
    make_optimizer,
    sync_gradients,
)
from .progress import Display, StepRecord
from .ranks import Ranks
from .stop import StopRequest

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from cce_dist.train.pipeline.step import Pipeline


@dataclass(frozen=True)
class Job:
    """The state that a job's runs share."""

    config: TrainConfig
    ranks: Ranks
    batches: Batches
    data_key: str
    display: Display
    heartbeat: Heartbeat
    stop: StopRequest


@dataclass(frozen=True)
class Run:
    """A model in training.

    Args:
        head: "cce", or "dense" for the comparison.
        head_loss: the loss; with a pipeline that of its last stage.
        pipeline: runs the model; None: the run has no pipeline.
        events: TensorBoard's, on the main rank; None: the run does not log to TensorBoard.
    """

    folder: Path
    head: str
    model: Decoder
    optimizer: torch.optim.Optimizer
    head_loss: HeadLoss
    pipeline: Pipeline | None = None
    events: SummaryWriter | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def start_run(job: Job, folder: Path, head: str) -> Run:
    config, ranks = job.config, job.ranks
    model, pipeline = Decoder(config, ranks, config.layout(head)), None
    initialize(model, config.run.seed)
    place(model, config, ranks)
    if ranks.pp > 1:
        # A local import: torch.distributed.pipelining imports torch's compiler.
        from cce_dist.train.pipeline.step import Pipeline

        pipeline = Pipeline(config, ranks, model, head)
    torch.manual_seed(config.run.seed)
    optimizer = make_optimizer(model, config.optimizer, ranks.device)
    head_loss = make_head_loss(config, head_layout(config, ranks), head)
    return Run(folder, head, model, optimizer, head_loss, pipeline)


def resume_run(job: Job, run: Run) -> int:
    """Loads the newest checkpoint, if there is one; returns its step, or 0."""
    checkpoint = newest_checkpoint(run.checkpoints)
    step = 0
    if checkpoint is not None:
        check_resumable(checkpoint, job.config, job.ranks.dp)
        job.heartbeat.place.phase = "loading a checkpoint"
        load_checkpoint(checkpoint, run.model, run.optimizer, job.ranks)
        step = checkpoint.step
    if job.ranks.is_main:
        truncate_metrics(run.folder, step)
    job.display.say(f"resuming {run.folder} after step {step}")
    return step


def train(job: Job, run: Run, start: int) -> bool:
    """Trains from the step after `start`; True when done, False when stopped by a signal."""
    config = job.config
    reset_peak_memory(job.ranks.device)
    title = f"{config.run.name} ({run.head})"
    with job.stop.listening(), job.display.training(title, start, config.steps):
        for step in range(start + 1, config.steps + 1):
            stop = train_step(job, run, step)
            every = config.checkpoint.every
            if stop or step == config.steps or (every and step % every == 0):
                save_checkpoint(
                    run.checkpoints, step, run.model, run.optimizer, job.ranks, job.data_key
                )
            if stop and step < config.steps:
                job.display.say(
                    f"stopped after step {step}; checkpoint in {run.checkpoints}: start the same "
                    "command with --resume to continue"
                )
                return False
    return True


def train_step(job: Job, run: Run, step: int) -> bool:
    """Trains a step and writes it to metrics.jsonl; returns True if any rank was asked to stop."""
    config, ranks = job.config, job.ranks
    job.heartbeat.place.phase, job.heartbeat.place.step = "training", step
    started = time.perf_counter()
    is_log_step = step % config.log_every == 0 or step in (1, config.steps)
    ids, targets = job.batches.step(step, ranks.dp_rank, ranks.dp)
    ids, targets = ids.to(ranks.device), targets.to(ranks.device)
    if run.pipeline is not None:
        with in_phase("forward and backward"):
            out = LossOutput(loss=run.pipeline.step(ids, targets))
    else:
        stats = stats_of(config.loss) if is_log_step and run.head == "cce" else ()
        with in_phase("forward"):
            out = run.model(ids, lambda x, w: run.head_loss(x, w, targets.flatten(), stats))
        with in_phase("backward"):
            out.loss.backward()
    with in_phase("update"):
        totals, lr = update(job, run, step, out.loss / (ranks.dp * ranks.tp))
    if ranks.is_main:
        seconds = time.perf_counter() - started
        record = StepRecord(
            step=step,
            loss=totals.loss,
            tokens_per_s=ranks.dp * targets.numel() / seconds,
            peak_memory=max(totals.peaks),
            lr=lr,
            grad_norm=totals.grad_norm,
            peak_memory_of_pp=None if run.pipeline is None else ranks.largest_of_pp(totals.peaks),
            tail_mass=None if out.tail_mass is None else float(out.tail_mass.mean()),
            screened=None if out.screened is None else bool(out.screened.all()),
        )
        append_metrics(run.folder, record, run.events)
        job.display.step(record, config.steps, is_log_step)
    return totals.stop


def stats_of(options: LossOptions) -> tuple[Stat, ...]:
    """Returns the statistics that a logged step asks of the loss."""
    wanted: dict[Stat, bool] = {
        "tail_mass": options.gradient == "filtered",
        "screened": options.logits == "screened",
    }
    return tuple(stat for stat, is_wanted in wanted.items() if is_wanted)


def update(job: Job, run: Run, step: int, loss: Tensor) -> tuple[StepTotals, float]:
    """Sums the gradients over ranks and updates the parameters.

    Returns: the totals over all ranks; the learning rate.
    """
    config, ranks = job.config, job.ranks
    sync_gradients(run.model, ranks, sequence_parallel=config.parallel.sequence_parallel)
    peak_memory = peak_memory_bytes(ranks.device)
    totals = agree(run.model, ranks, loss, bool(job.stop), peak_memory, step)
    _require_finite(totals, step, config)
    clip_gradients(run.model, totals.grad_norm, config.optimizer.clip)
    lr = learning_rate(step, config)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return totals, lr


def _require_finite(totals: StepTotals, step: int, config: TrainConfig) -> None:
    if not math.isfinite(totals.loss) or not math.isfinite(totals.grad_norm):
        raise JobError(
            f"step {step} must give a finite loss and gradient norm, got loss={totals.loss} and "
            f"gradient norm={totals.grad_norm}: lower optimizer.lr (now {config.optimizer.lr}) or "
            "lengthen optimizer.warmup; --resume goes back to the last checkpoint"
        )
