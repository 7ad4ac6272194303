"""Jobs of torchtitan's own Trainer over gloo, in the ranks of a pool of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

VOCABULARY, LENGTH = 300, 16
MODULE = "cce_dist.integrations.torchtitan"
SWITCHED_ON = f"--experimental.custom_import {MODULE} --model.converters cce"
SIZES = """
    --model.name tiny --model.flavor tiny --training.seq_len 16 --training.local_batch_size 4
    --training.mixed_precision_param float32 --training.max_norm 100 --optimizer.lr 1e-2
    --lr_scheduler.warmup_steps 2 --debug.seed 0 --activation_checkpoint.mode none
"""


def import_torchtitan() -> None:
    """Imports torchtitan for CPUs: without an accelerator it takes CUDA for granted."""
    with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
        import torchtitan.models.llama3
        import torchtitan.train  # noqa: F401


class Batches:
    """Token ids of each data-parallel rank's own; every batch lacks another number of labels."""

    def __init__(self, dp_rank: int = 0, seed: int = 0, **context: object) -> None:
        self.generator = torch.Generator().manual_seed(100 * seed + dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            # Ids of a skewed distribution, so that there is something to learn.
            ids = torch.rand(4, LENGTH + 1, generator=self.generator).pow(4) * VOCABULARY
            labels = ids.long()[:, 1:].clone()
            ignored = torch.randint(1, LENGTH, (4, 1), generator=self.generator)
            labels[torch.arange(LENGTH) < ignored] = -100
            yield {"input": ids.long()[:, :-1]}, labels


class Metrics:
    """The losses, in place of a processor that asks a GPU for its memory."""

    color = mock.Mock(blue="", red="", yellow="", reset="")
    device_memory_monitor = mock.Mock(
        device_name="",
        **{"get_peak_stats.return_value": mock.Mock(max_reserved_gib=0.0, max_reserved_pct=0.0)},
    )
    ntokens_since_last_log = 0

    def __init__(self, *context: object) -> None:
        self.losses: list[float] = []
        self.validation: list[float] = []
        self.norms: list[float] = []
        self.data_loading_times: list[float] = []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, average: Any, largest: Any, norm: float, **extra: object) -> None:
        self.losses.append(float(average))
        self.norms.append(norm)

    def log_validation(self, loss: Any, step: int) -> None:
        self.validation.append(float(loss))

    def close(self) -> None: ...


def sums(model: Any) -> None:
    """FSDP's gradients are sums, in torchtitan by a factor of 1 that gloo does not know."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def tiny_spec() -> Any:
    from torchtitan.models import llama3

    args = llama3.TransformerModelArgs(
        dim=32, n_layers=1, n_heads=4, vocab_size=VOCABULARY, max_seq_len=64
    )
    return dataclasses.replace(
        llama3.get_train_spec(),
        model_args={"tiny": args, "two_layers": dataclasses.replace(args, n_layers=2)},
        build_tokenizer_fn=None,
        build_dataloader_fn=Batches,
        build_metrics_processor_fn=Metrics,
    )


def spec_of_experts() -> Any:
    """A tiny Qwen3 with experts, whose router's bias the optimizer's hook balances."""
    from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
    from torchtitan.models import qwen3
    from torchtitan.models.moe import MoEArgs

    args = qwen3.Qwen3ModelArgs(
        **{"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8},
        **{"vocab_size": VOCABULARY, "max_seq_len": 64, "moe_enabled": True, "moe_inter_dim": 16},
        moe_args=MoEArgs(num_experts=4, top_k=2, use_grouped_mm=False),
    )
    return dataclasses.replace(
        tiny_spec(),
        model_cls=qwen3.Qwen3Model,
        model_args={"tiny": args},
        parallelize_fn=qwen3.get_train_spec().parallelize_fn,
        build_optimizers_fn=build_optimizers_with_moe_load_balancing,
    )


def count_tokens(experts: Tensor, bins: int, **bounds: int) -> Tensor:
    return torch.bincount(experts.flatten(), minlength=bins)


@contextlib.contextmanager
def on_a_cpu() -> Iterator[None]:
    """Takes away what torchtitan does on GPUs alone, and what it warns of on CPUs."""
    from torchtitan.components import validate

    def held_out(dp_rank: int, **context: object) -> Batches:
        return Batches(dp_rank, seed=1)

    with (
        mock.patch(
            "torchtitan.models.llama3.infra.parallelize.disable_fsdp_gradient_division", sums
        ),
        mock.patch("torchtitan.distributed.utils.set_pg_timeouts"),
        mock.patch("time.sleep"),
        # torch has none of integers for CPUs.
        mock.patch("torch.histc", count_tokens),
        mock.patch.object(validate, "build_text_validation_dataloader", held_out),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype")
        # torch.compile's own, of the hidden states as of logits.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", ".* may not have complete support on cpu device mesh")
        yield


def curves(group: Any, arguments: str, *, dense: bool = False) -> dict[str, Any]:
    """Runs a job to its end; returns its losses, gradients' norms, held-out losses, log lines."""
    from torchtitan.components import loss
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    words = [*SIZES.split(), *arguments.split(), *(() if dense else SWITCHED_ON.split())]
    # A name that torchtitan looks up when it builds the loss.
    of_logits = loss.cross_entropy_loss if dense or "validation.enable" in arguments else refuse
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("cce_dist.integrations")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    with (
        on_a_cpu(),
        mock.patch.dict(train_spec._extra_train_specs, tiny=tiny_spec(), experts=spec_of_experts()),
        mock.patch.dict(os.environ, LOCAL_RANK=str(group.rank())),
        mock.patch.object(loss, "cross_entropy_loss", of_logits),
    ):
        trainer = Trainer(ConfigManager().parse_args(words))
        trainer.train()
    logger.removeHandler(handler)
    gc.enable()  # the Trainer collects at steps of its own
    metrics = trainer.metrics_processor
    names = ("losses", "norms", "validation")
    return {**{name: getattr(metrics, name) for name in names}, "lines": lines}


