"""Trains one model with any loss, from the same first weights on the same batches."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.converge.text import Text, evaluate
from benchmarks.evidence.records import Cell
from cce_dist import LossOutput
from cce_dist.bench.golden import LossFunction
from cce_dist.bench.methods import describe_failure
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.loop import Job, Run, start_run, train_step
from cce_dist.train.metrics import peak_memory_bytes, reset_peak_memory
from cce_dist.train.model.head import head_loss_of
from cce_dist.train.optimizer import make_optimizer
from cce_dist.train.progress import Display
from cce_dist.train.ranks import Ranks
from cce_dist.train.stop import StopRequest
from cce_dist.train.watch.heartbeat import Heartbeat

GIB = 2**30
Cells = dict[str, Cell]


class Trainer:
    """The runs of one group, which differ in the loss alone.

    Args:
        marks: steps after which held-out text is evaluated, the last step among them.
        about: cells that every row begins with.
        data_key: names the text.
    """

    def __init__(
        self,
        config: TrainConfig,
        marks: Sequence[int],
        text: Text,
        about: Mapping[str, Cell],
        data_key: str,
        ranks: Ranks,
    ) -> None:
        self.config, self.marks, self.text, self.about = config, marks, text, about
        self.ranks = ranks
        stop = StopRequest()
        # The heartbeat is never started: a single rank waits for nobody.
        heartbeat = Heartbeat(ranks, config.parallel.timeout_s, lambda: bool(stop))
        batches = text.batches(config)
        self.job = Job(config, ranks, batches, data_key, Display(False), heartbeat, stop)
        self.run_of_model = start_run(self.job, Path(), "cce")
        self.start_with(self.run_of_model.model.state_dict())

    def start_with(self, weights: Mapping[str, Tensor]) -> None:
        """Makes `weights` the first weights of every later run."""
        self.initial = {name: value.clone() for name, value in weights.items()}

    def run(self, method: str, build: Callable[[], LossFunction]) -> list[Cells]:
        """Trains one run; returns a row of part "curve" for each evaluation, and one of part "run".

        With screened logits the last row has `screened_share`: the share of the steps whose logits
        were screened. A failed run has one row of part "run", whose `failed` says why.
        """
        about = {**self.about, "method": method}
        try:
            return self._train(about, head_loss_of(build(), getattr(torch, self.config.dtype)))
        # A peer may raise anything, this version may refuse an option, and a loss may diverge.
        except Exception as error:
            return [{**about, "part": "run", "failed": describe_failure(error)}]

    def _train(self, about: Cells, head_loss: Callable[..., LossOutput]) -> list[Cells]:
        config, device = self.config, self.ranks.device
        model = self.run_of_model.decoder
        model.load_state_dict(self.initial)
        torch.manual_seed(config.run.seed)
        reset_peak_memory(device)
        rows, seconds = [], []
        screened: list[Tensor] = []

        def counting_loss(*inputs: Any) -> LossOutput:
            output = head_loss(*inputs)
            if output.screened is not None:
                screened.append(output.screened.all())
            return output

        with tempfile.TemporaryDirectory() as folder:
            run = dataclasses.replace(
                self.run_of_model,
                folder=Path(folder),
                # The name "cce" would ask the loss for statistics.
                head=str(about["method"]),
                head_loss=counting_loss,
                optimizer=make_optimizer(model, config.optimizer, device),
            )
            for step in range(config.steps + 1):
                if step:
                    seconds.append(self._timed_step(run, step))
                if step in self.marks:
                    nats = evaluate(model, self.text, config, self.ranks)
                    rows.append({**about, "part": "curve", "step": step, **nats})
        timing: Cells = {
            "text": self.job.data_key,
            "steps": config.steps,
            "tokens": config.steps * config.batch * config.data.sequence_length,
            "seconds": sum(seconds),
            "median_step_ms": 1e3 * statistics.median(seconds),
            # On a CPU the peak would be the whole process's since its start.
            "peak_gib": peak_memory_bytes(device) / GIB if device.type == "cuda" else None,
        }
        if screened:
            timing["screened_share"] = float(torch.stack(screened).float().mean())
        return [*rows, {**about, "part": "run", **timing}]

    def _timed_step(self, run: Run, step: int) -> float:
        """Runs one step and returns its seconds; the step waits for the device before its update.

        On a CPU the seconds are CPU time of all threads: other processes may run beside this one.
        """
        clock = time.perf_counter if self.ranks.device.type == "cuda" else time.process_time
        started = clock()
        train_step(self.job, run, step)
        return clock() - started
