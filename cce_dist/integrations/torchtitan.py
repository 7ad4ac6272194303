"""The model converter "cce" of torchtitan: training without logits.

docs/guide/frameworks/torchtitan.md says what it computes and what it refuses. In a job:

    --experimental.custom_import cce_dist.integrations.torchtitan --model.converters cce

torchtitan imports this module, which registers the converter, and lets every TrainSpec that has
torchtitan's cross-entropy build its loss by `build_loss_fn`. A job without the converter trains as
before.
"""

# Without `from __future__ import annotations`: torchtitan reads the types of JobConfig's fields.

import dataclasses
import functools
from typing import Any, cast

import torch
import torchtitan.protocols.train_spec as train_specs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.components.loss import IGNORE_INDEX, LossFunction, build_cross_entropy_loss
from torchtitan.config import JobConfig as TitanConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import TrainSpec

from cce_dist import LinearCrossEntropy
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.log import logger
from cce_dist.options import Backend, GradientMode, LogitsMode

NAME = "cce"


@dataclasses.dataclass
class CCE:
    """Options of the loss, the section [cce] of a job's configuration: `linear_cross_entropy`'s."""

    gradient: GradientMode = "filtered"
    logits: LogitsMode = "full"
    backend: Backend = "auto"


@dataclasses.dataclass
class JobConfig:
    """torchtitan's configuration with the section [cce], for `--job.custom_config_module`."""

    cce: CCE = dataclasses.field(default_factory=CCE)


class _Alias(torch.autograd.Function):
    """Returns its input's memory as a tensor that is not a view, as FSDP's hooks need a module's
    output."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatible]
        return grads[0]


class LossHead(nn.Linear):
    """An output layer that returns its input while it trains: `build_loss_fn`'s loss multiplies.

    In eval() it returns logits. It takes the place of a layer's class, so that the layer's weight,
    its names in checkpoints and whatever parallelises it stay.
    """

    # torchtitan's plan of tensor parallelism leaves the layer's output split over its last dim.
    splits_output: bool

    def __call__(self, hidden: Tensor) -> Tensor:
        """Calls `forward` between the layer's hooks, and names this layer to the loss."""
        if not self.training:
            return super().__call__(hidden)
        if isinstance(self, FSDPModule):
            # The loss reads the gathered weight after this call, and its backward reads it before
            # FSDP's own hook could gather it again.
            self.set_reshard_after_forward(False, recurse=False)
        output = super().__call__(hidden)
        output.loss_head = self
        return output

    def forward(self, input: Tensor) -> Tensor:
        """Returns the input, or logits in eval()."""
        if not self.training:
            return super().forward(input)
        if not isinstance(input, DTensor):
            return _Alias.apply(input)  # pyright: ignore[reportReturnType]
        if not self.splits_output:
            return input
        # ColwiseParallel would split D over the ranks, which the loss would have to gather again.
        # As parts of a tensor W times as wide the whole hidden states pass as they are.
        return DTensor.from_local(input.to_local(), input.device_mesh, [Shard(-1)], run_check=False)


def _loss_of(
    loss: LinearCrossEntropy,
    output: Tensor,  # [B, T, D], or a DTensor of parts of that shape
    labels: Tensor,  # [B, T] int64
    weight: Tensor,  # [V, D], or a DTensor Shard(0)
    bias: Tensor | None,
) -> Tensor:
    """Computes the loss of a `LossHead`'s output, the same on all tensor-parallel ranks."""
    hidden = output.to_local() if isinstance(output, DTensor) else output
    if hidden.shape != (*labels.shape, weight.shape[1]):
        raise PatchError(
            f"the output layer's result must have shape {[*labels.shape, weight.shape[1]]}, of "
            f"labels and D, got {list(hidden.shape)}: {NAME!r} knows torchtitan's own plan of "
            'tensor parallelism for "output"'
        )
    if not isinstance(weight, DTensor):
        return loss(hidden, weight, labels, bias=bias)
    hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    return loss(hidden, weight, labels, bias=bias).to_local()


