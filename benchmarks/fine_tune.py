"""Benchmark of Hugging Face's Trainer on a model made from its configuration: the model's own loss,
ours, and the peers' patches."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.fidelity.capture import make_capture_config
from cce_dist.bench.machine import synchronize
from cce_dist.bench.report import Cells, percentiles_ms
from cce_dist.bench.training import GIB
from cce_dist.integrations import transformers as integration
from cce_dist.train.data.tokens import prepare_tokens

_QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
_QWEN |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
# Name -> transformers' model type and what its configuration has.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": ("qwen2", {**_QWEN, "tie_word_embeddings": True}),
    "llama-3.2-1b": ("llama", {**_LLAMA, "head_dim": 64, "tie_word_embeddings": True}),
}
OURS: dict[str, dict[str, object]] = {
    "filtered": {"gradient": "filtered"},
    "exact": {"gradient": "exact"},
    "screened": {"logits": "screened"},
}
LOSSES = ("default", "liger", "apple", *OURS)
CACHE = Path("runs/captured/.cache")
COLUMNS = (
    *("model", "loss", "batch", "sequence", "median_ms", "p10_ms", "p90_ms"),
    *("tokens_per_s", "peak_gib", "mean_loss", "largest_batch", "failed"),
)
# Batches that `largest` tries.
BATCHES = tuple(base << power for power in range(9) for base in (4, 5, 6, 7))


@dataclass(frozen=True)
class Plan:
    """Steps of `batch` sequences of packed text."""

    batch: int
    sequence: int
    repeats: int
    device: str
    megabytes: float
    warmup: int = 5  # steps before the timed ones: the first of them compile kernels


def bench_fine_tune(
    name: str, losses: Sequence[str], plan: Plan, *, largest: bool
) -> Iterator[Cells]:
    """Yields a row for each loss: time of a step, tokens a second, memory, the steps' mean loss.

    Args: largest: also search the largest of BATCHES whose step fits the device; the plan's batch
        has been seen to fit.
    Raises:
        ValueError: there is no model or loss of this name.
    """
    unknown = sorted(set(losses) - set(LOSSES))
    if name not in MODELS or unknown:
        raise ValueError(
            f"model must be one of {list(MODELS)} and loss among {list(LOSSES)}, got {name!r} and "
            f"{unknown or list(losses)}"
        )
    rows = _packed_text(MODELS[name][1], plan)
    return (_row(name, loss, rows, plan, largest) for loss in losses)


def _packed_text(values: dict[str, Any], plan: Plan) -> torch.Tensor:
    """Returns the Python installation's text in the model's vocabulary, [num_rows, sequence]."""
    config = make_capture_config(
        *(values["vocab_size"], 256, 1, plan.megabytes),
        CACHE,
        steps=1,
    )
    tokens = prepare_tokens(config.data, print).tokens()
    whole = tokens[: len(tokens) // plan.sequence * plan.sequence].astype(np.int64)
    return torch.from_numpy(whole).view(-1, plan.sequence)


def _row(name: str, loss: str, rows: torch.Tensor, plan: Plan, largest: bool) -> Cells:
    cells: dict[str, Any] = dict.fromkeys(COLUMNS)
    cells |= {"model": name, "loss": loss, "batch": plan.batch, "sequence": plan.sequence}
    try:
        times, peak, mean = _train(name, loss, rows, plan, plan.batch, plan.warmup + plan.repeats)
        taken = percentiles_ms(times[plan.warmup :])
        rate = 1e3 * plan.batch * plan.sequence / taken["median_ms"]
        cells |= {**taken, "tokens_per_s": rate, "peak_gib": peak, "mean_loss": mean}
        if largest:
            cells["largest_batch"] = _largest(name, loss, rows, plan)
    except (ImportError, RuntimeError, torch.OutOfMemoryError) as error:
        # A peer that is not here, or that does not know the model.
        return {**cells, "failed": f"{type(error).__name__}: {error}"[:160]}
    return {**cells, "failed": ""}


def _largest(name: str, loss: str, rows: torch.Tensor, plan: Plan) -> int:
    best = plan.batch
    for batch in (each for each in BATCHES if each > plan.batch):
        try:
            _train(name, loss, rows, plan, batch, 2)
        except torch.OutOfMemoryError:
            break
        best = batch
    return best


def _train(
    name: str, loss: str, rows: torch.Tensor, plan: Plan, batch: int, steps: int
) -> tuple[list[float], float, float]:
    """Returns the seconds of each step, the peak in GiB, and the steps' mean loss."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    model_type, values = MODELS[name]
    on_gpu = plan.device == "cuda"
    gc.collect()
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **values, use_cache=False)
    with torch.device(plan.device):
        model = AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.bfloat16 if on_gpu else torch.float32
        )
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timer = _timer(torch.device(plan.device))
    with tempfile.TemporaryDirectory() as folder, _with_loss(loss, model) as patched:
        trainer = Trainer(
            model=patched,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=batch,
                learning_rate=1e-4,
                logging_steps=steps,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=not on_gpu,
            ),
            train_dataset=_Rows(rows),
            callbacks=[timer],
        )
        result = trainer.train()
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
    return timer.seconds, peak, float(result.training_loss)


class _Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences whose labels are their own tokens."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _timer(device: torch.device) -> Any:
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        """Seconds of each step, from the end of the one before."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.start = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: object) -> None:
            synchronize(device)
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: object) -> None:
            synchronize(device)
            now = time.perf_counter()
            self.seconds.append(now - self.start)
            self.start = now

    return Timer()


@contextmanager
def _with_loss(loss: str, model: Any) -> Iterator[Any]:
    """Patches the model's loss alone, and no other layer; yields the model."""
    if loss in OURS:
        with integration.patched(model, **OURS[loss]):
            yield model
        return
    if loss == "liger":
        apply: Callable[..., None] = resolve_name(
            "liger_kernel.transformers:_apply_liger_kernel_to_instance"
        )
        layers = dict.fromkeys(("rope", "rms_norm", "swiglu", "cross_entropy"), False)
        apply(model=model, fused_linear_cross_entropy=True, **layers)
    if loss == "apple":
        patch: Callable[..., Any] = resolve_name("cut_cross_entropy.transformers:cce_patch")
        model = patch(model)
    yield model
