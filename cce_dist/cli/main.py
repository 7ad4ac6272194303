"""The command `cce-dist`. Heavy imports wait until a command needs them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import cce_dist
from cce_dist.bench.cli import app as bench_app
from cce_dist.needs.checkout import REPORT, CheckoutGroup, add_checkout_commands
from cce_dist.needs.extras import need_modules

from .compile import compile_command
from .doctor import doctor
from .eval import evaluate
from .plan import app as plan_app
from .vocab import app as vocab_app

app = typer.Typer(
    help="Train with, and measure, a loss whose vocabulary is sharded over ranks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=CheckoutGroup,
)


def _show_version(asked: bool) -> None:
    if not asked:
        return
    try:
        typer.echo(f"cce-dist {cce_dist.__version__}")
    except AttributeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None: ...


class Comparison(str, Enum):
    dense = "dense"


class TrainCommand(TyperCommand):
    """A command whose help ends with the keys of its file."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        try:
            from cce_dist.train.config.load import describe_keys
        except ModuleNotFoundError as error:
            formatter.write(
                f"Keys: docs/guide/training.md; here too once {error.name} is installed.\n"
            )
            return
        with formatter.section("Keys of the file, with their defaults (docs/guide/training.md)"):
            formatter.write_dl(describe_keys())


@app.command(
    cls=TrainCommand,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        # A key takes one line, where the terminal is that wide.
        "max_content_width": 140,
    },
)
def train(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file; may be empty.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")
    ] = False,
    compare: Annotated[
        Comparison | None, typer.Option(help="Train the same seeds with dense logits as well.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="A file, folder or JSONL to train on; may be repeated."),
    ] = None,
) -> None:
    """Train a decoder on real text. Any key can be overridden: --loss.gradient exact."""
    import json

    from cce_dist.distributed import rank_from_environment
    from cce_dist.train.config.load import parse_arguments
    from cce_dist.train.errors import ConfigError
    from cce_dist.train.job import run_job

    need_modules("matplotlib", "tokenizers")
    try:
        # The parser takes the first unknown argument for the file.
        path, overrides = parse_arguments([config, *context.args])
    except ConfigError as error:
        if rank_from_environment() == 0:
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    if data:
        overrides.append(("data.paths", json.dumps([str(path) for path in data])))
    code = run_job(path, overrides, resume=resume, compare_dense=compare is not None)
    raise typer.Exit(code)


app.command("compile")(compile_command)
app.command("doctor")(doctor)
app.command("eval")(evaluate)
app.add_typer(bench_app, name="bench")
app.add_typer(plan_app, name="plan")
app.add_typer(vocab_app, name="vocab")
add_checkout_commands(app, REPORT)
