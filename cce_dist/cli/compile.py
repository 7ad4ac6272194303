"""`cce-dist compile`: a job's kernels, compiled where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import JsonPath, check_output, console_of_tables, hand_over, refusals, table_of
from .plan_model import read_model

if TYPE_CHECKING:
    from cce_dist.ahead.calls import HeadCalls
    from cce_dist.ahead.compile import Report

TRAINING = (".yaml", ".yml")
TOKENS = 8192
# The classes of the options that have options of their own.
RECORDS = {"filter": "Filter", "screen": "Screen"}


def compile_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG-OR-MODEL",
            help="A YAML file of `cce-dist train`, a Hugging Face config.json, a preset of "
            "`cce-dist plan models`, or ROWSxDIM of the head.",
        ),
    ],
    arch: Annotated[list[str], typer.Option(help="sm_90 for H100, H200; may be repeated.")],
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a call, on all ranks that share the head; 8192.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share the head; else 1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the head; else bfloat16.")] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE of linear_cross_entropy: softcap=30, gradient=exact, "
            """stats='["entropy"]'; of a tensor its dtype: bias=bfloat16. May be repeated."""
        ),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(min=1, help="Ranks of the job, for a YAML file with global_batch or tp: all."),
    ] = 1,
    cache: Annotated[
        Path | None, typer.Option(help="Triton's cache, at its path in the job; else Triton's own.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Compile the kernels of a job's loss and gradients ahead of time, without a GPU.

    Exits with 0; with 2 for bad arguments, and with 1 if a kernel does not compile.
    """
    with refusals():
        check_output("--json", json_path)
        _make_folder("--cache", cache)
        if importlib.util.find_spec("triton") is None:
            raise ValueError("triton must be installed to compile its kernels, got none")
        from cce_dist.ahead.compile import compile_ahead
        from cce_dist.ahead.stand_in import find_device

        devices = {each: find_device(each) for each in arch}
        if Path(name).suffix in TRAINING:
            left = {"--tokens": tokens, "--tp": tp, "--dtype": dtype, "--loss": loss}
            calls = calls_of_training(Path(name), ranks, left)
        else:
            num_tokens = TOKENS if tokens is None else tokens
            calls = calls_of_model(name, num_tokens, tp, dtype or "bfloat16", loss or ())
        reports = {each: compile_ahead(calls, device, cache) for each, device in devices.items()}
        findings = {each: describe(report) for each, report in reports.items()}
        hand_over(findings, json_path, lambda: show(findings))
    for each, report in reports.items():
        for kernel, error in report.failed.items():
            typer.echo(f"error: {kernel} on {each}: {error}", err=True)
    if any(report.failed for report in reports.values()):
        raise typer.Exit(1)


def _make_folder(option: str, path: Path | None) -> None:
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"{option} must be a folder, or one that can be made"
        raise ValueError(f"{rule}, got {path}: {error.strerror}") from None


def calls_of_training(path: Path, num_ranks: int, left: dict[str, object]) -> HeadCalls:
    """Returns the calls of a training run: its steps, logged steps and evaluations.

    Raises:
        ValueError: an option of `left` is set, which the file's keys decide; or the vocabulary is
            over a pipeline.
    """
    import torch

    from cce_dist.ahead.calls import HeadCalls
    from cce_dist.train.config.load import load_config
    from cce_dist.train.errors import ConfigError
    from cce_dist.train.loop import stats_of
    from cce_dist.train.model.head import options_of_nll

    for option, value in left.items():
        if value not in (None, []):
            raise ValueError(f"{option} must be left out with {path}, whose keys say it")
    try:
        config = load_config(path, num_ranks=num_ranks)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    parallel = config.parallel
    if parallel.vocab_over_pipeline:
        raise ValueError(
            "parallel.vocab_over_pipeline must be false to compile ahead, got true: a pipeline's "
            "head compiles when it warms up"
        )
    sequences = config.batch // (config.microbatches if parallel.pp > 1 else 1)
    options = replace(config.loss, sequence_parallel=parallel.sequence_parallel)
    nll = replace(options_of_nll(options), sequence_parallel=parallel.sequence_parallel)
    logged = replace(options, stats=stats_of(options))
    return HeadCalls(
        config.data.vocab_size,
        config.model.dim,
        getattr(torch, config.dtype),
        sequences * config.data.sequence_length,
        trained=(options, logged) if logged.stats else (options,),
        evaluated=(nll,),
        # A run's head has a group, be it of one rank.
        num_ranks=parallel.tp,
    )


