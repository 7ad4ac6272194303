"""One call of the loss: its arguments, and the memory of the weight's gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cce_dist.algorithm.plan import Plan
from cce_dist.backends.protocol import ExpectedBackward, WeightGrad
from cce_dist.core.records import handed_out
from cce_dist.core.types import Head, QuantizedRows, QuantizeOnce, Tokens


@dataclass(frozen=True)
class Call:
    """The arguments of one call of the loss, but for hidden, weight and bias."""

    plan: Plan
    rows: Tensor | None  # [N] int64; None: every token
    local_targets: Tensor  # [N], int32 where it fits: it stays until the backward
    count: Tensor | None  # [1] int32; None: all N tokens count
    device_type: str
    class_weight: Tensor | None  # [V_local] of this shard
    quantized: QuantizedRows | None  # of this shard; None: the caller keeps no copy
    grad_weight_into: Tensor | None
    tail_mass: bool  # report it
    record: bool  # a backward may follow
    quantize_once: QuantizeOnce | None = None

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        """Cuts off rows beyond vocab_size: no step below sees padding."""
        options, classes = self.plan.options, self.plan.shard.num_classes
        require_in_memory(weight)
        if classes < weight.shape[0]:
            weight, bias = weight[:classes], None if bias is None else bias[:classes]
        return Head(
            weight=weight,
            bias=bias,
            class_weight=self.class_weight,
            vocab_size=self.plan.shard.vocab_size,
            softcap=options.softcap,
            logit_scale=options.logit_scale,
            quantized=self.quantized,
            quantize_once=self.quantize_once,
        )

    def tokens(
        self, hidden: Tensor, scale: Tensor | None = None, *, defer_fill: bool = False
    ) -> Tokens:
        """Args: defer_fill: the backend gathers hidden itself, while its first kernels run."""
        hidden, fill = self.plan.gather_hidden(hidden, defer_fill=defer_fill)
        return Tokens(hidden, self.rows, self.local_targets, self.count, fill, scale)

    def expect(
        self, tokens: Tokens, dtype: torch.dtype, needed: tuple[bool, ...]
    ) -> ExpectedBackward:
        """Args: dtype: the weight's. needed: whether hidden, weight, bias need a gradient."""
        into = self.grad_weight_into if needed[1] else None
        written = dtype if into is None else into.dtype
        return self.plan.expect(
            tokens,
            hidden=needed[0],
            weight=written if needed[1] else None,
            bias=needed[2],
            accumulate=into is not None,
        )


@dataclass(frozen=True)
class GradWeight:
    """The memory of the weight's gradient: a new tensor, or the caller's buffer."""

    returned: Tensor | None  # [V_local, D] as weight
    into: WeightGrad | None  # without the padded rows; None: not needed

    @classmethod
    def prepare(cls, call: Call, weight: Tensor, needed: bool) -> GradWeight:
        classes = call.plan.shard.num_classes
        if not needed:
            return cls(None, None)
        if call.grad_weight_into is not None:
            return cls(None, WeightGrad(call.grad_weight_into[:classes], accumulate=True))
        grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
        if classes == len(grad):
            return cls(grad, WeightGrad(grad, accumulate=False))
        grad[classes:].zero_()
        return cls(grad, WeightGrad(grad[:classes], accumulate=False))


handed_out.append(GradWeight)


def pad_bias(grad: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Pads [num_classes] in the accumulation dtype to [V_local] as bias, with 0."""
    if grad is None or bias is None:
        return None
    return torch.cat([grad, grad.new_zeros(bias.shape[0] - grad.shape[0])]).to(bias.dtype)


def require_in_memory(weight: Tensor, name: str = "weight") -> None:
    """Checks in a backward that a weight's memory was not freed. A recording does not: what it
    plays has to be checked before."""
    if weight.numel() and not weight.untyped_storage().nbytes():
        raise RuntimeError(
            f"{name} must stay in memory until the backward of the loss, got memory that was "
            "freed, as FSDP's reshard() does: FSDP calls it after the backward itself"
        )
