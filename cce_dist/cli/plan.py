"""`cce-dist plan`: memory and pipelines on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from cce_dist.planner.models.presets import MODELS
from cce_dist.planner.names import nearest_name

from .plan_model import model_command, models_command, times_command


class _Commands(TyperGroup):
    """The commands; a model's name in a command's place is an error that names `plan model`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        is_model = nearest_name(name, MODELS) or Path(name).exists()
        if name and name not in self.commands and is_model:
            ctx.fail(f"No such command {name!r}; a model's plan is `cce-dist plan model {name}`")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="What a model takes on paper: no GPU, no torch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("model")(model_command)
app.command("models")(models_command)
app.command("times")(times_command)
