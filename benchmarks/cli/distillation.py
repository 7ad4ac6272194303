"""`cce-dist bench distill`, `bench distill-ranks`, which torchrun starts on every rank, and `bench
students`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.cli import work as run
from cce_dist.bench import arguments as arg
from cce_dist.bench.report import Cells
from cce_dist.needs.extras import need_modules

# The columns of the terminal's table.
SHOWN = (
    *("method", "part", "repeats", "median_ms", "p10_ms", "p90_ms", "of_fastest_peer"),
    *("of_bound", "peak_extra_mib", "kl_error", "loss_error"),
    *("grad_hidden_error", "grad_weight_error", "failed"),
)

Measured = Annotated[
    Literal["forward_kl", "reverse_kl", "jsd"],
    typer.Option(
        help="KL(teacher || student), KL(student || teacher), or Jensen-Shannon with beta 0.5."
    ),
]
StudentDim = Annotated[int, typer.Option(min=4, help="Of the student.")]
TeacherDim = Annotated[int | None, typer.Option(min=4, help="[twice the student's hidden size]")]
Temperature = Annotated[float, typer.Option(help="Divides both models' logits.")]


def distill_command(
    inputs: Annotated[
        Path | None, typer.Option(help="The student's file of `bench capture`. [made]")
    ] = None,
    teacher_inputs: Annotated[
        Path | None, typer.Option(help="The teacher's, of the same text and step.")
    ] = None,
    tokens: arg.Tokens = None,
    vocab: arg.Size = 16384,
    dim: StudentDim = 256,
    shape: arg.Shapes = None,
    teacher_dim: TeacherDim = None,
    temperature: Temperature = 1.0,
    divergence: Measured = "forward_kl",
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    method: Annotated[
        arg.Names,
        typer.Option(
            help="filtered, screened, in_forward, exact, dense, trl, torch-compile, "
            "torch-compile-chunked, liger-chunked, liger, liger-fp32, fla-16bit, fla; may be "
            "repeated. [all that can run]"
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
    """Distillation's divergence and its gradients: ours, TRL's, Liger's, FLA's.

    A shape is the student's. Unless two files have trained ones, both models are made at random,
    with the frequencies and contexts of one text, and a forward KL of about 0.4 nats. Errors are
    against float64, for all tokens and for tenths of them: by the teacher's entropy, and by the
    frequency of ids. The terminal shows all tokens, files have the tenths too. `products` has the
    bare matrix products of both models' logits, `cross-entropy` the student's alone with filtered
    gradients. `of_bound` is the time over the products' and, with gradients, that cross-entropy's
    backward.
    """
    from benchmarks.contenders import choose_contenders
    from benchmarks.distillation.contenders import CONTENDERS
    from benchmarks.distillation.distill import bench_distill, describe, golden_of
    from benchmarks.distillation.inputs import load_models, make_models
    from benchmarks.fidelity.tenths import ALL
    from cce_dist.bench.loss import Settings
    from cce_dist.bench.machine import fresh_compiler, version_of
    from cce_dist.bench.methods import DeviceLostError, restart_without
    from cce_dist.bench.report import Report

    with arg.refusals():
        names = choose_contenders(CONTENDERS, method or (), on_gpu=device.startswith("cuda"))
        if (inputs is None) != (teacher_inputs is None):
            raise ValueError(
                "inputs and teacher-inputs must be given together, got "
                f"inputs={inputs} and teacher-inputs={teacher_inputs}"
            )
        shapes = arg.shapes_of(shape, tokens, vocab, dim, of_file=inputs is not None)
        where, wanted = arg.device_of(device), arg.dtype_of(dtype)
    settings = Settings(
        repeats, budget_seconds=budget_seconds, timeout_seconds=peer_timeout_seconds
    )
    machine = arg.machine_of(device, 0, peers=("trl", "liger"))
    machine["peers"] += f", fla-core {version_of('fla-core', 'unknown')}"
    report = Report(machine, csv_path, json_path)
    try:
        for parsed in shapes:
            with arg.refusals():
                common = {"temperature": temperature, "dtype": wanted, "device": where}
                if inputs is None or teacher_inputs is None:
                    student, teacher = make_models(parsed, teacher_dim or 2 * parsed.dim, **common)
                else:
                    student, teacher = load_models(inputs, teacher_inputs, parsed, **common)
            teacher = dataclasses.replace(teacher, divergence=divergence)
            golden = golden_of(student, teacher)
            about = describe(student, teacher, golden)
            report.say(", ".join(f"{name} {value}" for name, value in about.items()))
            with fresh_compiler():
                rows = bench_distill(
                    *(student, teacher, golden, names, settings),
                    failed=arg.reasons_of(failed),
                    say=report.say,
                )
            report.add(about, rows)
            shown = [row for row in rows if row["group"] == ALL]
            report.finish_case([{name: row[name] for name in SHOWN} for row in shown])
    except DeviceLostError as error:
        restart_without(error)


def distill_ranks_command(
    size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Ranks of a group; may be repeated. [every divisor of all ranks]"),
    ] = None,
    tokens: arg.Tokens = None,
    vocab: arg.Size = 16384,
    dim: StudentDim = 256,
    shape: arg.Shapes = None,
    teacher_dim: TeacherDim = None,
    temperature: Temperature = 1.0,
    divergence: Measured = "forward_kl",
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    repeats: arg.Repeats = 10,
    method: Annotated[
        arg.Names,
        typer.Option(help="filtered, screened, in_forward, exact; may be repeated. [filtered]"),
    ] = None,
    timeout_seconds: arg.CollectiveTimeout = 120.0,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
) -> None:
    """Distillation where ranks share both models' vocabulary; start it with torchrun.

    torchrun --nproc-per-node 2 -m cce_dist bench distill-ranks --shape 8192x151936x2048

    The models are those of `bench distill`. `one matmul` and `of_matmul` are of the student's
    product alone.
    """
    from benchmarks.distillation.distill import describe, golden_of
    from benchmarks.distillation.inputs import make_models
    from benchmarks.distillation.ranks import GRADIENTS, method_of
    from cce_dist.bench.ranks import bench_ranks, joined, make_places
    from cce_dist.bench.report import Report

    with arg.refusals():
        names = method or ["filtered"]
        if unknown := sorted(set(names) - set(GRADIENTS)):
            raise ValueError(f"method must be among {', '.join(GRADIENTS)}, got {unknown}")
        shapes, wanted = arg.shapes_of(shape, tokens, vocab, dim), arg.dtype_of(dtype)
        context = joined(device, timeout_seconds)
    with arg.refusals(), context as job:
        sizes = size or [n for n in range(1, job.size + 1) if job.size % n == 0]
        report = Report(arg.machine_of(str(job.device), 0, job.size), csv_path, json_path)
        for parsed in shapes:
            common = {"temperature": temperature, "dtype": wanted, "device": job.device}
            student, teacher = make_models(parsed, teacher_dim or 2 * parsed.dim, **common)
            teacher = dataclasses.replace(teacher, divergence=divergence)
            golden = golden_of(student, teacher)
            about = describe(student, teacher, golden)

            def save(rows: list[Cells], about: dict[str, str | int] = about) -> None:
                if job.is_main:
                    report.add(about, rows)

            places = make_places(job, sizes, parsed.vocab_size, parallel=True)
            methods = [method_of(name, teacher) for name in names]  # pyright: ignore[reportArgumentType]
            gradients = golden.gradients
            bench_ranks(job, student, methods, places, repeats=repeats, golden=gradients, save=save)
            report.finish_case()


def students_command(
    context: typer.Context,
    vocab: Annotated[
        list[int] | None, typer.Option(min=257, help="May be repeated. [32768, 131072]")
    ] = None,
    divergence: Annotated[
        arg.Names,
        typer.Option(help="forward_kl, jsd, topk or cross_entropy; may be repeated. [all]"),
    ] = None,
    method: Annotated[
        arg.Names, typer.Option(help="dense, reordered or ours; may be repeated. [all]")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, help="May be repeated. [0, 1, 2]")
    ] = None,
    dim: Annotated[int, typer.Option(min=2, help="Of the student.")] = 384,
    layers: Annotated[int, typer.Option(min=1, help="Of the student.")] = 4,
    teacher_dim: Annotated[int, typer.Option(min=2)] = 1024,
    teacher_layers: arg.Size = 8,
    batch: arg.Size = 8,
    sequence_length: run.SequenceLength = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Of a student.")] = 300,
    teacher_steps: arg.Size = 1000,
    evaluations: run.Evaluations = 3,
    held_out_tokens: arg.Size = 65536,
    lr: Annotated[float, typer.Option(help="Highest of a student.")] = 1e-3,
    teacher_lr: Annotated[float, typer.Option(help="Highest of the teacher.")] = 6e-4,
    warmup: run.Warmup = 40,
    megabytes: run.Megabytes = 80.0,
    data: run.Data = None,
    work_slice: run.Slice = "0/1",
    retry: run.Retry = False,
    prepare_only: run.PrepareOnly = False,
    threads: arg.Threads = 0,
    record: run.RecordFile = Path("docs/notebook/data/evidence/distillation/students.json"),
    title: run.Title = "Small students of a trained teacher, on real text",
    cache: run.Cache = Path("runs/students"),
) -> None:
    """Distil small students from a trained teacher on real text, by dense logits and by ours, and
    record what they predict.

    For each vocabulary a teacher is trained once, with cross-entropy. `topk` is forward KL from its
    64 most probable ids at each token and the rest as one class; `cross_entropy` has no teacher.
    `dense` is eager torch with fp32 softmaxes: `bench distill` compares times with compiled peers.
    `reordered` is `dense` with tokens and vocabulary in reverse, to show what rounding alone does.
    All methods start with the same weights and see the same batches; a step's time has the
    teacher's layers in it. In bf16 on a GPU, else in fp32. Each finished run is appended to the
    record at once. The same command again goes on; processes with one record and cache, each with
    its --slice, share the work. The table compares all of the record's runs after their last step.
    """
    import torch

    from benchmarks.converge.plan import parse_slice
    from benchmarks.distillation.student_losses import DIVERGENCES, METHODS
    from benchmarks.distillation.students import (
        StudentPlan,
        StudentSizes,
        StudentWork,
        train_students,
    )
    from benchmarks.evidence.distillation import summarize, times_of
    from benchmarks.evidence.records import check_path, make_record
    from cce_dist.bench.report import Report

    need_modules("tokenizers")
    on_gpu = torch.cuda.is_available()
    with arg.refusals():
        check_path(record)
        plan = StudentPlan(
            vocab_sizes=tuple(vocab or (32768, 131072)),
            divergences=tuple(divergence or DIVERGENCES),
            methods=tuple(method or METHODS),
            seeds=tuple([0, 1, 2] if seed is None else seed),
            work_slice=parse_slice(work_slice),
        )
        # The other options of sizes are the fields of StudentSizes.
        names = {field.name for field in dataclasses.fields(StudentSizes)} - {"dtype"}
        values = {name: context.params[name] for name in names}
        sizes = StudentSizes(**values, dtype="bfloat16" if on_gpu else "float32")
        text = ", ".join(path.name for path in data or ()) or "of the Python installation"
        settings = {**dataclasses.asdict(sizes), "text": text}
        machine = arg.machine_of("cuda" if on_gpu else "cpu", threads)
        empty = make_record(
            "distillation", record.stem, title, machine, seeds=plan.seeds, settings=settings
        )
        work = StudentWork(plan, sizes, empty, record.parent, cache, tuple(data or ()))
        if prepare_only:
            return run.prepare_work(work, sizes.student, ("random",))
        lasted = run.train_work(
            work, lambda ranks: train_students(work, ranks, typer.echo, retry=retry)
        )
    if not lasted:
        raise typer.Exit(1)
    report, rows = Report(work.record.machine), work.recorded()
    for name, shown in (("held-out text", summarize(rows)), ("steps", times_of(rows))):
        report.add({"students,": name}, shown)
        report.finish_case()
