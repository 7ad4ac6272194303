"""Checks of the arguments of `linear_cross_entropy`.

Every message names the argument, the rule and the value that came. No layer below checks its
arguments again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cce_dist.core.tracing import is_fake, is_traced
from cce_dist.core.types import accumulate_dtype
from cce_dist.frontend.inputs import Inputs
from cce_dist.options import LARGEST_FACTOR, LEAST_FACTOR, LossOptions
from cce_dist.ranks.gather import require
from cce_dist.ranks.segments import SEGMENTS
from cce_dist.ranks.transport import adapter_of
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def require_tensor(name: str, value: object) -> Tensor:
    if isinstance(value, nn.Module):
        raise ValueError(
            f"{name} must be a torch.Tensor, got a module, {type(value).__name__}: for a head pass "
            "weight=head.weight and bias=head.bias; if LoRA (PEFT) wraps it, weight=head.weight + "
            'head.get_delta_weight("default"), since its weight is the frozen base alone'
        )
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value)}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"one of {value.layout}"
        raise ValueError(f"{name} must be a dense tensor, got {kind}")
    if not torch.compiler.is_compiling() and value.is_neg():
        # Its memory holds the negatives of its values, and kernels read memory.
        raise ValueError(
            f"{name} must lie in memory as it is, got a view that torch negates when it reads it, "
            f"as of x.conj().imag: pass {name}.resolve_neg()"
        )
    if type(value) not in (Tensor, nn.Parameter) and _is_made_of_others(value):
        raise ValueError(
            f"{name} must be a plain tensor or a DTensor, got {type(value)}, which has no memory "
            "of its own: dequantise it if it is a quantised weight"
        )
    return value


def _is_made_of_others(value: Tensor) -> bool:
    """Tells whether other tensors hold a tensor's values, as torchao's quantised weights."""
    return is_traceable_wrapper_subclass(value) and not type(value).__module__.startswith("torch.")


def require_values(name: str, tensor: Tensor) -> None:
    kind = "a tensor on the meta device" if tensor.device.type == "meta" else None
    kind = "a fake tensor" if is_fake(tensor) else kind
    if kind is not None:
        raise ValueError(f"{name} must hold values, got {kind}, which has none")


def require_plain_call(weight: object, *others: object) -> None:
    """Checks before any read of a tensor: no transform is active, none of these tensors has a
    tangent, and weight is in memory."""
    if torch.compiler.is_compiling():
        # The compiler itself refuses transforms, and its tensors have no memory.
        return
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            "cce_dist must be called outside of torch.func's transforms (grad, vmap, jvp, jacrev, "
            "...), for which its autograd functions have no rules: take gradients by backward() or "
            "torch.autograd.grad, and write vmap's batch as a loop"
        )
    require_no_tangent(weight, *others)
    if not isinstance(weight, Tensor) or weight.layout != torch.strided or weight.is_nested:
        return
    require_memory("weight", weight)


def require_no_tangent(*values: object) -> None:
    if forward_ad._current_level >= 0 and any(map(_has_tangent, values)):
        raise RuntimeError(
            "cce_dist has no forward-mode derivative (torch.autograd.forward_ad): use backward() "
            "or torch.autograd.grad, or dense logits"
        )


def require_memory(name: str, weight: Tensor) -> None:
    if is_traced() or is_fake(weight):
        return
    if weight.numel() and weight.device.type != "meta" and not weight.untyped_storage().nbytes():
        raise ValueError(
            f"{name} must be in memory, got a tensor of shape {list(weight.shape)} whose memory "
            f"was freed, as FSDP does outside of a forward: {_BY_FSDP}"
        )


def _has_tangent(value: object) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


_BY_FSDP = (
    "call the loss within the forward of the module that FSDP wraps and that holds the weight. Or "
    "gather the weight before: for FullyShardedDataParallel by FSDP.summon_full_params(model), "
    "without gradients; for fully_shard by that module's unshard(), without reshard() until the "
    "backward is done"
)


def _require_dtype(name: str, value: Tensor) -> None:
    if value.dtype in DTYPES:
        return
    rule = f"{name} must be bf16, fp16, fp32 or float64, got {value.dtype}"
    if value.dtype.itemsize == 1 and value.dtype != torch.bool:
        rule += (
            f": a quantised {name} is not supported, and autocast does not cast it; dequantise it "
            'to the other\'s dtype. (logits="screened" makes its 8-bit copies itself)'
        )
    raise ValueError(rule)


def check_hidden_and_weight(hidden: Tensor, weight: Tensor) -> None:
    require_tensor("hidden", hidden)
    require_tensor("weight", weight)
    _require_dtype("hidden", hidden)
    _require_dtype("weight", weight)
    if hidden.dim() < 1:
        raise ValueError("hidden must have shape [..., D], got a tensor of 0 dims")
    if hidden.device.type == "meta":
        raise ValueError("hidden must hold values, got a tensor on the meta device, which has none")
    dim = hidden.shape[-1]
    if dim < 1:
        raise ValueError(f"hidden must have shape [..., D] with D >= 1, got {list(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != dim:
        rule = f"weight must have shape [V_local, D] with D={dim} (from hidden), got "
        by_fsdp = f"; if FSDP has split the weight: {_BY_FSDP}" if weight.dim() == 1 else ""
        raise ValueError(f"{rule}{list(weight.shape)}{by_fsdp}")
    if weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight must have hidden's dtype {hidden.dtype}, got {weight.dtype}: cast one of "
            "them, or run under torch.autocast"
        )
    require_device("weight", weight, hidden)


def require_device(name: str, tensor: Tensor, hidden: Tensor) -> None:
    if tensor.device != hidden.device:
        raise ValueError(f"{name} must be on hidden's device {hidden.device}, got {tensor.device}")


def check_group_device(group: Group | None, hidden: object) -> None:
    """Checks hidden's device against the group's, before any collective or other check."""
    adapter = adapter_of(group)
    if adapter is None or not isinstance(hidden, Tensor):
        return
    if hidden.device.type != adapter.device_type:
        raise ValueError(
            f"hidden must be on the {adapter.device_type} with group={type(group).__name__}(...), "
            f"got {hidden.device}: move hidden, weight and targets, or pass a ProcessGroup"
        )


_IDS = (
    "class probabilities are not supported, class ids are: pass argmax(-1) of one-hot rows; "
    "label_smoothing gives every class a share"
)


def check_targets(
    targets: Tensor, hidden: Tensor, options: LossOptions, world_size: int
) -> torch.Size:
    """Checks the targets, and returns their shape: that of all ranks' tokens."""
    require_tensor("targets", targets)
    if targets.dtype != torch.int64:
        use = "use targets.long()"
        apart = targets.dim() > 1 and targets.shape[-1] not in hidden.shape[-2:-1]
        if targets.is_floating_point() and (targets.dim() == hidden.dim() or apart):
            use = f"{list(targets.shape)} are class probabilities? {_IDS}"
        raise ValueError(f"targets must be int64, got {targets.dtype}: {use}")
    require_device("targets", targets, hidden)
    wanted = list(hidden.shape[:-1])
    rule = "hidden's shape without D"
    if options.sequence_parallel:
        if not wanted:
            raise ValueError("hidden must have shape [n, ..., D] with sequence_parallel, got [D]")
        wanted[0] *= world_size
        rule += f", dim 0 times {world_size} ranks (sequence_parallel: targets of all ranks)"
    if list(targets.shape) != wanted:
        ids = f": {_IDS}" if list(targets.shape[:-1]) == wanted else ""
        raise ValueError(
            f"targets must have shape {wanted} ({rule}), got {list(targets.shape)}{ids}"
        )
    if options.shift and not wanted:
        raise ValueError(
            f"shift={options.shift} goes along the last dim of targets, and targets [] have none: "
            "pass hidden [..., T, D]"
        )
    return targets.shape


