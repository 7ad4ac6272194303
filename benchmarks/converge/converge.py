"""Trains the same models with one loss after another, so that only the loss can differ.

Every run of a group has the same first weights and the same batches in the same order.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.converge.plan import CHECKPOINT_SEED, Group, Plan, Sizes, builders
from benchmarks.converge.run import Cells, Trainer
from benchmarks.converge.text import Text, texts_of
from benchmarks.evidence.records import Cell, Record, append_rows, locked, read_record
from cce_dist.bench.methods import recover
from cce_dist.train.data.tokens import prepare_tokens
from cce_dist.train.errors import JobError
from cce_dist.train.ranks import Ranks

Say = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """Everything that one command trains, and the files that it reads and writes.

    Args:
        record: a record without rows; its file in `folder` gets the rows of each finished run.
        cache: folder of token ids and checkpoints, which are made once.
        paths: text; empty: the text of the Python installation.
    """

    plan: Plan
    sizes: Sizes
    record: Record
    folder: Path
    cache: Path
    paths: tuple[Path, ...] = ()

    def append(self, rows: Sequence[Cells]) -> None:
        append_rows(dataclasses.replace(self.record, rows=tuple(rows)), self.folder)

    def recorded(self) -> tuple[Any, ...]:
        return read_record(self.folder / f"{self.record.name}.json").rows


@dataclass(frozen=True)
class Vocabulary:
    """The texts in one vocabulary's token ids.

    Args:
        key: names the text and the vocabulary.
        texts: the text of each start.
    """

    size: int
    key: str
    texts: Mapping[str, Text]


def converge(work: Work, ranks: Ranks, say: Say, *, retry: bool) -> None:
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
        trainer = None
        for method in _missing(work, group, retry):
            started = time.perf_counter()
            if vocabulary is None or vocabulary.size != group.vocab:
                vocabulary = prepare(work, group.vocab, say)
            if trainer is None:
                trainer = _trainer(work, group, vocabulary, ranks, say)
            rows = trainer.run(method, losses[method])
            work.append(rows)
            say(f"{_describe(group, method, rows)} ({time.perf_counter() - started:.1f} s)")
            if "failed" in rows[-1]:
                recover(method, str(rows[-1]["failed"]), ranks.device)
        del trainer
        gc.collect()


def prepare(work: Work, vocab_size: int, say: Say) -> Vocabulary:
    """Returns the texts in a vocabulary's token ids, reading them from the cache or writing them.

    Raises:
        ConfigError, ValueError: as for `converge`.
    """
    sizes = work.sizes
    data = sizes.config(vocab_size, 0, "random", work.cache).data
    cache = prepare_tokens(data.model_copy(update={"paths": work.paths}), say)
    if cache.num_merged < vocab_size:
        say(f"the text gives {cache.num_merged} tokens of V={vocab_size}: the rest never occur")
    texts = texts_of(
        cache, vocab_size, sizes.held_out_tokens, sizes.sequence_length, work.plan.starts
    )
    return Vocabulary(vocab_size, cache.key, texts)


def _missing(work: Work, group: Group, retry: bool) -> list[str]:
    mine = group._asdict().items()
    done = {
        row["method"]
        for row in work.recorded()
        if row["part"] == "run" and mine <= row.items() and not (retry and "failed" in row)
    }
    return [name for name in work.plan.methods if name not in done]


def _trainer(work: Work, group: Group, vocabulary: Vocabulary, ranks: Ranks, say: Say) -> Trainer:
    text = vocabulary.texts[group.start]
    config = work.sizes.config(group.vocab, group.seed, group.start, work.cache)
    trainer = Trainer(config, work.sizes.marks, text, group._asdict(), vocabulary.key, ranks)
    if group.start == "checkpoint":
        trainer.start_with(_checkpoint(work, vocabulary, ranks, say))
    return trainer


def _checkpoint(
    work: Work, vocabulary: Vocabulary, ranks: Ranks, say: Say
) -> dict[str, torch.Tensor]:
    """Returns the weights to continue from; trains them with the dense loss if there are none yet.

    Raises:
        JobError: the dense run fails.
    """
    sizes = dataclasses.replace(work.sizes, steps=work.sizes.checkpoint_steps)
    identity = {**dataclasses.asdict(sizes), "vocab": vocabulary.size, "key": vocabulary.key}
    # The dense run has no filter and no screen: these fields do not change its weights.
    del identity["keep"], identity["max_kept"]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
    path = work.cache / f"checkpoint-{key}.pt"
    about: dict[str, Cell] = {"part": "checkpoint", "vocab": vocabulary.size}
    # One process makes the checkpoint; the others wait for it.
    with locked(work.cache):
        if not path.exists():
            say(f"V={vocabulary.size}: training the checkpoint, {sizes.steps} steps")
            config = sizes.config(vocabulary.size, CHECKPOINT_SEED, "random", work.cache)
            text = vocabulary.texts["random"]
            maker = Trainer(config, (sizes.steps,), text, about, vocabulary.key, ranks)
            rows = maker.run("dense", builders(ranks.device.type == "cuda", sizes)["dense"])
            if "failed" in rows[-1]:
                raise JobError(f"the checkpoint of V={vocabulary.size}: {rows[-1]['failed']}")
            row = {**rows[-2], **rows[-1], **about}
            partial = path.with_suffix(".partial")
            torch.save({"weights": maker.run_of_model.model.state_dict(), "row": row}, partial)
            partial.replace(path)
        saved = torch.load(path, map_location=ranks.device, weights_only=True)
        if not any(about.items() <= row.items() for row in work.recorded()):
            work.append([saved["row"]])
    return saved["weights"]


def _describe(group: Group, method: str, rows: Sequence[Cells]) -> str:
    outcome = rows[-1].get("failed") or f"loss {rows[-2]['all']:.4f}"
    return f"V={group.vocab} {group.start} seed {group.seed} {method}: {outcome}"
