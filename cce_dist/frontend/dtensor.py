"""The loss of DTensors: their local parts go through the plain loss, and results are DTensors.

A DTensor's mesh gives the group. Its placements give the shard of the vocabulary, and whether the
ranks split the tokens. docs/guide/parallelism.md#dtensor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.frontend.inputs import Inputs
from cce_dist.frontend.reduction import shifted
from cce_dist.options import LossOptions
from cce_dist.ranks.transport import process_group
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement, Shard

    from cce_dist.ranks.transport import Group

T = TypeVar("T")


def is_dtensor(value: object) -> bool:
    # A caller with a DTensor has imported the module already.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def require_plain(name: str, value: object) -> None:
    """Refuses a DTensor, for a function that knows no placements."""
    if is_dtensor(value):
        raise ValueError(
            f"{name} must be a plain tensor here, got a DTensor placed {value.placements}: pass "  # pyright: ignore[reportAttributeAccessIssue]
            f"{name}.to_local(), or call within the forward of the module that fully_shard wraps"
        )


class _Arrived(torch.autograd.Function):
    """A tensor whose collective has ended."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatible]
        return grads[0]


class _LocalWithoutGrad(torch.autograd.Function):
    """`to_local` of a weight whose gradient goes elsewhere: torch's would return zeros for it."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        return weight.to_local()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:  # pyright: ignore[reportIncompatible]
        return None


def arrived(tensor: T) -> T:
    """Waits for a tensor that a collective still writes, and returns any other tensor as it is.

    parallelize_module starts such collectives. Kernels need the tensor's address.
    """
    if type(tensor) is not Tensor and isinstance(tensor, Tensor) and hasattr(tensor, "wait"):
        return _Arrived.apply(tensor)  # pyright: ignore[reportReturnType]
    return tensor


@dataclass(frozen=True)
class LocalParts:
    """This rank's local arguments of the loss, and the placement of its results."""

    inputs: Inputs
    options: LossOptions
    group: ProcessGroup
    vocab_shard: VocabShard
    mesh: DeviceMesh | None  # the results' mesh; None: results are plain, as hidden is
    token_dim: int  # the dim of targets that was put first
    shift: int  # number of positions at the end without a target

    def wrap(self, result: Any) -> Any:
        """Wraps the loss, or a NamedTuple of loss and statistics, as Replicate on the mesh."""
        if isinstance(result, tuple):
            return type(result)(*map(self.wrap, result))
        if result is None:
            return None
        if result.dim() > 0:
            result = result.movedim(0, self.token_dim)
            if self.shift:
                result = result[..., : -self.shift]
        if self.mesh is None:
            return result
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(result, self.mesh, [Replicate()], run_check=False)


def local_parts(
    inputs: Inputs,
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
) -> LocalParts:
    """Takes the local parts of inputs, at least one of which is a DTensor.

    Raises:
        ValueError: a placement or a mesh is not supported, or contradicts another argument.
    """
    hidden, weight = inputs.hidden, inputs.weight
    if not is_dtensor(weight):
        name = next(x for x, y in zip(Inputs._fields, inputs, strict=True) if is_dtensor(y))
        raise ValueError(
            f"weight must be a DTensor too, placed Shard(0), where {name} is one, got "
            f"{type(weight)}: pass {name}.to_local(), or distribute the weight"
        )
    if TYPE_CHECKING:
        assert isinstance(weight, DTensor)
    mesh = _mesh_of(weight)
    process_group = _group_of(mesh, group, hidden)
    _require_placement("weight", weight, mesh, "Shard(0)")
    if inputs.grad_weight_into is None:
        local_weight = weight.to_local()
    else:
        local_weight: Any = _LocalWithoutGrad.apply(weight)
    bias = _local_part("bias", inputs.bias, mesh, "Shard(0)")
    into = _local_part("grad_weight_into", inputs.grad_weight_into, mesh, "Shard(0)")
    targets = _local_part("targets", inputs.targets, mesh, "Replicate()")
    token_weight = _local_part("token_weight", inputs.token_weight, mesh, "Replicate()")
    temperature = _local_part("temperature", inputs.temperature, mesh, "Replicate()")
    class_weight = _local_part("class_weight", inputs.class_weight, mesh, "Replicate()")
    token_dim, shift = _token_dim(hidden, mesh, options), 0
    local_hidden: Any = hidden
    if is_dtensor(hidden):
        local_hidden = local_hidden.to_local()
    if token_dim is not None:
        shift = options.shift
        options = replace(options, sequence_parallel=True, shift=0)
        local_hidden = local_hidden.movedim(token_dim, 0)
        targets = _put_first(targets, token_dim, shift, options.ignore_index)
        token_weight = _put_first(token_weight, token_dim, shift, 0)
        temperature = _put_first(temperature, token_dim, shift, 1)
    return LocalParts(
        inputs=Inputs(
            local_hidden, local_weight, targets, bias, token_weight, class_weight, into, temperature
        ),
        options=options,
        group=process_group,
        vocab_shard=_shard_of(weight, mesh, vocab_shard),
        mesh=mesh if is_dtensor(hidden) else None,
        token_dim=token_dim or 0,
        shift=shift,
    )


def _local_part(name: str, value: Any, mesh: DeviceMesh, placement: str) -> Any:
    """Returns the local part of a DTensor on `mesh`; returns a plain tensor or None as it is."""
    if not is_dtensor(value):
        return value
    _require_placement(name, value, mesh, placement)
    return value.to_local()