def check_target_range(
    targets: Tensor, vocab_size: int, ignore_index: int, in_range: Tensor | bool | None = None
) -> None:
    """Checks the range of `targets` [N], in which ignored targets are 0.

    Args: in_range: of `Picked`.
    """
    if targets.numel() == 0 or in_range is True:
        return
    if not isinstance(in_range, Tensor):
        low, high = torch.aminmax(targets)
        in_range = (low >= 0) & (high < vocab_size)

    def message(targets: Tensor) -> str:
        low, high = torch.aminmax(targets)
        return (
            f"targets must lie in [0, vocab_size={vocab_size}) or equal ignore_index="
            f"{ignore_index}, got values from {int(low)} to {int(high)}"
        )

    rule = "targets must lie in [0, vocab_size) or equal ignore_index"
    require(in_range, message, rule, targets)


def check_scale(scale: Tensor, logit_scale: float) -> None:
    """Checks the scale [N], 1 / temperature, of the tokens that count, by the options' bounds."""
    size = scale * abs(logit_scale)
    # The comparisons are False for NaN, too.
    good = ((size >= LEAST_FACTOR) & (size <= LARGEST_FACTOR)).all()
    rule = "temperature must be finite and > 0 at every token that counts"

    def message(scale: Tensor) -> str:
        low, high = torch.aminmax(scale.reciprocal())
        return (
            f"{rule}, and logit_scale={logit_scale!r} / temperature lie between {LEAST_FACTOR:.0e} "
            f"and {LARGEST_FACTOR:.0e} in size, got temperatures from {float(low)} to {float(high)}"
        )

    require(good, message, rule, scale)


def require_vocab_shard(shard: object) -> None:
    if not isinstance(shard, VocabShard):
        raise ValueError(f"vocab_shard must be a cce_dist.VocabShard or None, got {type(shard)}")


def require_rows(shard: VocabShard, weight: Tensor) -> None:
    if shard.num_rows != weight.shape[0]:
        raise ValueError(
            f"weight must have vocab_shard's {shard.num_rows} rows [{shard.start}, {shard.stop}), "
            f"got {weight.shape[0]}"
        )


