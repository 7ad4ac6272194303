"""A loss to run: through the public function on any group, and densely as golden or baseline."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.reference import linear_cross_entropy_reference
from cce_dist.testing.inputs import Inputs
from cce_dist.testing.places import Place
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group

# Options of the loss that change its value; the others choose how it is computed.
MEANING = (
    "ignore_index",
    "reduction",
    "shift",
    "softcap",
    "logit_scale",
    "label_smoothing",
    "z_loss",
)
MOMENTS = {"max": "max_logit", "mean": "mean_logit", "variance": "variance_logit"}


@dataclass(frozen=True)
class Case:
    """Inputs over the whole vocabulary and the options of one call of `linear_cross_entropy`.

    Args:
        options: keyword arguments that are no tensors.
        bounds: rows [start, stop) of each rank; None: the even split, without `vocab_shard`.
        vocab_size: number of classes; the weight's further rows are padding. None: all rows count.
        trainable: names of the inputs that require a gradient.
        upstream: gradient of each output by name; "loss" may be left out (1, or a ramp over the
            tokens with reduction="none").
        main_grad: pass a zero `grad_weight_into`, returned as grad_weight.
        autocast: run under torch.autocast with this dtype.
        backward: False stops after the forward.
    """

    inputs: Inputs
    options: Mapping[str, Any] = field(default_factory=dict)
    bounds: tuple[tuple[int, int], ...] | None = None
    vocab_size: int | None = None
    trainable: tuple[str, ...] = ("hidden", "weight", "bias")
    upstream: Mapping[str, Any] = field(default_factory=dict)
    main_grad: bool = False
    autocast: torch.dtype | None = None
    backward: bool = True
    device: str = "cpu"

    @property
    def num_classes(self) -> int:
        return self.vocab_size or len(self.inputs.weight)

    @property
    def computed_dtype(self) -> torch.dtype:
        return self.autocast or self.inputs.hidden.dtype

    def at(self, place: Place) -> Case:
        """Returns the same case by the backend and on the device of `place`."""
        return replace(self, options={**self.options, **place.options}, device=place.device)

    def gradient_of(self, name: str, output: Tensor) -> Tensor:
        """Returns the upstream gradient of output `name`."""
        like: Any = {"dtype": output.dtype, "device": output.device}
        if name in self.upstream:
            return torch.as_tensor(self.upstream[name], **like).expand_as(output)
        ramp = torch.linspace(-1, 2, output.numel(), **like)
        return ramp.reshape(output.shape) if output.ndim else torch.ones_like(output)


def run_case(group: Group | None, case: Case) -> dict[str, Tensor]:
    """Calls `linear_cross_entropy` with this rank's shard of `case` and runs its backward.

    Returns:
        the loss, the statistics asked for (moments as max_logit, mean_logit, variance_logit) and
        grad_<input> of every trainable input that is there, all on the CPU.
    """
    from cce_dist import linear_cross_entropy

    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    inputs = case.inputs
    num_rows = len(inputs.weight)
    start, stop = case.bounds[rank] if case.bounds else even_bounds(num_rows, world)[rank]
    options = dict(case.options)
    if case.bounds is not None or case.vocab_size is not None:
        options["vocab_shard"] = VocabShard(start, stop, case.num_classes)
    hidden = inputs.hidden
    if options.get("sequence_parallel"):
        hidden = hidden.chunk(world)[rank]

    mine = {
        "hidden": hidden,
        "weight": inputs.weight[start:stop],
        "bias": None if inputs.bias is None else inputs.bias[start:stop],
        "token_weight": inputs.token_weight,
        "class_weight": inputs.class_weight,
    }
    leaves = {
        name: tensor.detach().to(case.device, copy=True).requires_grad_(name in case.trainable)
        for name, tensor in mine.items()
        if tensor is not None
    }
    main_grad = None
    if case.main_grad:
        wide = torch.promote_types(inputs.weight.dtype, torch.float32)
        main_grad = leaves["weight"].new_zeros(leaves["weight"].shape, dtype=wide)
    with torch.autocast(
        case.device, dtype=case.autocast or torch.bfloat16, enabled=case.autocast is not None
    ):
        result = linear_cross_entropy(
            leaves["hidden"],
            leaves["weight"],
            inputs.targets.to(case.device),
            group=group,
            bias=leaves.get("bias"),
            token_weight=leaves.get("token_weight"),
            class_weight=leaves.get("class_weight"),
            grad_weight_into=main_grad,
            **options,
        )
    outputs = _by_name(result)
    if case.backward:
        _backward(case, outputs)
    results = {name: output.detach().cpu() for name, output in outputs.items()}
    for name in case.trainable:
        leaf = leaves.get(name)
        if leaf is not None and leaf.grad is not None:
            results[f"grad_{name}"] = leaf.grad.cpu()
    if main_grad is not None:
        assert "grad_weight" not in results, "weight.grad must stay None with grad_weight_into"
        results["grad_weight"] = main_grad.cpu()
    return results


def even_bounds(num_rows: int, world_size: int) -> list[tuple[int, int]]:
    """Returns equal shards; rows that do not divide are an error."""
    assert num_rows % world_size == 0, (num_rows, world_size)
    size = num_rows // world_size
    return [(rank * size, (rank + 1) * size) for rank in range(world_size)]


def join_ranks(case: Case, results: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the ranks' results; asserts that all ranks agree bitwise where they must."""
    joined = {}
    for name, first in results[0].items():
        tensors = [result[name] for result in results]
        sliced = ["grad_weight", "grad_bias"]
        if case.options.get("sequence_parallel"):
            sliced.append("grad_hidden")
        if name in sliced:
            joined[name] = torch.cat(tensors)
            continue
        for rank, tensor in enumerate(tensors):
            assert torch.equal(tensor.nan_to_num(nan=1e38), first.nan_to_num(nan=1e38)), (
                f"{name} differs between rank 0 and rank {rank} by "
                f"{float((tensor.double() - first.double()).abs().max())}"
            )
        joined[name] = first
    return joined