def calls_of_model(
    name: str, tokens: int, tp: int | None, dtype: str, pairs: Iterable[str]
) -> HeadCalls:
    """Returns the calls of the loss on a model's head.

    Raises:
        ValueError: there is no such model, dtype or option of the loss.
    """
    from cce_dist import LossOptions
    from cce_dist.ahead.calls import FURTHER, HeadCalls

    options, tensors = {}, {}
    shape = re.fullmatch(r"(\d+)x(\d+)", name)
    if shape is not None:
        rows, dim = map(int, shape.groups())
    else:
        model, _ = read_model(name)
        rows, dim = model.num_rows, model.dim
        if model.head_bias:
            tensors["bias"] = _dtype(dtype)
    known = [*LossOptions.__dataclass_fields__, *FURTHER]
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in known:
            raise ValueError(f"loss must be KEY=VALUE with a key of {known}, got {pair!r}")
        if key in FURTHER:
            tensors[key] = _dtype(value)
        else:
            options[key] = _value(key, value)
    return HeadCalls(
        rows, dim, _dtype(dtype), tokens, (LossOptions(**options),), num_ranks=tp, tensors=tensors
    )


def _value(key: str, text: str) -> Any:
    import cce_dist

    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if key in RECORDS and isinstance(value, dict):
        try:
            return getattr(cce_dist, RECORDS[key])(**value)
        except TypeError as error:
            raise ValueError(f"loss: {key} must have keys of {RECORDS[key]}: {error}") from None
    return tuple(value) if isinstance(value, list) else value


def _dtype(name: str) -> Any:
    import torch

    from cce_dist.backends.triton.launch.tiles import DTYPES

    dtype = getattr(torch, name, None)
    if dtype not in DTYPES:
        names = [str(each).removeprefix("torch.") for each in DTYPES]
        raise ValueError(f"dtype must be one of {names}, got {name!r}")
    return dtype


def describe(report: Report) -> dict[str, Any]:
    """Returns a report as JSON has it: each kernel's binaries together."""
    from cce_dist.ahead.launchers import why_no_launchers

    kernels: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"made": 0, "there": 0, "seconds": 0.0, "bytes": 0, "folders": []}
    )
    for binary in report.binaries:
        row = kernels[binary.kernel]
        row["there" if binary.cached else "made"] += 1
        row["seconds"] += binary.seconds
        row["bytes"] += binary.bytes
        row["folders"].append(binary.folder)
    return {
        "cache": str(report.cache),
        "kernels": dict(kernels),
        "failed": report.failed,
        "seconds": report.seconds,
        "no_launchers": why_no_launchers(),
    }


def show(findings: dict[str, dict[str, Any]]) -> None:
    """Shows a table of each architecture's kernels."""
    from rich.text import Text

    console = console_of_tables()
    columns = ("kernel", "made", "there before", "seconds of a core", "KB")
    for arch, facts in findings.items():
        rows = [
            [kernel, f"{row['made']}", f"{row['there']}", f"{row['seconds']:.1f}", _kb(row)]
            for kernel, row in sorted(facts["kernels"].items())
        ]
        console.print(table_of(columns, rows, title=arch, left=1))
        total = {
            key: sum(row[key] for row in facts["kernels"].values())
            for key in ("made", "there", "bytes")
        }
        lines = [
            f"{arch}: {total['made']} binaries made, {total['there']} there before, "
            f"{len(facts['failed'])} failed; {total['bytes'] / 1e6:.1f} MB, "
            f"{facts['seconds']:.1f} s",
            f"in the job: TRITON_CACHE_DIR={facts['cache']}",
        ]
        if facts["no_launchers"] is not None:
            lines.append(f"launchers are not in it: {facts['no_launchers']}")
        for line in lines:
            console.print(Text(line), soft_wrap=True)


def _kb(row: dict[str, Any]) -> str:
    return f"{row['bytes'] / 1e3:,.0f}"