def check_shard(shard: VocabShard | None, weight: Tensor, rank: int, world_size: int) -> VocabShard:
    if shard is None:
        if weight.shape[0] < 1:
            raise ValueError(
                f"weight must have at least one row, got {list(weight.shape)}; for a rank without "
                "rows pass vocab_shard"
            )
        return VocabShard.even(weight.shape[0], rank, world_size)
    require_vocab_shard(shard)
    require_rows(shard, weight)
    if world_size == 1 and (shard.start != 0 or shard.stop < shard.vocab_size):
        raise ValueError(
            f"vocab_shard of a single rank must cover [0, vocab_size={shard.vocab_size}), got "
            f"[{shard.start}, {shard.stop}): pass group, with the ranks that hold the other rows"
        )
    return shard


def check_segments(options: LossOptions, world_size: int) -> None:
    """Checks that invariant=True can have whole segments on each rank."""
    if options.invariant and SEGMENTS % world_size:
        allowed = ", ".join(str(n) for n in range(1, SEGMENTS + 1) if SEGMENTS % n == 0)
        raise ValueError(f"invariant=True needs {allowed} ranks in group, got {world_size}")


def check_vector(
    name: str, value: Tensor | None, shape: list[int], meaning: str, hidden: Tensor
) -> None:
    if value is None:
        return
    require_tensor(name, value)
    if list(value.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} ({meaning}), got {list(value.shape)}")
    if not value.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {value.dtype}")
    require_device(name, value, hidden)


def check_tensors(
    inputs: Inputs, options: LossOptions, shard: VocabShard, world_size: int
) -> torch.Size:
    """Checks all tensors but hidden and weight, against these two. Returns the targets' shape."""
    hidden, weight, targets, bias, token_weight, class_weight, into, temperature = inputs
    shape = check_targets(targets, hidden, options, world_size)
    check_vector("bias", bias, [weight.shape[0]], "V_local, from weight", hidden)
    check_weights(token_weight, class_weight, shape, shard, hidden, options)
    check_vector("temperature", temperature, list(shape), "that of targets", hidden)
    check_grad_weight_into(into, weight, weight.requires_grad)
    return shape


def check_weights(
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    shape: torch.Size,
    shard: VocabShard,
    hidden: Tensor,
    options: LossOptions,
) -> None:
    check_vector("token_weight", token_weight, list(shape), "that of targets", hidden)
    check_vector(
        "class_weight",
        class_weight,
        [shard.vocab_size],
        "vocab_size: the weights of all classes, on every rank",
        hidden,
    )
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError(
            "class_weight must not require grad: its gradient is not computed; pass "
            "class_weight.detach()"
        )
    if token_weight is not None and token_weight.requires_grad and options.gradient == "in_forward":
        raise ValueError(
            'token_weight must not require grad with gradient="in_forward", which computes no '
            "gradient of token_weight; pass token_weight.detach(), or use "
            'gradient="filtered" or "exact"'
        )


def _overlaps_itself(matrix: Tensor) -> bool:
    """Tells whether two elements of a matrix have the same memory."""
    if not matrix.numel():
        return False
    reach = 1
    for stride, size in sorted(zip(matrix.stride(), matrix.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def _share_memory(first: Tensor, second: Tensor) -> bool:
    """Tells whether two matrices without gaps overlap; of others, whether they begin together."""
    begins = first.data_ptr(), second.data_ptr()
    if not all(x.is_contiguous() or x.T.is_contiguous() for x in (first, second)):
        return begins[0] == begins[1]
    ends = (x.data_ptr() + x.numel() * x.element_size() for x in (first, second))
    return max(begins) < min(ends)


def check_grad_weight_into(buffer: Tensor | None, weight: Tensor, needs_grad: bool) -> None:
    if buffer is None:
        return
    require_tensor("grad_weight_into", buffer)
    if buffer.shape != weight.shape:
        raise ValueError(
            f"grad_weight_into must have weight's shape {list(weight.shape)}, got "
            f"{list(buffer.shape)}"
        )
    wanted = accumulate_dtype(weight.dtype)
    if buffer.dtype != wanted:
        raise ValueError(
            f"grad_weight_into must be {wanted} for a {weight.dtype} weight, got {buffer.dtype}"
        )
    require_device("grad_weight_into", buffer, weight)
    if buffer.requires_grad:
        raise ValueError("grad_weight_into must not require grad: it is written in the backward")
    if _overlaps_itself(buffer):
        raise ValueError(
            "grad_weight_into must have memory for each of its elements, got a tensor of strides "
            f"{list(buffer.stride())}"
        )
    if buffer.numel() and not is_fake(buffer) and _share_memory(buffer, weight):
        raise ValueError("grad_weight_into must have memory of its own, got that of weight")
    if not needs_grad and torch.is_grad_enabled():
        raise ValueError(
            "grad_weight_into must be None where weight does not require grad: nothing would be "
            "added to it"
        )
