"""`cce-dist bench logprobs` and `bench grpo`."""

from __future__ import annotations

from typing import Annotated

import typer

from cce_dist.bench import arguments as arg
from cce_dist.needs.extras import need_modules

# The columns of the terminal's table.
SHOWN = (
    *("method", "part", "repeats", "median_ms", "p10_ms", "p90_ms", "of_fastest_peer"),
    *("of_roofline", "peak_extra_mib", "logprob_error", "logprob_worst", "entropy_error"),
    *("correct_off", "grad_hidden_error", "grad_weight_error", "failed"),
)


def logprobs_command(
    inputs: arg.Inputs = None,
    tokens: arg.Tokens = None,
    vocab: arg.Size = 16384,
    dim: arg.Size = 256,
    shape: arg.Shapes = None,
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    method: Annotated[
        arg.Names,
        typer.Option(
            help="filtered, exact, invariant, filtered-plain, exact-plain, invariant-plain, dense, "
            "trl, verl, torch-compile, liger-grpo; may be repeated. [all that can run]"
        ),
    ] = None,
    peer_path: arg.PeerPath = None,
    peer_timeout_seconds: arg.Timeout = 120.0,
    repeats: arg.Repeats = 20,
    budget_seconds: arg.Budget = 2.0,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
    failed: arg.Failed = None,
) -> None:
    """Log-probabilities, entropy and accuracy with a policy's gradients: ours, TRL's, verl's,
    Liger's.

    Each token has a random advantage. Errors are against float64, for all tokens and for tenths of
    them by the target's probability: the terminal shows all tokens, files have the tenths too.
    """
    from benchmarks.contenders import choose_contenders
    from benchmarks.fidelity.tenths import ALL
    from benchmarks.rl.contenders import CONTENDERS
    from benchmarks.rl.logprobs import bench_logprobs
    from cce_dist.bench.loss import Settings
    from cce_dist.bench.machine import fresh_compiler
    from cce_dist.bench.methods import DeviceLostError, restart_without
    from cce_dist.bench.report import Report

    with arg.refusals():
        names = choose_contenders(CONTENDERS, method or (), on_gpu=device.startswith("cuda"))
        cases = arg.cases_of(inputs, shape, tokens, vocab, dim, dtype, device)
    settings = Settings(
        repeats, budget_seconds=budget_seconds, timeout_seconds=peer_timeout_seconds
    )
    report = Report(arg.machine_of(device, 0, peers=("trl", "verl", "liger")), csv_path, json_path)
    try:
        for make in cases:
            with arg.refusals():
                case = make().without_ignored()
            with fresh_compiler():
                rows = bench_logprobs(
                    case, names, settings, failed=arg.reasons_of(failed), say=report.say
                )
            report.add(case.description, rows)
            shown = [row for row in rows if row["tenth"] == ALL]
            report.finish_case([{name: row[name] for name in SHOWN} for row in shown])
    except DeviceLostError as error:
        restart_without(error)


def grpo_command(
    method: Annotated[
        arg.Names,
        typer.Option(help="dense, filtered, exact; may be repeated. [dense, filtered]"),
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, help="May be repeated. [0, 1, 2]")
    ] = None,
    steps: arg.Size = 300,
    warm_up: Annotated[int, typer.Option(min=0, help="Most supervised steps before.")] = 1000,
    prompts: Annotated[int, typer.Option(min=1, help="A step, with 8 answers each.")] = 128,
    vocab: Annotated[int, typer.Option(min=12)] = 4096,
    dim: Annotated[int, typer.Option(min=32, help="A multiple of 32.")] = 128,
    layers: arg.Size = 2,
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
) -> None:
    """GRPO runs of a small model that adds numbers, with dense log-probabilities and with ours.

    Files have a row for each step; the terminal compares each run's first ten steps with its last
    ten. A supervised warm-up, which the methods share, ends when 15 % of the answers are right.
    """
    need_modules("transformers")
    from benchmarks.rl.grpo import Plan, bench_grpo, summarize
    from cce_dist.bench.report import Cells, Report

    cells: Cells = {"V": vocab, "D": dim, "layers": layers, "prompts": prompts, "dtype": dtype}
    with arg.refusals():
        where, wanted = arg.device_of(device), arg.dtype_of(dtype)
        plan = Plan(steps, warm_up, prompts, vocab, dim, layers, where, wanted)
        report = Report(arg.machine_of(device, 0), csv_path, json_path)
        rows = bench_grpo(
            plan,
            method or ["dense", "filtered"],
            [0, 1, 2] if seed is None else seed,
            save=lambda rows: report.add(cells, rows),
        )
    report.finish_case(summarize(rows))
