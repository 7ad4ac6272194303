"""The 8-bit copy of a weight, kept from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from cce_dist.backends.choose import quantizer_for
from cce_dist.backends.eight_bits import screen_dtype
from cce_dist.core.observer import described_by
from cce_dist.core.types import QuantizedRows
from cce_dist.frontend.dtensor import is_dtensor, require_plain
from cce_dist.frontend.validation import (
    require_rows,
    require_tensor,
    require_values,
    require_vocab_shard,
)
from cce_dist.options import Backend, LossOptions, Screen, require_choice
from cce_dist.vocab_shard import VocabShard


@dataclass
class QuantizedWeight:
    """A weight's 8-bit copy, by which logits="screened" multiplies hidden.

    Make it with `quantize_weight`, pass it as `quantized_weight`, and call `refresh` after each
    step of the optimizer. A call without a copy quantises the weight itself. The copy has
    V_local (D' + 8) bytes, with D' = D rounded up to a multiple of 16.
    """

    rows: QuantizedRows  # without padding
    screen: Screen
    dtype: torch.dtype  # the weight's dtype
    backend: Backend  # quantises the weight; the loss of either backend may read the copy
    # Storage and address are the weight's. Once the weight is freed, another tensor could have the
    # same address.
    storage: weakref.ref[torch.UntypedStorage]
    address: tuple[int, tuple[int, ...]]  # and strides
    version: int  # the weight's autograd version

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.rows)

    @torch.no_grad()
    def refresh(self, weight: Tensor, hidden: Tensor | None = None) -> None:
        """Quantises the weight's present values, in place. Collectives: none.

        Args:
            hidden: [..., D] hidden states, such as the last step's. They give a mean, which the
                loss subtracts from its own hidden states before it quantises them, and a scale of
                each channel, by which it divides them. None: keep the earlier mean and scales.
        Raises:
            ValueError: the weight's shape, dtype or device differs from the first weight's.
        """
        rows, values = self.rows, self.rows.values
        shape = [values.shape[0], rows.centre.shape[0]]
        _require_matrix(weight)
        got = list(weight.shape)
        if got[0] < shape[0] or got[1] != shape[1] or weight.dtype != self.dtype:
            raise ValueError(
                f"weight must have the shape and dtype it was quantised with, {shape} (without "
                f"padding) of {self.dtype}, got {got} of {weight.dtype}"
            )
        if weight.device != values.device:
            raise ValueError(f"weight must be on {values.device}, got {weight.device}")
        quantizer = quantizer_for(self.backend, weight, self.screen)
        moments = _moments_of(hidden, weight, quantizer)
        quantizer.quantize_weight(weight[: values.shape[0]].detach(), moments, values.dtype, rows)
        self.storage, self.address, self.version = _identity(weight)

    def check(self, weight: Tensor, num_classes: int, options: LossOptions) -> None:
        """Checks that this is a copy of `weight` and of its present values.

        Raises:
            ValueError: this is a copy of another weight, or of earlier values; or the options need
                no copy.
        """
        _check_screened(options)
        if options.screen != self.screen:
            raise ValueError(
                f"quantized_weight was made for screen={self.screen}, got screen={options.screen}; "
                "make it anew with quantize_weight(weight, screen=...)"
            )
        num_rows, dim = len(self.rows.values), len(self.rows.centre)
        shape = num_classes, weight.shape[1]
        if (num_rows, dim) != shape or weight.dtype != self.dtype:
            raise ValueError(
                f"quantized_weight must have the {num_classes} rows of weight that are no padding, "
                f"each of {shape[1]} numbers of {weight.dtype}, got {num_rows} rows of {dim} "
                f"numbers of {self.dtype}; make it anew with quantize_weight"
            )
        if self.storage() is not weight.untyped_storage() or _address(weight) != self.address:
            raise ValueError(
                "quantized_weight is of another tensor than weight (under autocast each call casts "
                "weight to a new tensor); quantise the tensor that you pass as weight, or leave "
                "quantized_weight out"
            )
        if version_of(weight) != self.version:
            raise ValueError(
                "quantized_weight is of earlier values of weight, which has changed since; call "
                "quantized_weight.refresh(weight) after the change"
            )


# The version that a copy of earlier values has: no weight has it.
_EARLIER = -1


def _notice_steps(copy: QuantizedWeight) -> None:
    """Lets a step of an optimizer on the weight make the copy one of earlier values: a fused
    optimizer leaves the weight's version as it is. The hook goes with the copy."""
    reference = weakref.ref(copy)

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        copy = reference()
        # A compiled step changes versions.
        if copy is None or torch.compiler.is_compiling():
            return
        storage = copy.storage()
        parameters = (x for group in optimizer.param_groups for x in group["params"])
        if any(_local(x).untyped_storage() is storage for x in parameters if x.grad is not None):
            copy.version = _EARLIER

    weakref.finalize(copy, register_optimizer_step_post_hook(note).remove)


def _local(parameter: Any) -> Tensor:
    return parameter._local_tensor if is_dtensor(parameter) else parameter


# An address and a version are values, which `check` compares in each call.
described_by[QuantizedWeight] = attrgetter("rows", "screen", "dtype")


class StepQuantizer:
    """A maker of a weight's 8-bit copy: one copy a step, for the losses of all microbatches.

        quantizer = StepQuantizer()  # one for each weight
        with quantizer.step():
            for hidden, targets in microbatches:
                screened = {"logits": "screened", "quantized_weight": quantizer}
                linear_cross_entropy(hidden, weight, targets, **screened).backward()
        optimizer.step()

    The weight must keep its values until the context ends. The end frees the copy: V_local (D' + 8)
    bytes, with D' = D rounded up to a multiple of 16. No copy outlives a step: Megatron's
    optimizers write a parameter through another tensor of its memory, which does not change the
    parameter's version. Outside of a step every call quantises the weight. The copy's mean and
    scales are those of the first microbatch's hidden states.
    Collectives: none.
    """

    def __init__(self) -> None:
        self._is_in_step = False
        self._rows: QuantizedRows | None = None
        self._key: Any = None  # identifies the weight of `_rows`

    @contextmanager
    def step(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Begins a step, as `step` does."""
        self.end()
        self._is_in_step = True

    def end(self) -> None:
        """Ends a step, as `step` does; a second call does nothing."""
        self._is_in_step, self._rows, self._key = False, None, None

    @property
    def num_bytes(self) -> int:
        """The bytes of the present copy; 0 without a copy."""
        return 0 if self._rows is None else _num_bytes(self._rows)

    def check(self, weight: Tensor, num_classes: int, options: LossOptions) -> None:
        """Checks that the options need a copy.

        Raises:
            ValueError: the options need no copy.
        """
        _check_screened(options)

    def rows(
        self, weight: Tensor, screen: Screen, make: Callable[[], QuantizedRows]
    ) -> QuantizedRows | None:
        """Returns this step's copy, which the step's first call makes; None outside of a step."""
        if not self._is_in_step:
            return None
        place = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device)
        key = (*place, version_of(weight), screen)
        if self._rows is None or self._key != key:
            self._rows = None  # frees memory for the next copy
            self._rows, self._key = make(), key
        return self._rows


def _check_screened(options: LossOptions) -> None:
    if options.logits != "screened":
        raise ValueError(
            'quantized_weight has no effect with logits="full"; use logits="screened", or '
            "leave quantized_weight out"
        )


def _num_bytes(rows: QuantizedRows) -> int:
    tensors = [x for x in vars(rows).values() if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


def _require_matrix(weight: Tensor) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 2 or 0 in weight.shape:
        got = list(weight.shape) if isinstance(weight, Tensor) else type(weight)
        raise ValueError(f"weight must have shape [V_local, D], got {got}")
    require_plain("weight", weight)
    require_tensor("weight", weight)
    require_values("weight", weight)


def _moments_of(hidden: Tensor | None, weight: Tensor, quantizer: Any) -> Any:
    if hidden is None:
        return None
    dim = weight.shape[1]
    require_plain("hidden", hidden)
    require_tensor("hidden", hidden)
    is_empty = hidden.dim() == 0 or hidden.numel() == 0
    if is_empty or hidden.shape[-1] != dim or hidden.device != weight.device:
        raise ValueError(
            f"hidden must have shape [..., D] with D={dim} (from weight), at least one token, on "
            f"{weight.device}, got {list(hidden.shape)} on {hidden.device}"
        )
    if not hidden.is_floating_point():
        raise ValueError(f"hidden must be a floating-point tensor, got {hidden.dtype}")
    return quantizer.moments_of(hidden.detach().reshape(-1, dim)).for_others()


def _identity(weight: Tensor) -> tuple[weakref.ref[torch.UntypedStorage], Any, int]:
    return weakref.ref(weight.untyped_storage()), _address(weight), version_of(weight)


def _address(weight: Tensor) -> tuple[int, tuple[int, ...]]:
    return weight.data_ptr(), weight.stride()


def version_of(weight: Tensor) -> int:
    """Returns the number of writes that autograd has counted; 0 for inference tensors."""
    return 0 if weight.is_inference() else weight._version


# A tensor made in inference mode could not be written by `refresh` outside of it.
@torch.inference_mode(False)
@torch.no_grad()
def quantize_weight(
    weight: Tensor,  # [V_local, D] bf16 | fp16
    hidden: Tensor | None = None,  # [..., D]
    *,
    vocab_shard: VocabShard | None = None,
    screen: Screen = Screen(),  # noqa: B008 - frozen
    backend: Backend = "auto",
) -> QuantizedWeight:
    """Quantises the weight's rows, for `linear_cross_entropy(..., quantized_weight=...)`.

    Args:
        hidden: some hidden states. They give a mean, which the loss subtracts from its own hidden
            states before it quantises them, and a scale of each channel, by which it divides them.
            Any hidden states will do; those of a similar step leave the smallest rounding error.
            None: no mean and no scales.
        vocab_shard: the loss's vocab_shard; rows beyond vocab_size are left out. None: no row is
            padding.
        screen: the loss's screen.
        backend: quantises here and in `refresh`; the loss may use another backend.
    Raises:
        ValueError: the weight is no matrix of a 16-bit dtype; its number of rows differs from
            vocab_shard's; hidden states don't fit it; or the backend can't run.
    Collectives: none. Source: docs/design/screened.md.
    """
    require_choice("backend", backend, get_args(Backend))
    if not isinstance(screen, Screen):
        raise ValueError(f"screen must be a cce_dist.Screen, got {screen!r}")
    _require_matrix(weight)
    if vocab_shard is not None:
        require_vocab_shard(vocab_shard)
        require_rows(vocab_shard, weight)
    quantizer = quantizer_for(backend, weight, screen)
    classes = weight.shape[0] if vocab_shard is None else vocab_shard.num_classes
    dtype = screen_dtype(screen, weight)
    moments = _moments_of(hidden, weight, quantizer)
    rows = quantizer.quantize_weight(weight[:classes].detach(), moments, dtype)
    copy = QuantizedWeight(rows, screen, weight.dtype, backend, *_identity(weight))
    _notice_steps(copy)
    return copy
