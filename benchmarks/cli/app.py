"""Commands of the checkout, under the names that cce_dist/needs/checkout.py lists."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli import work
from benchmarks.cli.converge import converge_command, parse_power
from benchmarks.cli.distillation import (
    distill_command,
    distill_ranks_command,
    students_command,
)
from benchmarks.cli.heads import heads_command
from benchmarks.cli.ranks import megatron_command, pipeline_command
from benchmarks.cli.rl import grpo_command, logprobs_command
from cce_dist.bench import arguments as arg
from cce_dist.needs.extras import need_modules

RECORDS = Path("docs/notebook/data/evidence")
# The columns of the terminal's table.
SHOWN = (
    *("method", "threshold", "kept", "tail_mass", "screened", "loss_error"),
    *("grad_hidden_error", "grad_weight_error", "grad_weight_update_error"),
    *("median_ms", "p10_ms", "p90_ms", "failed"),
)

app = typer.Typer()
app.command("converge")(converge_command)
app.command("distill")(distill_command)
app.command("distill-ranks")(distill_ranks_command)
app.command("grpo")(grpo_command)
app.command("heads")(heads_command)
app.command("logprobs")(logprobs_command)
app.command("megatron")(megatron_command)
app.command("pipeline")(pipeline_command)
app.command("students")(students_command)


@app.command("first-call")
def first_call_command(
    tokens: arg.Tokens = None,
    vocab: arg.Size = 16384,
    dim: arg.Size = 256,
    shape: arg.Shapes = None,
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    gradient: Annotated[arg.Names, typer.Option(help="May be repeated. [all three]")] = None,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
) -> None:
    """Seconds of a process's first loss and gradients, with and without compiled kernels."""
    from benchmarks.first_call import bench_first_calls
    from cce_dist.bench.report import Report

    with arg.refusals():
        shapes = arg.shapes_of(shape, tokens, vocab, dim)
    gradients = gradient or ["filtered", "exact", "in_forward"]
    report = Report(arg.machine_of(device, 0), csv_path, json_path)
    for parsed in shapes:
        with arg.refusals():
            rows = bench_first_calls(parsed, dtype=dtype, device=device, gradients=gradients)
        report.add({**dataclasses.asdict(parsed), "dtype": dtype}, rows)
        report.finish_case()


@app.command("fine-tune")
def fine_tune_command(
    model: Annotated[str, typer.Option(help="qwen2.5-0.5b or llama-3.2-1b.")] = "qwen2.5-0.5b",
    loss: Annotated[arg.Names, typer.Option(help="May be repeated. [all six]")] = None,
    batch: arg.Size = 8,
    sequence_length: work.SequenceLength = 1024,
    repeats: arg.Repeats = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before the timed ones.")] = 5,
    device: arg.Device = "cuda",
    megabytes: work.Megabytes = 40.0,
    largest: Annotated[bool, typer.Option(help="Also search the largest batch.")] = False,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
) -> None:
    """Steps of Hugging Face's Trainer with a model's own loss, ours, Liger's and Apple's.

    The model is made from its configuration, with random weights, in bf16 on a GPU. The text is
    real, and packed.
    """
    from benchmarks.fine_tune import LOSSES, Plan, bench_fine_tune
    from cce_dist.bench.report import Cells, Report

    need_modules("tokenizers", "transformers")
    plan = Plan(batch, sequence_length, repeats, device, megabytes, warmup)
    report = Report(arg.machine_of(device, 0), csv_path, json_path)
    with arg.refusals():
        measured = bench_fine_tune(model, loss or LOSSES, plan, largest=largest)
    rows: list[Cells] = []
    for row in measured:
        rows.append(row)
        report.add({"model": model}, rows)
    report.finish_case()


@app.command("listed")
def listed_command(
    tokens: arg.Tokens = None,
    vocab: arg.Size = 16384,
    dim: arg.Size = 256,
    shape: arg.Shapes = None,
    ids: Annotated[int, typer.Option(min=1, help="Of each token.")] = 64,
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    repeats: arg.Repeats = 20,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
) -> None:
    """Log-probabilities under a support of some ids a token, and with candidates; of all ids."""
    from benchmarks.listed import bench_listed
    from cce_dist.bench.report import Report

    report = Report(arg.machine_of(device, 0), csv_path, json_path)
    with arg.refusals():
        cases = arg.cases_of(["zipf"], shape, tokens, vocab, dim, dtype, device)
    for make in cases:
        with arg.refusals():
            inputs = make()
            rows = bench_listed(inputs, num_ids=ids, repeats=repeats)
        report.add(inputs.description, rows)
        report.finish_case()