def _mesh_of(weight: DTensor) -> DeviceMesh:
    from torch.distributed.tensor import Replicate

    mesh = weight.device_mesh
    if all(isinstance(placement, Replicate) for placement in weight.placements):
        raise ValueError(
            f"weight must be placed Shard(0), got {list(weight.placements)}: every rank has all of "
            "it, and no vocabulary is shared. Pass weight.to_local() without group, and to_local() "
            "of every other DTensor; if ranks have different tokens, "
            "weight.to_local(grad_placements=[Partial()]) sums their gradients. Or redistribute "
            "weight to Shard(0)"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"weight must be a DTensor on a mesh of one dim, got {list(weight.placements)} on the "
            f'dims {mesh.mesh_dim_names}: distribute it over one, as mesh["tp"]. If fully_shard '
            "split the weight, call the loss within the forward of the module that it wraps, where "
            "the weight is whole, or call that module's unshard() before the loss"
        )
    return mesh


def _group_of(mesh: DeviceMesh, group: Group | DeviceMesh | None, hidden: object) -> ProcessGroup:
    """Returns the mesh's group, if group or hidden shows that its ranks hold the same tokens."""
    mesh_group = mesh.get_group()
    asked = process_group(group, "where weight is a DTensor")
    if asked is not None:
        asked_ranks, mesh_ranks = map(dist.get_process_group_ranks, (asked, mesh_group))
        if asked_ranks != mesh_ranks:
            raise ValueError(
                f"group must be that of weight's mesh, ranks {mesh_ranks}, or None, got ranks "
                f"{asked_ranks}"
            )
    elif not is_dtensor(hidden):
        # fully_shard splits a weight over data-parallel ranks with the same placement.
        raise ValueError(
            "group must be given where weight is a DTensor and hidden is not: pass the mesh dim "
            f"over which weight is split, {mesh.mesh_dim_names}, if its ranks hold the same "
            "tokens; if fully_shard split it, their tokens differ, and the loss must be called "
            "within the forward of the module that fully_shard wraps and that holds the weight. "
            "If fully_shard wraps the head by itself, call head.unshard() before the loss in the "
            "forward of the root, and reshard() only after a forward without a backward"
        )
    return mesh_group


def _is_split(placement: Placement) -> TypeGuard[Shard]:
    """Tells whether ranks hold a dim's slices in rank order, as they do not in a strided shard.

    It uses isinstance, since type(placement) fails while torch 2.11 traces.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, Shard) and not isinstance(placement, _StridedShard)


def _require_placement(name: str, value: DTensor, mesh: DeviceMesh, wanted: str) -> None:
    from torch.distributed.tensor import Replicate

    if value.device_mesh != mesh:
        raise ValueError(
            f"{name} must be on weight's mesh {mesh}, got a DTensor on {value.device_mesh}"
        )
    (placement,) = value.placements
    splits = _is_split(placement) and placement.dim % max(value.dim(), 1) == 0
    if not (splits if wanted == "Shard(0)" else isinstance(placement, Replicate)):
        raise ValueError(
            f"{name} must be placed {wanted} on its mesh, got {placement!r}: redistribute it"
        )


def _token_dim(hidden: object, mesh: DeviceMesh, options: LossOptions) -> int | None:
    """Returns the dim of hidden that the ranks split (sequence parallel).

    None: the ranks split no dim; or hidden is plain, and the options tell of a split.
    """
    if not is_dtensor(hidden):
        return None
    from torch.distributed.tensor import Replicate

    if TYPE_CHECKING:
        assert isinstance(hidden, DTensor)
    if hidden.device_mesh != mesh:
        raise ValueError(
            f"hidden must be on weight's mesh {mesh}, got a DTensor on {hidden.device_mesh}"
        )
    (placement,) = hidden.placements
    if isinstance(placement, Replicate):
        if options.sequence_parallel:
            raise ValueError(
                "sequence_parallel must be left out where hidden is a DTensor: its placement "
                f"says whether tokens are split, got {placement!r}"
            )
        return None
    dim = placement.dim % hidden.dim() if _is_split(placement) else hidden.dim()
    if dim >= hidden.dim() - 1:
        raise ValueError(
            "hidden must be placed Replicate(), or Shard(d) of a dim d of tokens, got "
            f"{placement!r} of {hidden.dim()} dims: redistribute it"
        )
    if hidden.shape[dim] % mesh.size() != 0:
        raise ValueError(
            f"hidden's dim {dim} must be a multiple of the mesh's {mesh.size()} ranks to be split "
            f"over them, got {hidden.shape[dim]}"
        )
    return dim


def _put_first(value: Any, dim: int, shift: int, fill: int) -> Any:
    """Shifts a tensor, then moves `dim`, which the ranks split, to the front.

    The shift comes first: it goes along the last dim, which may be `dim`.
    """
    if not isinstance(value, Tensor) or value.dim() <= dim:
        return value
    return shifted(value, shift, fill).movedim(dim, 0)


def _shard_of(weight: DTensor, mesh: DeviceMesh, vocab_shard: VocabShard | None) -> VocabShard:
    """Returns the shard of DTensor's split, ceil(V / W) rows a rank.

    `vocab_shard` may mark the last rows as padding.
    """
    rows = VocabShard.chunked(weight.shape[0], mesh.get_local_rank(), mesh.size())
    if vocab_shard is None:
        return rows
    bounds = (rows.start, rows.stop)
    if not isinstance(vocab_shard, VocabShard) or (vocab_shard.start, vocab_shard.stop) != bounds:
        raise ValueError(
            f"vocab_shard must have the rows of weight's DTensor on this rank, [{rows.start}, "
            f"{rows.stop}), or be None, got {vocab_shard}"
        )
    return vocab_shard
