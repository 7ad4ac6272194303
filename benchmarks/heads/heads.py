"""Losses on ten models' heads by numbers of tokens and inputs, a cell after another.

Rows are appended to a CSV file cell by cell. The same command again measures only the cells that
the file lacks, and several processes may write the same file.
"""

from __future__ import annotations

import csv
import functools
import gc
import io
import itertools
import operator
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cce_dist.bench.golden import sampled_reference
from cce_dist.bench.inputs import KINDS, MODELS, BenchInputs, Shape, make_inputs
from cce_dist.bench.loss import Settings, bench_loss
from cce_dist.bench.machine import fresh_compiler
from cce_dist.bench.methods import DeviceLostError, Method, describe_failure
from cce_dist.bench.report import Cells

# In the order of their weights' sizes; their vocabularies and hidden sizes are those of MODELS.
HEADS = (
    *("smollm2-135m", "qwen2.5-0.5b", "gemma3-270m", "llama3.2-1b", "llama3-8b"),
    *("qwen2.5-7b", "gemma2-2b", "deepseek-v3", "llama3-70b", "gemma3-27b"),
)
SOFTCAPS = {"gemma2-2b": 30.0}
# Heads whose steps are measured by default: small models, of which a thousand steps are soon done.
TRAINED = ("smollm2-135m", "qwen2.5-0.5b", "llama3.2-1b")
TOKENS = (1024, 8192, 32768)
KINDS_OF_ALL = ("flat", "zipf")
STEPS = ("step-10", "step-100", "step-1000")
OURS = ("filtered", "exact", "in_forward-exact", "screened")
# Of the small model: options of `bench capture`. A step has 4 x 1,024 tokens.
SEQUENCE = 1024
TRAINING = ("--layers", "4", "--batch", "4", "--sequence-length", str(SEQUENCE))
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Head:
    name: str
    vocab_size: int
    dim: int
    softcap: float | None = None


@dataclass(frozen=True)
class Plan:
    """Cells to measure: each head with each number of tokens on each kind of inputs.

    Args:
        kinds: kinds of `make_inputs`, or "step-N", the inputs of a small model with this head after
            N steps of training. Empty: "flat" and "zipf", and three steps for the heads of TRAINED.
        cache: folder of what `bench capture` writes, CACHE/HEAD/step-N.pt; files there are used.
        megabytes: size of the text that the small models train on.
    """

    heads: Sequence[Head]
    tokens: Sequence[int]
    kinds: Sequence[str]
    cache: Path
    megabytes: float = 40.0
    device: str = "cuda"

    def kinds_of(self, head: Head) -> Sequence[str]:
        return self.kinds or (*KINDS_OF_ALL, *(STEPS if head.name in TRAINED else ()))

    def file_of(self, head: Head, kind: str) -> Path:
        return self.cache / head.name / f"{kind}.pt"


def parse_head(text: str) -> Head:
    """Returns the head of a model's name, or of a text VOCABxDIM.

    Raises:
        ValueError: `text` is neither.
    """
    if text in MODELS:
        return Head(text, *MODELS[text], SOFTCAPS.get(text))
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"head must be one of {sorted(MODELS)} or VOCABxDIM, got {text!r}")
    return Head(text, *map(int, match.groups()))


def check_kinds(names: Sequence[str]) -> Sequence[str]:
    """Returns the names of kinds of inputs.

    Raises:
        ValueError: a name is neither one of KINDS nor "step-N".
    """
    for name in names:
        if name not in KINDS and not re.fullmatch(r"step-\d+", name):
            raise ValueError(f"inputs must be one of {sorted(KINDS)} or step-N, got {name!r}")
    return names


def bench_heads(
    plan: Plan,
    methods: Sequence[Method],
    settings: Settings,
    path: Path,
    *,
    machine: Mapping[str, str],
    failed: Mapping[str, str],
    say: Callable[[str], None],
) -> bool:
    """Measures the cells that the CSV file lacks, and appends their rows to it.

    A peer that fails in a cell is not tried again with other inputs of the same sizes.

    Returns:
        whether every cell was measured, and each of our gradients is right.
    Raises:
        DeviceLostError: a peer broke the CUDA context.
    """
    done = {(row["head"], int(row["N"]), row["inputs"]) for row in read_rows(path)}
    ours = {each.name for each in methods if each.is_ours}
    complete = True
    for head in plan.heads:
        every = itertools.product(plan.tokens, plan.kinds_of(head))
        cells = [(tokens, kind) for tokens, kind in every if (head.name, tokens, kind) not in done]
        if any(kind not in KINDS and not plan.file_of(head, kind).is_file() for _, kind in cells):
            say(f"{head.name}: training a small model")
            if reason := _capture(plan, head):
                say(f"{head.name}: {reason}")
                cells = [(tokens, kind) for tokens, kind in cells if kind in KINDS]
                complete = False
        for tokens, of_size in itertools.groupby(cells, key=operator.itemgetter(0)):
            # A compiled peer serves all inputs of the same sizes.
            built = [replace(each, builder=functools.cache(each.builder)) for each in methods]
            reasons = dict(failed)
            with fresh_compiler():
                for _, kind in of_size:
                    name = f"{head.name}, {tokens} tokens, {kind}"
                    try:
                        rows = _measure(plan, head, tokens, kind, built, settings, reasons)
                    except DeviceLostError:
                        raise
                    except Exception as error:
                        rows, complete = [], False
                        say(f"{name} failed: {describe_failure(error)}")
                    else:
                        cell = {"head": head.name, "inputs": kind, "N": tokens}
                        append_rows(path, [{**cell, **row, **machine} for row in rows])
                        say(f"{name}: {_in_short(rows)}")
                    # Only now are the cell's tensors unreachable.
                    gc.collect()
                    torch.cuda.empty_cache()
                    lost = {row["method"]: row["failed"] for row in rows if row["failed"]}
                    complete &= lost.keys().isdisjoint(ours)
                    reasons |= {name: why for name, why in lost.items() if name not in ours}
    return complete


