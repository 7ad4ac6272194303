"""Arguments that several of the benchmark's commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Size = Annotated[int, typer.Option(min=1)]
Names = list[str] | None
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Write the rows here as well.")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="The same, numbers unrounded.")]
RecordPath = Annotated[
    Path | None,
    typer.Option("--record", help="A .json of docs/evidence/: write the rows here as evidence."),
]
Title = Annotated[str, typer.Option(help="Of the record: what was run where. [sizes and device]")]
Captured = Annotated[
    list[str],
    typer.Option("--inputs", help="A file of `bench capture`; repeat it for other steps."),
]
Inputs = Annotated[
    Names,
    typer.Option(
        help="gaussian, zipf, zipf-shuffled, zipf-interleaved, or a file of `bench capture`; may "
        "be repeated. [zipf]"
    ),
]
Shapes = Annotated[
    Names,
    typer.Option(
        "--shape",
        help="A model's head, such as gemma2-2b, or TOKENSxVOCABxDIM; may be repeated. In place "
        "of --vocab and --dim.",
    ),
]
Tokens = Annotated[int | None, typer.Option(min=1, help="[2048; of a model's head 8192]")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help='"cpu", "cuda", ...')]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice.")]
Ignored = Annotated[
    float, typer.Option(min=0, max=0.99, help="Share of the targets that are ignored.")
]
Softcap = Annotated[
    float | None, typer.Option(help="Of the logits, as Gemma 2's 30; of peers, those that have it.")
]
BackendName = Annotated[str, typer.Option(help="Of our own methods: auto, triton or torch.")]
Peers = Annotated[
    str | None,
    typer.Option(
        help="all, none, or names with commas. By default all on a GPU, on a CPU those that need "
        "no compiler; none beside --method."
    ),
]
PeerPath = Annotated[
    list[Path] | None,
    typer.Option(help="A folder that Python may import peers from; may be repeated."),
]
Extra = Annotated[
    Names,
    typer.Option(help="One more peer: NAME=MODULE:FUNCTION, of (hidden, weight, targets)."),
]
Failed = Annotated[Names, typer.Option(hidden=True, help="NAME=REASON of a peer not to be run.")]
Repeats = Annotated[int, typer.Option(min=3, help="Launches of each method.")]
Budget = Annotated[
    float,
    typer.Option(min=0, help="Seconds a method is timed for at most, if 3 launches fit; 0: any."),
]
Timeout = Annotated[
    float, typer.Option(min=0, help="Seconds for a peer to import, compile and run; 0: any.")
]

WorstRatio = Annotated[
    float,
    typer.Option(help="Our gradients' errors over dense torch's; more, and nothing is timed."),
]
