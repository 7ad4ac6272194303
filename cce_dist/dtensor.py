"""DTensors in, DTensors out: their local parts go through the plain loss.

A DTensor says who holds what: its mesh is the group, its placements are the shard of the vocabulary
and whether the tokens are split. docs/parallelism.md#dtensor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.options import LossOptions
from cce_dist.reduction import shifted
from cce_dist.transport import process_group
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement, Shard

    from cce_dist.transport import Group

T = TypeVar("T")


def is_dtensor(value: object) -> bool:
    # Who has made one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def require_plain(name: str, value: object) -> None:
    """Of a function that does not know what DTensors' placements say."""
    if is_dtensor(value):
        raise ValueError(
            f"{name} must be a plain tensor here, got a DTensor placed {value.placements}: pass "  # pyright: ignore[reportAttributeAccessIssue]
            f"{name}.to_local(), or call this where fully_shard has made it whole"
        )


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatible]
        return grads[0]


class _LocalWithoutGrad(torch.autograd.Function):
    """to_local of a weight whose gradient goes elsewhere: that of torch would return zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        return weight.to_local()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:  # pyright: ignore[reportIncompatible]
        return None


def arrived(tensor: T) -> T:
    """The tensor itself, but for one that a collective still writes (parallelize_module starts them
    so), of which kernels cannot take the address before it has arrived."""
    if type(tensor) is not Tensor and isinstance(tensor, Tensor) and hasattr(tensor, "wait"):
        return _Arrived.apply(tensor)  # pyright: ignore[reportReturnType]
    return tensor


@dataclass(frozen=True)
class LocalParts:
    """The arguments of the loss as this rank holds them, and how its results go back."""

    tensors: dict[str, Any]  # hidden, weight, targets, and the optional ones
    options: LossOptions
    group: ProcessGroup
    vocab_shard: VocabShard
    mesh: DeviceMesh | None  # of the results; None: they stay plain, as hidden is
    token_dim: int  # which dim of targets was put first
    shift: int  # positions at the end that have no target

    def wrap(self, result: Any) -> Any:
        """The loss, or a NamedTuple of it and statistics: Replicate on the mesh."""
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
    tensors: dict[str, Any],
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
) -> LocalParts:
    """Args: tensors: by the loss's names of its arguments, None where not given.

    Raises:
        ValueError: a placement or a mesh is not supported, or contradicts another argument.
    """
    hidden, weight = tensors["hidden"], tensors["weight"]
    given = [name for name, value in tensors.items() if is_dtensor(value)]
    if not is_dtensor(weight):
        raise ValueError(
            f"weight must be a DTensor too, placed Shard(0), where {given[0]} is one, got "
            f"{type(weight)}: pass {given[0]}.to_local(), or distribute the weight"
        )
    mesh = _mesh_of(weight)
    process_group = _group_of(mesh, group, hidden)
    _require_placement("weight", weight, mesh, "Shard(0)")
    local = {name: value for name, value in tensors.items() if not is_dtensor(value)}
    local["weight"] = weight.to_local()
    if tensors["grad_weight_into"] is not None:
        local["weight"] = _LocalWithoutGrad.apply(weight)
    for name, wanted in {
        "bias": "Shard(0)",
        "grad_weight_into": "Shard(0)",
        "targets": "Replicate()",
        "token_weight": "Replicate()",
        "temperature": "Replicate()",
        "class_weight": "Replicate()",
    }.items():
        if is_dtensor(tensors[name]):
            _require_placement(name, tensors[name], mesh, wanted)
            local[name] = tensors[name].to_local()
    token_dim = _token_dim(hidden, mesh, options)
    if is_dtensor(hidden):
        local["hidden"] = hidden.to_local()
    shift = 0
    if token_dim is not None:
        shift = options.shift
        options = replace(options, sequence_parallel=True, shift=0)
        _put_first(local, token_dim, shift, options.ignore_index)
    return LocalParts(
        tensors=local,
        options=options,
        group=process_group,
        vocab_shard=_shard_of(weight, mesh, vocab_shard),
        mesh=mesh if is_dtensor(hidden) else None,
        token_dim=token_dim or 0,
        shift=shift,
    )


def _mesh_of(weight: DTensor) -> DeviceMesh:
    from torch.distributed.tensor import Replicate

    mesh = weight.device_mesh
    if all(isinstance(placement, Replicate) for placement in weight.placements):
        raise ValueError(
            f"weight must be placed Shard(0), got {list(weight.placements)}: every rank has all of "
            "it, and no vocabulary is shared. Pass weight.to_local() without group, and to_local() "
            "of whatever else is a DTensor; where each rank has tokens of its own, "
            "weight.to_local(grad_placements=[Partial()]) sums their gradients. Or redistribute "
            "it to Shard(0)"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"weight must be a DTensor on a mesh of one dim, got {list(weight.placements)} on the "
            f'dims {mesh.mesh_dim_names}: distribute it over one, as mesh["tp"]; a weight that '
            "fully_shard has split is whole only within the forward of the module that it wraps, "
            "so call the loss there, or weight's module.unshard() before the loss"
        )
    return mesh


def _group_of(mesh: DeviceMesh, group: Group | DeviceMesh | None, hidden: object) -> ProcessGroup:
    """The group of the mesh, if it is known that its ranks hold the same tokens."""
    own = mesh.get_group()
    asked = process_group(group, "where weight is a DTensor")
    if asked is not None:
        found, wanted = (dist.get_process_group_ranks(g) for g in (asked, own))
        if found != wanted:
            raise ValueError(
                f"group must be that of weight's mesh, ranks {wanted}, or None, got ranks {found}"
            )
    elif not is_dtensor(hidden):
        # Split over data-parallel ranks, by fully_shard, a weight looks the same.
        raise ValueError(
            "group must be given where weight is a DTensor and hidden is not: pass the mesh dim "
            f"over which weight is split, {mesh.mesh_dim_names}, if its ranks hold the same "
            "tokens; if fully_shard split it, their tokens differ, and the loss must be called "
            "within the forward of the module that fully_shard wraps and that holds the weight. "
            "Where the head is in a group of its own, call head.unshard() before the loss in the "
            "forward of the root, without reshard() until the backward is done, which does it"
        )
    return own


def _is_split(placement: Placement) -> TypeGuard[Shard]:
    """Whether ranks have parts of a dim in their order, which those of a strided shard are not in.

    Not by the type itself, which a placement has none of while torch 2.11 traces.
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
    """The dim of hidden that the ranks split (sequence parallel); None: as the options say."""
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


def _put_first(local: dict[str, Any], dim: int, shift: int, ignore_index: int) -> None:
    """The dim that the ranks split becomes the first, of whatever has tokens. A shift goes along
    the last dim, which may be that one: targets are shifted before."""
    for name, fill in (("targets", ignore_index), ("token_weight", 0), ("temperature", 1)):
        value = local[name]
        if isinstance(value, Tensor) and value.dim() > dim:
            local[name] = shifted(value, shift, fill).movedim(dim, 0)
    local["hidden"] = local["hidden"].movedim(dim, 0)


def _shard_of(weight: DTensor, mesh: DeviceMesh, given: VocabShard | None) -> VocabShard:
    """DTensor's own split, ceil(V / W) rows a rank; `given` may mark the last rows as padding."""
    own = VocabShard.chunked(weight.shape[0], mesh.get_local_rank(), mesh.size())
    if given is None:
        return own
    if not isinstance(given, VocabShard) or (given.start, given.stop) != (own.start, own.stop):
        raise ValueError(
            f"vocab_shard must have the rows of weight's DTensor on this rank, [{own.start}, "
            f"{own.stop}), or be None, got {given}"
        )
    return given
