"""Trains the same models with one loss after another, so that only the loss can differ.

Every run of a group has the same first weights and the same batches in the same order.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from benchmarks.converge.plan import CHECKPOINT_SEED, Group, Plan, Sizes, builders
from benchmarks.converge.text import Text, evaluate, texts_of
from benchmarks.evidence.records import Cell, Record, append_rows, locked, read_record
from cce_dist import LossOutput
from cce_dist.bench.golden import LossFunction
from cce_dist.bench.methods import describe_failure, recover
from cce_dist.bench.training import GIB
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.data.batches import Batches
from cce_dist.train.data.tokens import prepare_tokens
from cce_dist.train.errors import JobError
from cce_dist.train.loop import Job, start_run, train_step
from cce_dist.train.metrics import peak_memory_bytes, reset_peak_memory
from cce_dist.train.model.decoder import Decoder
from cce_dist.train.model.head import head_loss_of
from cce_dist.train.optimizer import make_optimizer
from cce_dist.train.progress import Display
from cce_dist.train.ranks import Ranks
from cce_dist.train.stop import StopRequest
from cce_dist.train.watch.heartbeat import Heartbeat

Cells = dict[str, Cell]
Say = Callable[[str], None]
AnyPlan = TypeVar("AnyPlan")
AnySizes = TypeVar("AnySizes")


@dataclass(frozen=True)
class Work(Generic[AnyPlan, AnySizes]):
    """Everything that one command trains, and the files that it reads and writes.

    Args:
        record: a record without rows; its file in `folder` gets the rows of each finished run.
        cache: folder of token ids and checkpoints, which are made once.
        paths: text; empty: the text of the Python installation.
    Raises:
        ValueError: `folder` is `cache`.
    """

    plan: AnyPlan
    sizes: AnySizes
    record: Record
    folder: Path
    cache: Path
    paths: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        # Each folder has a lock, and a process holds both.
        if self.folder.resolve() == self.cache.resolve():
            raise ValueError(f"record must not lie in the folder of cache, got {self.folder}")

    def append(self, rows: Sequence[Cells]) -> None:
        append_rows(dataclasses.replace(self.record, rows=tuple(rows)), self.folder)

    def recorded(self) -> tuple[Any, ...]:
        return read_record(self.folder / f"{self.record.name}.json").rows


class Vocabulary(NamedTuple):
    """The text of each start in one vocabulary's token ids; `key` names text and vocabulary."""

    size: int
    key: str
    texts: Mapping[str, Text]


class Trainer:
    """The runs of one group, which differ in the loss alone.

    Args:
        marks: steps after which held-out text is evaluated, the last step among them.
        about: cells that every row begins with.
        data_key: names the text.
        measure: returns further cells of each evaluation.
    """

    def __init__(
        self,
        config: TrainConfig,
        marks: Sequence[int],
        text: Text,
        about: Mapping[str, Cell],
        data_key: str,
        ranks: Ranks,
        *,
        measure: Callable[[Decoder], Cells] = lambda model: {},
    ) -> None:
        self.config, self.marks, self.text, self.about = config, marks, text, about
        self.ranks, self.measure = ranks, measure
        stop = StopRequest()
        # The heartbeat is never started: a single rank waits for nobody.
        heartbeat = Heartbeat(ranks, config.parallel.timeout_s, lambda: bool(stop))
        length = config.data.sequence_length
        batches = Batches(text.train, text.held_out, config.run.seed, config.batch, length)
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
        model = self.run_of_model.model
        model.load_state_dict(self.initial)
        # A run that failed in its backward has left gradients.
        model.zero_grad(set_to_none=True)
        torch.manual_seed(config.run.seed)
        reset_peak_memory(device)
        rows, seconds, peak = [], [], 0
        # On a CPU the CPU time of all threads: other processes may run beside this one. A step
        # waits for the device before its update.
        clock = time.perf_counter if device.type == "cuda" else time.process_time
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
                    started = clock()
                    train_step(self.job, run, step)
                    seconds.append(clock() - started)
                    peak = max(peak, peak_memory_bytes(device))
                if step in self.marks:
                    nats = evaluate(model, self.text, config, self.ranks)
                    curve = {**about, "part": "curve", "step": step}
                    rows.append({**curve, **nats, **self.measure(model)})
                    # The peak is that of the steps.
                    reset_peak_memory(device)
        timing: Cells = {
            "text": self.job.data_key,
            "steps": config.steps,
            "tokens": config.steps * config.batch * config.data.sequence_length,
            "seconds": sum(seconds),
            "median_step_ms": 1e3 * statistics.median(seconds),
            # On a CPU the peak would be the whole process's since its start.
            "peak_gib": peak / GIB if device.type == "cuda" else None,
        }
        if screened:
            timing["screened_share"] = float(torch.stack(screened).float().mean())
        return [*rows, {**about, "part": "run", **timing}]


def converge(work: Work[Plan, Sizes], ranks: Ranks, say: Say, *, retry: bool) -> None:
    """Trains the runs that the record lacks, one by one.

    Args:
        retry: also trains the runs that failed before.
    Raises:
        ConfigError, ValueError: there is no text, it is too short, or a size is out of bounds.
        RecordError: the record's file has another machine, commit or settings.
        DeviceLostError: a method broke the device and is recorded as failed; call again.
    """
    work.append([])
    losses = builders(ranks.device.type == "cuda", work.sizes)
    vocabulary = None
    for group in work.plan.groups():
        methods = missing_methods(work, group, retry=retry)
        if not methods:
            continue
        if vocabulary is None or vocabulary.size != group.vocab:
            vocabulary = prepare(work, work.sizes, group.vocab, work.plan.starts, say)
        trainer = _trainer(work, group, vocabulary, ranks, say)
        for method in methods:
            train_and_record(work, group, trainer, method, losses[method], say)
        del trainer
        gc.collect()


