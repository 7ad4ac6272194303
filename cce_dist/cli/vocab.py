"""`cce-dist vocab`: the token ids of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cce_dist.needs.extras import need_modules

from .output import refusals

app = typer.Typer(
    help="The token ids of a model.", no_args_is_help=True, pretty_exceptions_enable=False
)


@app.callback()
def vocab() -> None: ...


@app.command("deal")
def deal_command(
    model: Annotated[
        Path,
        typer.Argument(help="Folder of transformers: config.json, tokenizer.json, *.safetensors."),
    ],
    ranks: Annotated[int, typer.Option(min=2, help="Ranks that share the vocabulary.")],
    out: Annotated[Path, typer.Option(help="The new folder, which must not exist.")],
    divisible_by: Annotated[
        int,
        typer.Option(min=1, help="Megatron's --make-vocab-size-divisible-by, 128; torch has none."),
    ] = 1,
) -> None:
    """Rename a model's ids once, so that ranks get as many frequent tokens each.

    Tokenizers count from the most frequent token. So of contiguous shards the
    first has most of the backward's work. The new folder's model gives a text the
    same probabilities, and its tokenizer the same tokens, under other ids. Its
    new_ids.npy has the new id of each old one, for tokens already on disk.

    Exits with 0; with 2 for bad arguments, and for ids that it cannot rename.
    """
    need_modules("transformers")
    from cce_dist.dealing.deal import deal

    with refusals():
        dealt = deal(model, out, ranks=ranks, divisible_by=divisible_by)
    of_tensors = ", ".join(dealt.tensors) or "none"
    typer.echo(
        f"{out}: {dealt.num_ids} ids dealt out to {ranks} ranks of {dealt.num_rows} rows. "
        f"Tensors with new rows: {of_tensors}. "
        f"Both tokenizers agree on {dealt.samples} samples of text."
    )