def both(group: Any, arguments: str, ours: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs a job with torchtitan's loss; and with ours, and arguments for it alone."""
    return curves(group, arguments, dense=True), curves(group, f"{arguments} {ours}")


def refuse(*args: object) -> Tensor:
    raise AssertionError("torchtitan's loss of logits was called")


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(group: Any) -> list[str]:
    """What jobs are told that the converter does not support, before their first step."""
    from torchtitan.components.loss import build_mse_loss
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec

    from cce_dist.integrations.torchtitan import Converter, build_loss_fn

    spec = tiny_spec()
    model = spec.model_cls(spec.model_args["tiny"])
    other = dataclasses.replace(spec, build_loss_fn=build_mse_loss)

    def config(arguments: str) -> Any:
        custom = f"--job.custom_config_module {MODULE} --model.converters cce"
        return ConfigManager().parse_args(f"{SIZES} {custom} {arguments}".split())

    def converted(arguments: str) -> None:
        Converter(config(arguments), mock.Mock()).convert(model)

    def loss_of(hidden: Tensor) -> Tensor:
        return build_loss_fn(config(""))(hidden, torch.zeros(2, 8, dtype=torch.int64))

    with mock.patch.dict(train_spec._extra_train_specs, tiny=spec, other=other):
        order = error_of(lambda: converted("--model.converters cce,quantize.linear.float8"))
        loss = error_of(lambda: converted("--model.name other"))
        converted("")
        head = error_of(lambda: converted(""))
    output = model(torch.zeros(2, 8, dtype=torch.int64))
    changed = error_of(lambda: loss_of(output * 2))
    wide = output.repeat(1, 1, 2)
    wide.loss_head = model.output
    exclusive = "--cce.gradient exact --cce.logits screened"
    return [
        order,
        loss,
        head,
        changed,
        error_of(lambda: loss_of(wide)),
        error_of(lambda: build_loss_fn(config(exclusive))),
    ]


def shapes_and_options(group: Any) -> dict[str, Any]:
    """A converted model's output in train() and eval(), and an option of a command line."""
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec

    from cce_dist.integrations.torchtitan import Converter

    custom = f"--job.custom_config_module {MODULE} --model.converters cce --cce.gradient exact"
    config: Any = ConfigManager().parse_args(f"{SIZES} {custom}".split())
    spec = tiny_spec()
    model = spec.model_cls(spec.model_args["tiny"])
    with mock.patch.dict(train_spec._extra_train_specs, tiny=spec):
        Converter(config, mock.Mock()).convert(model)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    shapes = {name: tuple(getattr(model, name)()(ids).shape) for name in ("train", "eval")}
    return {**shapes, "gradient": config.cce.gradient}
