"""What a loss sees in a training run: hidden states, head and targets of held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cce_dist.train.batches import split_tokens
from cce_dist.train.config_file import load_config
from cce_dist.train.heartbeat import Heartbeat
from cce_dist.train.loop import Job, forward_body, start_run, train_step
from cce_dist.train.progress import Display
from cce_dist.train.ranks import connect
from cce_dist.train.stop import StopRequest
from cce_dist.train.tokens import prepare_tokens


def capture_inputs(
    config_path: Path, steps: Sequence[int], num_tokens: int, folder: Path
) -> list[Path]:
    """Train on one rank up to the last of `steps`; write folder/step-<n>.pt after each of them.

    Random inputs say nothing of a loss that skips negligible gradients.
    """
    config = load_config(
        config_path,
        [
            ("parallel.tp", "1"),
            ("parallel.sequence_parallel", "false"),
            ("steps", str(max(*steps, 1))),
        ],
    )
    ranks = connect(config.parallel)
    display, stop = Display(ranks.is_main), StopRequest()
    heartbeat = Heartbeat(ranks, config.parallel.timeout_s, lambda: bool(stop))
    cache = prepare_tokens(config.data, display.say)
    batches = split_tokens(cache.tokens(), config)
    job = Job(config, ranks, batches, cache.key, display, heartbeat, stop)
    folder.mkdir(parents=True, exist_ok=True)
    run = start_run(job, folder, "cce")
    written = []
    with display.training("capture", 0, config.steps):
        for step in range(max(steps) + 1):
            if step:
                train_step(job, run, step)
            if step in steps:
                written.append(_save(job, run, num_tokens, folder / f"step-{step}.pt"))
    return written


@torch.no_grad()
def _save(job: Job, run, num_tokens: int, path: Path) -> Path:
    length = job.config.data.sequence_length
    held_out = torch.from_numpy(job.batches.held_out[: num_tokens + 1].astype("int64"))
    num_tokens = min(num_tokens, len(held_out) - 1) // length * length
    ids, targets = held_out[:num_tokens].view(-1, length), held_out[1 : num_tokens + 1]
    hidden = torch.cat([forward_body(run.model, part, job.config) for part in ids.split(8)])
    weight = run.model.head_weight.detach()
    torch.save({"hidden": hidden.clone(), "weight": weight.clone(), "targets": targets}, path)
    return path