def prepare(
    work: Work[Any, Any], sizes: Sizes, vocab_size: int, starts: Sequence[str], say: Say
) -> Vocabulary:
    """Returns the texts in a vocabulary's token ids, reading them from the cache or writing them.

    Raises:
        ConfigError, ValueError: as for `converge`.
    """
    data = sizes.config(vocab_size, 0, "random", work.cache).data
    work.cache.mkdir(parents=True, exist_ok=True)
    # One process makes them; the others wait for it.
    with locked(work.cache):
        cache = prepare_tokens(data.model_copy(update={"paths": work.paths}), say)
    if cache.num_merged < vocab_size:
        say(f"the text gives {cache.num_merged} tokens of V={vocab_size}: the rest never occur")
    texts = texts_of(cache, vocab_size, sizes.held_out_tokens, sizes.sequence_length, starts)
    return Vocabulary(vocab_size, cache.key, texts)


def missing_methods(work: Work[Any, Any], group: Any, *, retry: bool) -> list[str]:
    """Returns the methods of which the record has no run in the group, a named tuple.

    Args:
        retry: a failed run does not count.
    """
    mine = group._asdict().items()
    done = {
        row["method"]
        for row in work.recorded()
        if row["part"] == "run" and mine <= row.items() and not (retry and "failed" in row)
    }
    return [name for name in work.plan.methods if name not in done]


def train_and_record(
    work: Work[Any, Any],
    group: tuple[Any, ...],
    trainer: Trainer,
    method: str,
    build: Callable[[], LossFunction],
    say: Say,
    **cells: Cell,
) -> None:
    """Trains a run, records its rows and says how it ended.

    Args:
        cells: further ones of the row of part "run".
    Raises:
        DeviceLostError: the method broke the device.
    """
    started = time.perf_counter()
    *curve, last = trainer.run(method, build)
    work.append([*curve, last | cells])
    outcome = last.get("failed") or f"loss {curve[-1]['all']:.4f}"
    vocab, kind, seed = group
    seconds = time.perf_counter() - started
    say(f"V={vocab} {kind} seed {seed} {method}: {outcome} ({seconds:.1f} s)")
    if "failed" in last:
        recover(method, str(last["failed"]), trainer.ranks.device)


def _trainer(
    work: Work[Plan, Sizes], group: Group, vocabulary: Vocabulary, ranks: Ranks, say: Say
) -> Trainer:
    text = vocabulary.texts[group.start]
    config = work.sizes.config(group.vocab, group.seed, group.start, work.cache)
    trainer = Trainer(config, work.sizes.marks, text, group._asdict(), vocabulary.key, ranks)
    if group.start == "checkpoint":
        sizes = dataclasses.replace(work.sizes, steps=work.sizes.checkpoint_steps)
        trainer.start_with(trained_once(work, "checkpoint", sizes, vocabulary, ranks, say)[0])
    return trainer


def trained_once(
    work: Work[Any, Any],
    part: str,
    sizes: Sizes,
    vocabulary: Vocabulary,
    ranks: Ranks,
    say: Say,
) -> tuple[dict[str, Tensor], Cells]:
    """Returns the weights of a model trained with the dense loss, and its last evaluation's row.

    They are read from the cache, or trained and written there. The record gets the row once, as
    `part`.

    Raises:
        JobError: the run fails.
    """
    identity = {**dataclasses.asdict(sizes), "vocab": vocabulary.size, "key": vocabulary.key}
    # The dense run has no filter and no screen: these fields do not change its weights.
    del identity["keep"], identity["max_kept"]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    path = work.cache / f"checkpoint-{key}.pt"
    about: Cells = {"part": part, "vocab": vocabulary.size}
    # One process trains it; the others wait for it.
    with locked(work.cache):
        if not path.exists():
            _train_once(path, sizes, vocabulary, ranks, say)
        saved = torch.load(path, map_location=ranks.device, weights_only=True)
        if not any(about.items() <= row.items() for row in work.recorded()):
            work.append([{**saved["row"], **about}])
    return saved["weights"], saved["row"]


def _train_once(path: Path, sizes: Sizes, vocabulary: Vocabulary, ranks: Ranks, say: Say) -> None:
    say(f"V={vocabulary.size}: training the checkpoint, {sizes.steps} steps")
    config = sizes.config(vocabulary.size, CHECKPOINT_SEED, "random", path.parent)
    text = vocabulary.texts["random"]
    maker = Trainer(config, (sizes.steps,), text, {}, vocabulary.key, ranks)
    rows = maker.run("dense", builders(ranks.device.type == "cuda", sizes)["dense"])
    if "failed" in rows[-1]:
        raise JobError(f"the checkpoint of V={vocabulary.size}: {rows[-1]['failed']}")
    partial = path.with_suffix(".partial")
    saved = {"weights": maker.run_of_model.model.state_dict(), "row": {**rows[-2], **rows[-1]}}
    torch.save(saved, partial)
    partial.replace(path)