def build_loss_fn(job_config: TitanConfig, **context: object) -> LossFunction:
    """Builds the loss of a job, as the `build_loss_fn` of a TrainSpec does.

    Args: context: what torchtitan passes to such functions beside the configuration.
    Returns:
        With the converter "cce" a function of the model's output and labels [B, T] that returns the
        summed cross-entropy, fp32 []: of hidden states without logits where the model trains, of
        logits by torchtitan's function where it is in eval(). Else torchtitan's function.
    Raises:
        ValueError: options of [cce] that exclude each other.
    Collectives: `linear_cross_entropy`'s, on the tensor-parallel group.
    """
    loss_of_logits = build_cross_entropy_loss(job_config, **context)
    if NAME not in job_config.model.converters:
        return loss_of_logits
    options = getattr(job_config, NAME, CCE())
    loss = LinearCrossEntropy(
        reduction="sum", ignore_index=IGNORE_INDEX, **dataclasses.asdict(options)
    )
    loss_of_hidden = _loss_of
    if job_config.compile.enable and "loss" in job_config.compile.components:
        loss_of_hidden = torch.compile(loss_of_hidden, backend=job_config.compile.backend)
    logger.info(
        f"{NAME}: linear_cross_entropy with gradient={options.gradient}, logits={options.logits}, "
        f"backend={options.backend} replaces torchtitan's output layer and cross-entropy in "
        f"training. Take {NAME!r} out of model.converters to switch it off"
    )

    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        head = getattr(output, "loss_head", None)
        if head is not None:
            return loss_of_hidden(loss, output, labels, head.weight, head.bias)
        if torch.is_grad_enabled():
            raise PatchError(
                "the loss must get the model's output as the output layer returned it in train(), "
                f"got another tensor: take {NAME!r} out of model.converters where the job changes "
                "logits"
            )
        return loss_of_logits(output, labels)

    return loss_fn


class Converter:
    """The model converter "cce": the model's output layer becomes a `LossHead`.

    Raises:
        PatchError: another converter comes after this one, or the job has a loss of its own.
    """

    def __init__(self, job_config: TitanConfig, parallel_dims: ParallelDims) -> None:
        converters, name = job_config.model.converters, job_config.model.name
        if converters[-1] != NAME:
            raise PatchError(f"{NAME!r} must be the last of model.converters, got {converters}")
        built_by = train_specs.get_train_spec(name).build_loss_fn
        if built_by is not build_loss_fn:
            raise PatchError(
                f"the TrainSpec {name!r} must build torchtitan's cross-entropy, got "
                f"{built_by.__module__}.{built_by.__qualname__}: take {NAME!r} out of "
                f"model.converters, or set build_loss_fn to {__name__}.build_loss_fn"
            )
        self.splits_output = not job_config.parallelism.disable_loss_parallel

    def convert(self, model: nn.Module) -> None:
        """Makes the output layer of a model that is not parallelised yet a `LossHead`.

        Raises:
            PatchError: the model's `output` is not a plain nn.Linear, as a quantised layer is not.
        """
        head = getattr(model, "output", None)
        if type(head) is not nn.Linear:
            raise PatchError(
                f"{type(model).__name__}.output must be a torch.nn.Linear, got {type(head)}: leave "
                "it out of other converters, as by quantize.linear.float8.filter_fqns output"
            )
        head.__class__ = LossHead
        cast(LossHead, head).splits_output = self.splits_output

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Does nothing: the loss keeps no state between steps."""


def _with_loss(get_train_spec: Any) -> Any:
    """Wraps torchtitan's `get_train_spec`: `build_loss_fn` builds the loss of its TrainSpecs."""

    @functools.wraps(get_train_spec)
    def get(name: str) -> TrainSpec:
        spec = get_train_spec(name)
        if spec.build_loss_fn is build_cross_entropy_loss:
            return dataclasses.replace(spec, build_loss_fn=build_loss_fn)
        return spec

    return get


register_model_converter(Converter, NAME)
train_specs.get_train_spec = _with_loss(train_specs.get_train_spec)
