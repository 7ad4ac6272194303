"""The main rank's display while it trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .errors import JobError

# Keys of a step's record that most steps lack.
LOGGED = ("tail_mass", "screened")


class Display:
    """A display of progress, silent on every rank except the main one."""

    def __init__(self, is_main: bool) -> None:
        self.is_main = is_main
        # Wrapped log lines are hard to search; a terminal wraps by itself.
        self.console = Console(soft_wrap=True, highlight=False)
        self.progress: Progress | None = None
        self.task = None
        # Values of the last logged step.
        self.logged: dict[str, Any] = {}

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
                f"stdout cannot be written: {error.strerror}. To do: free space where it goes, and "
                "start the same command with --resume"
            ) from None

    @contextmanager
    def training(self, title: str, start: int, steps: int) -> Iterator[None]:
        self.logged = {}
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

    def step(self, record: dict[str, Any], steps: int, is_log_step: bool) -> None:
        if not self.is_main:
            return
        # A value that is not measured in every step: the bar keeps showing the last one.
        self.logged |= {key: record[key] for key in LOGGED if key in record}
        figures = _figures({**self.logged, **record})
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=record["step"], figures=figures)
        elif is_log_step:
            self.say(f"step {record['step']}/{steps}  {figures}")


def _figures(record: dict[str, Any]) -> str:
    parts = [
        f"loss {record['loss']:.4f}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"peak {format_bytes(record['peak_memory'])}",
    ]
    if "tail_mass" in record:
        parts.append(f"tail mass {record['tail_mass']:.2e}")
    if "screened" in record:
        parts.append("screened" if record["screened"] else "not screened")
    return "  ".join(parts)


def format_bytes(num_bytes: float) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
