"""What the main rank shows while it trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Silent on every rank but the main one."""

    def __init__(self, is_main: bool) -> None:
        self.is_main = is_main
        # Wrapped log lines are hard to search; a terminal wraps by itself.
        self.console = Console(soft_wrap=True, highlight=False)
        self.progress: Progress | None = None
        self.task = None
        self.tail_mass: float | None = None

    def say(self, text: str) -> None:
        if self.is_main:
            self.console.print(escape(text))

    def warn(self, text: str) -> None:
        if self.is_main:
            self.console.print(f"[yellow]warning:[/yellow] {escape(text)}")

    def show_report(self, markdown: str) -> None:
        self.console.print(Markdown(markdown) if self.console.is_terminal else escape(markdown))

    @contextmanager
    def training(self, title: str, start: int, steps: int) -> Iterator[None]:
        self.tail_mass = None
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
        # Not measured in every step; the bar keeps showing the last one.
        self.tail_mass = record.get("tail_mass", self.tail_mass)
        figures = _figures(record, self.tail_mass)
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=record["step"], figures=figures)
        elif is_log_step:
            self.say(f"step {record['step']}/{steps}  {figures}")


def _figures(record: dict[str, Any], tail_mass: float | None) -> str:
    parts = [
        f"loss {record['loss']:.4f}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"peak {format_bytes(record['peak_memory'])}",
    ]
    if tail_mass is not None:
        parts.append(f"tail mass {tail_mass:.2e}")
    return "  ".join(parts)


def format_bytes(num_bytes: float) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
