"""`cce-dist plan model` and `cce-dist plan times`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cce_dist.planner.cost.hardware import HARDWARE, Hardware, find_hardware, require_units
from cce_dist.planner.cost.job import ATTENTIONS, LOSSES, OVER, SOFTWARE, Job, Software
from cce_dist.planner.models.huggingface import read_config
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import MODELS, find_model
from cce_dist.planner.names import nearest_name, read_json
from cce_dist.planner.orders.measured import predict_file
from cce_dist.planner.orders.schedules import NAMES
from cce_dist.planner.plan import Plan, make_plan
from cce_dist.planner.report import describe
from cce_dist.planner.search import (
    best_plan,
    largest_microbatch,
    largest_of_layouts,
    nearest_that_fits,
    vocab_pays,
)

from .output import JsonPath, check_output, hand_over, refusals
from .plan_plot import plot_plan, plot_timeline, require_picture
from .plan_tables import show_plan, show_prediction


def one_of(help: str, *words: str) -> Any:
    """Makes an option whose help lists the words that `Job` allows."""
    # rich takes words in brackets for markup, and leaves them out.
    return typer.Option(help=f"{help} One of: {', '.join(words)}.")


def flag(name: str, help: str) -> Any:
    """Makes an option that has no opposite."""
    return typer.Option(f"--{name}", help=help)


PlotPath = Annotated[
    Path | None, typer.Option("--plot", help="Draw memory and timeline: PNG, PDF or SVG.")
]


def model_command(
    name: Annotated[str, typer.Argument(help="A preset, or a Hugging Face config.json.")],
    hardware: Annotated[
        str, typer.Option(help=f"{', '.join(HARDWARE)}, or a JSON file of its numbers.")
    ] = "h200",
    number: Annotated[
        list[str] | None,
        typer.Option(
            "--number",
            help="KEY=VALUE of hardware or software, in bytes, FLOP/s, seconds: memory=8e10. "
            "May be repeated; the error for an unknown key lists them all.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Number of layers, in place of the model's.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Layers of each stage, as 7,7,7,5; else the best.")
    ] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    microbatch: Annotated[int, typer.Option(help="Sequences of a microbatch.")] = 1,
    microbatches: Annotated[
        int, typer.Option(help="Microbatches of a step, on a data-parallel rank.")
    ] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.")] = 1,
    chunks: Annotated[
        int, typer.Option("--virtual", "--chunks", help="Stages of a pipeline rank.")
    ] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks, of the dp * cp.")] = 1,
    sequence_parallel: Annotated[
        bool, flag("sequence-parallel", "Split tokens between layers over the tp ranks.")
    ] = False,
    distributed_optimizer: Annotated[
        bool, flag("distributed-optimizer", "Split its states over the dp * cp ranks.")
    ] = False,
    overlap_data: Annotated[
        bool, flag("overlap-data", "Sum over data-parallel ranks during the passes.")
    ] = False,
    overlap_tensor: Annotated[
        bool, flag("overlap-tensor", "Tensor-parallel ranks send during products.")
    ] = False,
    gradients: Annotated[str, one_of("Dtype of their sum.", "fp32", "bf16")] = "fp32",
    precision: Annotated[
        str, one_of("mixed: fp32 weights and moments beside bf16 ones.", "mixed", "bf16", "fp32")
    ] = "mixed",
    recompute: Annotated[
        str, one_of("Selective: attention's scores.", "none", "selective", "full")
    ] = "none",
    attention: Annotated[
        str, one_of("auto: cudnn with --software megatron, else flash.", *ATTENTIONS)
    ] = "auto",
    dropout: Annotated[bool, flag("dropout", "Dropout as in GPT-3.")] = False,
    loss: Annotated[str, one_of("exact and filtered are ours.", *LOSSES)] = "native",
    vocab_over: Annotated[
        str, one_of("Holders of the vocabulary: the last stage, or all pp ranks (ours).", *OVER)
    ] = "last",
    schedule: Annotated[
        str, one_of("auto: 1f1b, interleaved with chunks, vocab with --vocab-over.", "auto", *NAMES)
    ] = "auto",
    software: Annotated[str, one_of("Whose kernels.", *SOFTWARE)] = "megatron",
    kept_columns: Annotated[
        int, typer.Option(help="Columns that filtered computes again for a block of 128 tokens.")
    ] = 6000,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> None:
    """Time and memory of a training step, stage by stage, and a layout of its layers."""
    options = dict(locals())  # by name, for those that are fields of `Job`
    with refusals():
        check_output("--json", json_path)
        require_picture(plot_path)
        model, notes = read_model(name)
        model = model if layers is None else replace(model, layers=layers)
        numbers, kernels = _numbers(hardware, software, number or [])
        options["software"] = kernels
        job = Job(**{key: options[key] for key in Job.__dataclass_fields__})
        best = best_plan(model, job, numbers) if layout is None else None
        plan = best or make_plan(model, job, numbers, _layout(layout or ""))
        pays = vocab_pays(model, job, numbers, best=best)
        mine = largest_microbatch(plan)
        largest = max(mine, largest_of_layouts(model, job, numbers))
        report = describe(plan, pays, largest=largest, largest_of_layout=mine, notes=notes)
        advice = "" if plan.fits else _advice(plan, is_asked=layout is not None)
        hand_over(report, json_path, lambda: show_plan(plan, report))
        if plot_path is not None:
            plot_plan(plan, plot_path)
    if not plan.fits:
        typer.echo(f"error: does not fit: {plan.binds}; {advice}", err=True)
        raise typer.Exit(1)


def _advice(plan: Plan, *, is_asked: bool) -> str:
    """Returns the end of an error: changes with which a plan that does not fit would."""
    layout = plan.layout if is_asked else None
    nearest = nearest_that_fits(plan.model, plan.job, plan.hardware, layout)
    if nearest.fits is not None:
        return f"fits with {nearest.fits}"
    return f"nothing tried fits, up to {nearest.tried}: more ranks, or a smaller model"


def read_model(name: str) -> tuple[Model, tuple[str, ...]]:
    """Returns the model of a preset's name, of a config.json or of its folder; and notes on it."""
    return read_config(name) if Path(name).exists() else (find_model(name), ())


