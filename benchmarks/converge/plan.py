"""Plan of `cce-dist bench converge`: sizes, starts, methods, seeds, and the order of the runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.fidelity.candidates import METHODS, build_loss
from cce_dist import Filter, Screen
from cce_dist.bench.golden import LossFunction
from cce_dist.bench.methods import METHODS as LOSSES
from cce_dist.bench.rank_methods import Setup
from cce_dist.train.config.schema import TrainConfig

STARTS = ("random", "checkpoint")
HEAD_DIM = 64
CHECKPOINT_SEED = 1000


@dataclass(frozen=True)
class Sizes:
    """Sizes and settings that all runs of a record share: options of `cce-dist bench converge`."""

    dim: int = 512
    layers: int = 4
    tied: bool = False
    batch: int = 8
    sequence_length: int = 1024
    steps: int = 400
    checkpoint_steps: int = 800
    evaluations: int = 10
    held_out_tokens: int = 65536
    lr: float = 1e-3
    fine_tune_lr: float = 3e-4
    warmup: int = 40
    megabytes: float = 160.0
    dtype: str = "bfloat16"
    keep: float | Literal["auto"] = "auto"
    max_kept: float = Screen.max_kept

    def __post_init__(self) -> None:
        if self.evaluations > self.steps:
            raise ValueError(f"evaluations must be <= steps={self.steps}, got {self.evaluations}")
        if self.held_out_tokens < self.sequence_length:
            raise ValueError(
                f"held_out_tokens must be at least sequence_length={self.sequence_length}, got "
                f"{self.held_out_tokens}"
            )
        # Filter and Screen refuse values that are out of bounds.
        Filter(keep=self.keep)
        Screen(max_kept=self.max_kept)

    @property
    def marks(self) -> tuple[int, ...]:
        """Returns the steps after which held-out text is evaluated."""
        return (0, *(self.steps * n // self.evaluations for n in range(1, self.evaluations + 1)))

    def config(self, vocab_size: int, seed: int, start: str, cache: Path) -> TrainConfig:
        """Returns the config of one run.

        Raises:
            pydantic.ValidationError, a ValueError: a size is out of bounds.
        """
        values = {
            "run": {"seed": seed},
            "data": {
                "vocab_size": vocab_size,
                "megabytes": self.megabytes,
                "sequence_length": self.sequence_length,
                "cache": cache,
            },
            "model": {
                "dim": self.dim,
                "layers": self.layers,
                "heads": max(1, self.dim // HEAD_DIM),
                "tied": self.tied,
            },
            "optimizer": {
                "lr": self.lr if start == "random" else self.fine_tune_lr,
                "warmup": self.warmup,
            },
            "steps": self.steps,
            "batch": self.batch,
            "dtype": self.dtype,
            # Never log: a logged step asks the loss for statistics.
            "log_every": 10**6,
        }
        return TrainConfig.model_validate(values)


class Group(NamedTuple):
    """Runs with the same first weights and the same batches, so that only methods differ."""

    vocab: int
    start: str
    seed: int


@dataclass(frozen=True)
class Plan:
    """The groups of runs that one process trains.

    Args:
        work_slice: (k, n): every n-th group, from the k-th on, for n processes that share the work.
    Raises:
        ValueError: a start is unknown.
    """

    vocab_sizes: tuple[int, ...]
    starts: tuple[str, ...]
    methods: tuple[str, ...]
    num_seeds: int
    work_slice: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.starts) - set(STARTS))
        if unknown:
            raise ValueError(f"start must be among {list(STARTS)}, got {unknown}")

    def groups(self) -> Iterator[Group]:
        """Yields this process's groups by vocabulary, then start, then seed.

        Groups that are compared with each other thus follow one another.
        """
        first, count = self.work_slice
        every = itertools.product(self.vocab_sizes, self.starts, range(self.num_seeds))
        return (Group(*group) for group in itertools.islice(every, first, None, count))


def parse_slice(text: str) -> tuple[int, int]:
    """Returns (k, n) of a text K/N; "1/4" is the second of four parts.

    Raises:
        ValueError: the text is not K/N, or K is not below N.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"slice must be K/N with 0 <= K < N, such as 0/4, got {text!r}")
    return int(match[1]), int(match[2])


def builders(on_gpu: bool, sizes: Sizes) -> dict[str, Callable[[], LossFunction]]:
    """Returns a builder of each method's loss; if a builder raises, the method can't run here."""
    screen = Screen(max_kept=sizes.max_kept)
    build = functools.partial(build_loss, keep=sizes.keep, screen=screen)
    by_method = {name: functools.partial(build, name) for name in METHODS}
    if on_gpu:
        # In eager mode, fp32 copies of the logits would take three quarters of a step.
        by_method["dense"] = functools.partial(LOSSES["torch-compile"].build, Setup())
    return {name: functools.cache(builder) for name, builder in by_method.items()}


def settings_of(sizes: Sizes, paths: Sequence[Path]) -> dict[str, str | int | float]:
    """Returns the record's settings."""
    names = ", ".join(path.name for path in paths)
    return {
        **dataclasses.asdict(sizes),
        "text": names or "of the Python installation",
        "text_to_continue_on": "the last third of its documents",
    }
