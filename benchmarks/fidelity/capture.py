"""Inputs of the loss in a training run: hidden states, head and targets of held-out text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cce_dist.bench.golden import dense_loss
from cce_dist.train.config.load import load_config
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.data.batches import split_tokens
from cce_dist.train.data.tokens import prepare_tokens
from cce_dist.train.loop import Job, Run, start_run, train_step
from cce_dist.train.model.head import head_loss_of
from cce_dist.train.progress import Display
from cce_dist.train.ranks import connect
from cce_dist.train.stop import StopRequest
from cce_dist.train.watch.heartbeat import Heartbeat

HEAD_DIM = 128  # of an attention head


def load_capture_config(path: Path, steps: int) -> TrainConfig:
    """Returns a config of `cce-dist train`, changed to one rank and `steps` steps."""
    overrides = {"parallel.tp": "1", "parallel.sequence_parallel": "false", "steps": str(steps)}
    return load_config(path, list(overrides.items()))


def make_capture_config(
    vocab_size: int,
    dim: int,
    layers: int,
    megabytes: float,
    cache: Path,
    *,
    steps: int,
    batch: int = 16,
    sequence_length: int = 1024,
) -> TrainConfig:
    """Returns the config of a decoder with tied embedding, in bf16 if there is a GPU.

    The learning rate is constant: a run that is bounded in seconds does not know its last step.

    Raises:
        ValueError: dim is no multiple of 2, or from 256 on no multiple of 256.
    """
    heads = max(1, dim // HEAD_DIM)
    if dim % (2 * heads):
        raise ValueError(f"dim must be a multiple of 2 * {heads} heads, got {dim}")
    values = {
        "data": {
            "vocab_size": vocab_size,
            "megabytes": megabytes,
            "sequence_length": sequence_length,
            "cache": cache,
        },
        "model": {"dim": dim, "layers": layers, "heads": heads, "tied": True},
        "optimizer": {"lr": 6e-4, "warmup": 100, "schedule": "constant"},
        "steps": steps,
        "batch": batch,
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
    }
    return TrainConfig.model_validate(values)


def capture_inputs(
    config: TrainConfig,
    steps: Sequence[int],
    num_tokens: int,
    folder: Path,
    *,
    seconds: float | None = None,
) -> list[Path]:
    """Trains on one rank; writes folder/step-<n>.pt after each of `steps`, in the training dtype.

    Training ends after the last of `steps`. With `seconds`, it ends at the first step that ends
    after so many seconds; that step is written too. The model trains with the dense recipe, so
    that the captured inputs do not depend on the losses that they measure. Random inputs would say
    nothing about a loss that skips negligible gradients.
    """
    ranks = connect(config.parallel)
    display, stop = Display(ranks.is_main), StopRequest()
    heartbeat = Heartbeat(ranks, config.parallel.timeout_s, lambda: bool(stop))
    cache = prepare_tokens(config.data, display.say)
    batches = split_tokens(cache.tokens(), config, ranks.dp)
    job = Job(config, ranks, batches, cache.key, display, heartbeat, stop)
    folder.mkdir(parents=True, exist_ok=True)
    # In eager mode the fp32 copies of the logits alone would take three quarters of the time.
    function = torch.compile(dense_loss) if torch.cuda.is_available() else dense_loss
    head_loss = head_loss_of(function, getattr(torch, config.dtype))
    run = dataclasses.replace(start_run(job, folder, "dense"), head_loss=head_loss)
    counts = torch.from_numpy(np.bincount(batches.train, minlength=config.data.vocab_size))
    started, written, step = time.perf_counter(), [], 0
    with display.training("capture", 0, config.steps):
        while True:
            late = seconds is not None and time.perf_counter() - started > seconds
            last = late or (seconds is None and step == max(steps))
            if step in steps or last:
                path = folder / f"step-{step}.pt"
                about = {"token_counts": counts, "training": {"step": step, **_describe(job)}}
                torch.save({**about, **_tensors(job, run, num_tokens)}, path)
                written.append(path)
            if last:
                return written
            step += 1
            train_step(job, run, step)


def _describe(job: Job) -> dict[str, int | float | bool]:
    config = job.config
    return {
        "seed": config.run.seed,
        "layers": config.model.layers,
        "tied": config.model.tied,
        "batch": config.batch,
        "sequence_length": config.data.sequence_length,
        "lr": config.optimizer.lr,
        "text_tokens": len(job.batches.train),
    }


@torch.no_grad()
def _tensors(job: Job, run: Run, num_tokens: int) -> dict[str, Tensor]:
    length = job.config.data.sequence_length
    held_out = torch.from_numpy(job.batches.held_out[: num_tokens + 1].astype("int64"))
    num_tokens = min(num_tokens, len(held_out) - 1) // length * length
    ids, targets = held_out[:num_tokens].view(-1, length), held_out[1 : num_tokens + 1]
    device, dtype = job.ranks.device, getattr(torch, job.config.dtype)
    hidden = [run.model(some_ids.to(device)) for some_ids in ids.split(8)]
    return {
        "hidden": torch.cat(hidden).to(dtype).cpu(),
        "weight": run.model.head_weight.detach().to(dtype).cpu(),
        "targets": targets,
    }