def golden_outputs(case: Case) -> dict[str, Tensor]:
    """Computes the expected result of `run_case` by the reference, in float64."""
    return _dense(case, lambda tensor: _rounded(tensor, case.computed_dtype), torch.float64)


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to values that `dtype` can hold; the gradient passes unrounded, unlike a cast's."""
    values = tensor.detach().to(dtype).double()
    change = torch.where(values == tensor.detach(), 0, values - tensor.detach())
    return tensor.double() + change


def dense_outputs(case: Case, logits_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Computes the dense PyTorch recipe, with an fp32 softmax.

    Args:
        logits_dtype: dtype of the logits; None: the inputs'.
    """
    rounded = case.computed_dtype
    dtype = logits_dtype or rounded
    softmax_dtype = torch.promote_types(dtype, torch.float32)
    return _dense(case, lambda tensor: tensor.to(rounded).to(dtype), softmax_dtype)


def _dense(case: Case, cast: Any, softmax_dtype: torch.dtype) -> dict[str, Tensor]:
    inputs, options, num_classes = case.inputs, case.options, case.num_classes
    leaves: dict[str, Tensor] = {}
    for name in ("hidden", "weight", "bias", "token_weight"):
        tensor = getattr(inputs, name)
        if tensor is not None:
            # The gradients of the golden must not be rounded either.
            dtype = torch.float64 if softmax_dtype == torch.float64 else tensor.dtype
            tensor = tensor.detach().to(dtype, copy=True)
            leaves[name] = tensor.requires_grad_(name in case.trainable)
    bias = cast(leaves["bias"][:num_classes]) if "bias" in leaves else None
    logits = F.linear(cast(leaves["hidden"]), cast(leaves["weight"][:num_classes]), bias)
    logits = logits.to(softmax_dtype)
    softcap = options.get("softcap")
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    reference = functools.partial(
        linear_cross_entropy_reference,
        leaves["hidden"],
        leaves["weight"],
        inputs.targets,
        logits=options.get("logit_scale", 1.0) * logits,
        token_weight=leaves.get("token_weight"),
        class_weight=inputs.class_weight,
        **{name: options[name] for name in MEANING if name in options},
    )
    result = reference()
    stats = options.get("stats", ())
    names = ["loss", *(name for name in ("lse", "entropy", "sum_p2", "correct") if name in stats)]
    if "logit_moments" in stats:
        names += MOMENTS.values()
    outputs = {name: getattr(result, name) for name in names}
    if case.backward:
        _backward(case, outputs)
    results = {name: output.detach() for name, output in outputs.items()}
    for name in case.trainable:
        leaf = leaves.get(name)
        if case.backward and leaf is not None:
            results[f"grad_{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    # Losses of single tokens: their errors give the rounding noise of a sum.
    with torch.no_grad():
        results["token_loss"] = (
            results["loss"] if result.loss.ndim else reference(reduction="none").loss
        )
    results["scale"] = torch.maximum(result.lse.abs(), result.max_logit.abs()).detach()
    return results


def _by_name(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"loss": result}
    outputs = {}
    for name, value in result._asdict().items():
        if value is None:
            continue
        if name == "logit_moments":
            outputs |= {MOMENTS[moment]: getattr(value, moment) for moment in MOMENTS}
        else:
            outputs[name] = value
    return outputs


def _backward(case: Case, outputs: Mapping[str, Tensor]) -> None:
    # dict.fromkeys drops a second "loss".
    every = [x for x in dict.fromkeys(("loss", *case.upstream)) if outputs[x].requires_grad]
    if every:
        upstream = [case.gradient_of(name, outputs[name]) for name in every]
        torch.autograd.backward([outputs[name] for name in every], upstream)