def _capture(plan: Plan, head: Head) -> str:
    """Trains the head's small model on one rank, and writes the inputs of all steps of the plan.

    It has a process to itself, whose memory and process group end with it.

    Returns:
        why it failed; empty if it did not.
    """
    steps = [kind for kind in plan.kinds_of(head) if kind not in KINDS]
    folder = plan.file_of(head, steps[0]).parent.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    num_tokens = -(-max(plan.tokens) // SEQUENCE) * SEQUENCE
    sizes = ("--vocab", str(head.vocab_size), "--dim", str(head.dim), *TRAINING)
    sizes += ("--tokens", str(num_tokens), "--megabytes", str(plan.megabytes))
    command = [sys.executable, "-m", "cce_dist", "bench", "capture", *sizes, "--out", str(folder)]
    command += [word for kind in steps for word in ("--step", kind.removeprefix("step-"))]
    log = folder / "capture.log"
    with log.open("w", encoding="utf8") as file:
        # The folder is the one from which Python finds the package.
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False)
    return f"bench capture failed, see {log}" if done.returncode else ""


def _make_inputs(plan: Plan, head: Head, tokens: int, kind: str) -> BenchInputs:
    """Makes the inputs of a cell, in bf16.

    Raises:
        ValueError: a file has another head, or fewer tokens.
    """
    source = kind if kind in KINDS else str(plan.file_of(head, kind))
    shape = Shape(tokens, head.vocab_size, head.dim)
    inputs = make_inputs(source, shape, dtype=torch.bfloat16, device=plan.device)
    sizes = Shape(len(inputs.hidden), *inputs.weight.shape)
    if sizes != shape:
        raise ValueError(f"{source} must have {shape}, got {sizes}: remove it to train again")
    return replace(inputs, softcap=head.softcap)


def _measure(
    plan: Plan,
    head: Head,
    tokens: int,
    kind: str,
    methods: Sequence[Method],
    settings: Settings,
    failed: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Returns the rows of a cell, with each method's speed as a multiple of the best exact peer's.

    A peer counts as exact if it computes every column's gradient.
    """
    inputs = _make_inputs(plan, head, tokens, kind)
    rows = bench_loss(inputs, methods, settings, failed=failed, make_reference=sampled_reference)
    exact = {each.name for each in methods if each.origin == "peer" and each.exact}
    peer_times = [row["median_ms"] for row in rows if row["method"] in exact and not row["failed"]]
    size = {"V": head.vocab_size, "D": head.dim, "softcap": head.softcap}
    names = {each.name for each in methods}
    return [
        {
            **size,
            **row,
            "times_faster": min(peer_times) / row["median_ms"]
            if peer_times and row["method"] in names and not row["failed"]
            else None,
        }
        for row in rows
    ]


def _in_short(rows: Iterable[Cells]) -> str:
    parts = [
        f"{row['method']} failed" if row["failed"] else f"{row['method']} {row['median_ms']:.2f} ms"
        for row in rows
    ]
    return ", ".join(parts)


def append_rows(path: Path, rows: Sequence[Cells]) -> None:
    """Appends the rows to a CSV file at once, so that processes may share it.

    Raises:
        ValueError: the file has not all of the columns.
    """
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    if path.exists():
        with path.open(newline="", encoding="utf8") as file:
            columns = next(csv.reader(file), columns)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    if not path.exists():
        writer.writeheader()
    for row in rows:
        floats = {k: f"{value:.6g}" for k, value in row.items() if isinstance(value, float)}
        writer.writerow({**row, **floats})
    with path.open("a", newline="", encoding="utf8") as file:
        file.write(text.getvalue())


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file; none if there is no file.

    Heads between rows, of processes that began at once or of files put together, are left out.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf8") as file:
        return [row for row in csv.DictReader(file) if row["head"] != "head"]