@app.command("fidelity")
def fidelity_command(
    inputs: Annotated[
        list[str], typer.Option(help="A file that `bench capture` wrote; may be repeated.")
    ],
    tokens: arg.Tokens = None,
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cpu",
    threads: arg.Threads = 0,
    method: arg.Methods = None,
    keep: Annotated[
        arg.Names,
        typer.Option(
            help="Mass at which our methods keep a column, 2^-9.5 or 1e-3; may be repeated. "
            "[2^-13 to 2^-5, and their defaults]"
        ),
    ] = None,
    tenths: Annotated[bool, typer.Option(help="Also measure by the frequency of tokens.")] = True,
    repeats: arg.Repeats = 10,
    backend: arg.BackendName = "auto",
    peer_path: arg.PeerPath = None,
    peer_timeout_seconds: arg.Timeout = 120.0,
    title: Annotated[str, typer.Option(help="The record's title. [sizes and device]")] = "",
    record: arg.RecordPath = None,
    failed: arg.Failed = None,
) -> None:
    """Gradients of every method over its thresholds against float64, by token frequency.

    Methods: dense, exact, in_forward, filtered, no-tail, screened; with --peer-path Apple's cce and
    cce-kahan-full-c. The terminal shows all tokens together; the record has the tenths.
    """
    from benchmarks.evidence.records import append_rows, check_path, write_record
    from benchmarks.fidelity.candidates import DEFAULT_KEEP, candidates_of, choose_names
    from benchmarks.fidelity.fidelity import GOLDEN, bench_fidelity, record_of
    from benchmarks.fidelity.tenths import ALL
    from cce_dist.bench.methods import DeviceLostError, parse_backend, restart_without
    from cce_dist.bench.report import Report

    settings = {"backend": backend, "repeats": repeats}
    with arg.refusals():
        names = choose_names(method or (), with_apple=bool(peer_path))
        machine = arg.machine_of(device, threads, peers=names)
        keeps = [parse_power("keep", text) for text in keep or ()] or DEFAULT_KEEP
        chosen = parse_backend(backend)
        cases = arg.cases_of(list(inputs), None, tokens, 0, 0, dtype, device)
        if record is not None:
            check_path(record)
    report = Report(machine)
    try:
        for number, make in enumerate(cases):
            case = make().without_ignored()
            with arg.refusals():
                candidates = candidates_of(names, case, keeps, chosen)
                rows = bench_fidelity(
                    case,
                    candidates,
                    tenths=tenths,
                    repeats=repeats,
                    timeout_seconds=peer_timeout_seconds,
                    failed=arg.reasons_of(failed),
                    say=report.say,
                )
                if record is not None:
                    measured = record_of(
                        case, rows, machine, settings, name=record.stem, title=title
                    )
                    # The first capture's rows replace a file of an earlier command.
                    (append_rows if number else write_record)(measured, record.parent)
            shown = [row for row in rows if row["group"] == ALL and row["method"] != GOLDEN]
            report.add(case.description, [{name: row.get(name) for name in SHOWN} for row in shown])
            report.finish_case()
    except DeviceLostError as error:
        restart_without(error)


@app.command("capture")
def capture_command(
    config: Annotated[
        Path | None,
        typer.Argument(help="A config of `cce-dist train`, in place of the sizes."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for step-<n>.pt.")] = Path("runs/captured"),
    step: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Step to save after; may be repeated. [0, 10, 100, 300]"),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Train this long, and save the last step.")
    ] = None,
    tokens: arg.Size = 2048,
    vocab: Annotated[int, typer.Option(min=257)] = 256000,
    dim: arg.Size = 2304,
    layers: arg.Size = 6,
    batch: arg.Size = 16,
    sequence_length: work.SequenceLength = 1024,
    megabytes: work.Megabytes = 160.0,
) -> None:
    """Train on one rank and save what the loss sees (hidden, weight, targets) at some steps.

    The text is that of the Python installation, or the config's.
    """
    from benchmarks.fidelity.capture import capture_inputs, load_capture_config, make_capture_config

    need_modules("tokenizers")
    steps = step or ([] if seconds is not None else [0, 10, 100, 300])
    num_steps = max([*steps, 1])
    with arg.refusals():
        if config is not None:
            chosen = load_capture_config(config, num_steps)
        else:
            chosen = make_capture_config(
                vocab,
                dim,
                layers,
                megabytes,
                out / ".cache",
                steps=num_steps,
                batch=batch,
                sequence_length=sequence_length,
            )
    for path in capture_inputs(chosen, steps, tokens, out, seconds=seconds):
        typer.echo(path)


@app.command("report")
def report(
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = RECORDS,
    pages: Annotated[Path, typer.Option(help="Folder to write the pages into.")] = Path(
        "docs/notebook/evidence"
    ),
    pictures: Annotated[Path, typer.Option(help="Folder to draw the pictures into.")] = Path(
        "docs/pictures"
    ),
) -> None:
    """Make docs/notebook/evidence and docs/pictures of the records in docs/notebook/data.

    The records are in the repository, not in an installed package: start in a checkout of it. The
    same records give the same pages. Exits with 2 where there is no record, or a broken one.
    """
    from benchmarks.evidence.pictures import write_pictures
    from benchmarks.evidence.records import RecordError
    from benchmarks.evidence.report import write_report

    need_modules("matplotlib")
    if not any(records.rglob("*.json")):
        here = "which has none" if records.is_dir() else f"no folder in {Path.cwd()}"
        raise typer.BadParameter(
            f"--records must be a folder of records (*.json), got {records}, {here}: start in a "
            f"checkout of the repository, whose {RECORDS} has them, or name their folder"
        )
    try:
        paths = write_report(records, pages)
        if records == RECORDS:
            paths += write_pictures(records, pictures)
    except RecordError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        text = f"pages and figures cannot all be written to {pages}: {error.strerror}"
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(1) from None
    for path in paths:
        typer.echo(path)