def _numbers(hardware: str, software: str, pairs: list[str]) -> tuple[Hardware, Software]:
    """Returns the hardware and the software, with the numbers of `pairs`.

    Raises:
        ValueError: neither has a key, or a value is no number.
    """
    if software not in SOFTWARE:
        raise ValueError(f"software must be one of {list(SOFTWARE)}, got {software!r}")
    chosen = SOFTWARE[software]
    ours = [key for key, value in vars(chosen).items() if isinstance(value, bool | int | float)]
    keys = list(Hardware.__dataclass_fields__)
    values = _hardware(hardware)
    changes: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in keys + ours:
            hint = nearest_name(key, keys + ours)
            raise ValueError(f"number must be one of {keys + ours}, got {key!r}{hint}")
        (changes if key in ours else values)[key] = _number(key, value)
    require_units(values)
    for key, value in changes.items():
        if isinstance(vars(chosen)[key], bool):
            if value not in (0, 1):
                raise ValueError(f"{key} must be 0 or 1, got {value!r}")
            changes[key] = bool(value)
    return Hardware(**values), replace(chosen, **changes)


def _number(key: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key} must be a number, got {value!r}") from None


def _hardware(name: str) -> dict[str, Any]:
    """Reads a preset's numbers, or a file's."""
    if not Path(name).is_file():
        return dict(vars(find_hardware(name)))
    values = read_json(Path(name), "hardware must be a readable JSON file")
    if not isinstance(values, dict):
        raise ValueError(f"hardware must be an object, got {type(values).__name__}")
    missing = [key for key in ("flops", "memory", "hbm", "nvlink") if key not in values]
    if missing:
        raise ValueError(f"hardware must have {missing}, got {sorted(values)}")
    known = Hardware.__dataclass_fields__
    for key in values:
        if key not in known:
            hint = nearest_name(key, known)
            raise ValueError(f"keys of {name} must be among {list(known)}, got {key!r}{hint}")
    return {key: _number(key, value) for key, value in values.items()}


def _layout(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"layout must be numbers of layers, 7,7,7,5, got {text!r}") from None


def models_command() -> None:
    """Names of the presets, and how many parameters they have."""
    for name, model in MODELS.items():
        typer.echo(f"{name:16} {model.parameters:>16,}")


def times_command(
    path: Annotated[Path, typer.Argument(help="JSON: forward, backward, microbatches, ...")],
    schedule: Annotated[str | None, one_of("Instead of the file's.", *NAMES)] = None,
    microbatches: Annotated[int | None, typer.Option(help="Instead of the file's.")] = None,
    plot_path: PlotPath = None,
) -> None:
    """A step's time from measured times of its stages, in the same unit."""
    with refusals():
        require_picture(plot_path)
        prediction = predict_file(path, schedule=schedule, microbatches=microbatches)
        show_prediction(prediction)
        if plot_path is not None:
            plot_timeline(prediction, plot_path)
