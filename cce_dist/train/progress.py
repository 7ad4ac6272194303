"""A step's record, and the main rank's display: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .errors import JobError


@dataclass(frozen=True)
class StepRecord:
    """A step's line of metrics.jsonl, which leaves out fields that are None.

    Args:
        loss: nats for each token, mean over the global batch.
        peak_memory: bytes on the rank with the most.
        peak_memory_of_pp: bytes by pipeline rank; None: no pipeline.
        tail_mass, screened: statistics of the loss, in logged steps alone.
    """

    step: int
    loss: float
    tokens_per_s: float
    peak_memory: int
    lr: float
    grad_norm: float
    peak_memory_of_pp: list[int] | None = None
    tail_mass: float | None = None
    screened: bool | None = None


class Display:
    """A display of progress, silent on every rank except the main one."""

    def __init__(self, is_main: bool) -> None:
        self.is_main = is_main
        # Wrapped log lines are hard to search; a terminal wraps by itself.
        self.console = Console(soft_wrap=True, highlight=False)
        self.progress: Progress | None = None
        self.task = None
        # The last measured values: most steps do not measure them.
        self.tail_mass: float | None = None
        self.screened: bool | None = None

    def say(self, text: str) -> None:
        if self.is_main:
            self._print(escape(text))

    def warn(self, text: str) -> None:
        if self.is_main:
            self._print(f"[yellow]warning:[/yellow] {escape(text)}")

    def show_report(self, markdown: str) -> None:
        self._print(Markdown(markdown) if self.console.is_terminal else escape(markdown))

    def _print(self, shown: str | Markdown) -> None:
        try:
            self.console.print(shown)
        except OSError as error:
            raise JobError(
                f"stdout could not be written: {error.strerror}. To do: free space where it goes, "
                "and start the same command with --resume"
            ) from None

    @contextmanager
    def training(self, title: str, start: int, steps: int) -> Iterator[None]:
        self.tail_mass = self.screened = None
        if not self.is_main or not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        with Progress(*columns, console=self.console) as self.progress:
            self.task = self.progress.add_task(title, completed=start, total=steps, figures="")
            yield
        self.progress = None

    def step(self, record: StepRecord, steps: int, is_log_step: bool) -> None:
        if not self.is_main:
            return
        if record.tail_mass is not None:
            self.tail_mass = record.tail_mass
        if record.screened is not None:
            self.screened = record.screened
        figures = self._figures(record)
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=record.step, figures=figures)
        elif is_log_step:
            self.say(f"step {record.step}/{steps}  {figures}")

    def _figures(self, record: StepRecord) -> str:
        figures = [
            f"loss {record.loss:.4f}",
            f"{record.tokens_per_s:,.0f} tokens/s",
            f"peak {format_bytes(record.peak_memory)}",
        ]
        if self.tail_mass is not None:
            figures.append(f"tail mass {self.tail_mass:.2e}")
        if self.screened is not None:
            figures.append("screened" if self.screened else "not screened")
        return "  ".join(figures)


def format_bytes(num_bytes: float) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
