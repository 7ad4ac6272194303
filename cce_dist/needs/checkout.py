"""Commands of a checkout: the experiments and the report, which no installed package has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import cce_dist
from cce_dist.distributed.launchers import rank_from_environment

PANEL = "Commands of a checkout"
# The name of each command in the checkout's benchmarks/cli/app.py, and the first sentences of its
# help, which --help shows without a checkout too.
EXPERIMENTS = {
    "first-call": "Seconds of a process's first loss and gradients, with and without compiled "
    "kernels.",
    "fine-tune": "Steps of Hugging Face's Trainer with a model's own loss, ours, Liger's and "
    "Apple's.",
    "listed": "Log-probabilities under a support of some ids a token, and with candidates; of all "
    "ids.",
    "logprobs": "Log-probabilities, entropy and accuracy with a policy's gradients: ours, TRL's, "
    "verl's, Liger's.",
    "distill": "Distillation's divergence and its gradients: ours, TRL's, Liger's, FLA's.",
    "distill-ranks": "Distillation where ranks share both models' vocabulary; start it with "
    "torchrun.",
    "students": "Distil small students from a trained teacher on real text, by dense logits and by "
    "ours, and record what they predict.",
    "grpo": "GRPO runs of a small model that adds numbers, with dense log-probabilities and with "
    "ours.",
    "fidelity": "Gradients of every method over its thresholds against float64, by token "
    "frequency.",
    "converge": "Train small models with the dense loss, ours and Apple's, and record what they "
    "predict.",
    "heads": "Loss and gradients on ten models' heads in bf16, beside the fastest exact peer's, in "
    "one table.",
    "megatron": "Whole steps of a Megatron job on GPUs, with Megatron's losses and ours; all ranks "
    "are tensor-parallel.",
    "pipeline": "Steps of a pipeline of one stage a rank: the head dense or fused on the last "
    "stage, and the vocabulary over all ranks.",
    "capture": "Train on one rank and save what the loss sees (hidden, weight, targets) at some "
    "steps.",
}
REPORT = {
    "report": "Make docs/notebook/evidence and docs/pictures of the records in docs/notebook/data.",
}


def find_checkout() -> Path | None:
    """Returns the folder of the checkout that this package is imported from; None: installed."""
    root = Path(str(cce_dist.__file__)).parent.parent
    project = root / "pyproject.toml"
    if not project.is_file() or 'name = "cce-dist"' not in project.read_text(encoding="utf-8"):
        return None
    return root


def import_benchmarks(name: str, command: str) -> ModuleType:
    """Imports the module benchmarks.NAME of the checkout, which `command` needs.

    Raises:
        typer.Exit: there is no checkout; stderr says where `command` works.
    """
    root = find_checkout()
    if root is None:
        if rank_from_environment() == 0:
            _, *words = command.split()
            typer.echo(
                f"error: `{command}` is in the repository and in its source archive alone: start "
                f"`{' '.join(['python -m cce_dist', *words])}` in the folder of one of them",
                err=True,
            )
        raise typer.Exit(2)
    # The checkout comes first: the current directory may have a folder `benchmarks`, too.
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")


class CheckoutCommand(TyperCommand):
    """A command's name and help; a CheckoutGroup finds the command itself when it is called."""


class CheckoutGroup(TyperGroup):
    """A group of commands, CheckoutCommands among them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, remaining = super().resolve_command(ctx, args)
        # A shell that completes a command line must see no error.
        completes = ctx.resilient_parsing and find_checkout() is None
        if isinstance(command, CheckoutCommand) and not completes:
            module = import_benchmarks("cli.app", f"{ctx.command_path} {name}")
            group: Any = typer.main.get_command(module.app)
            command = group.commands[name]
        return name, command, remaining


def add_checkout_commands(app: typer.Typer, helps: Mapping[str, str]) -> None:
    """Adds a CheckoutCommand for each name of `helps` to `app`, whose `cls` is CheckoutGroup."""
    for name, text in helps.items():
        app.command(name, cls=CheckoutCommand, help=text, rich_help_panel=PANEL)(lambda: None)
