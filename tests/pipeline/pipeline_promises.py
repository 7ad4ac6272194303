"""How far from float64 a pipeline of 16 bits may be, and bugs by which it is further."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cce_dist.pipeline import head as pipeline_head
from cce_dist.pipeline import microbatch
from cce_dist.pipeline.head import PipelineHead
from cce_dist.testing import check_gate, check_promise


class Promise:
    """Of a 16-bit model, beside it in float64 and beside its dense logits: as in tolerance.py.

    What is rounded on the way to the head and behind it is the same in both.
    """

    def __init__(self, model: Any, setup: Any, divisor: int) -> None:
        wide = model.in_dtype(torch.float64).whole(setup)
        of_fp32 = model.whole(setup, torch.float32)
        self.dtype, self.fp32_losses = setup.dtype, of_fp32["losses"]
        self.golden, self.baseline = (
            {key: x if key == "losses" else x / divisor for key, x in found.items()}
            for found in (wide, model.whole(setup))
        )

    def require(self, name: str, ours: Tensor, rows: slice = slice(None)) -> None:
        """Args: rows: of the whole tensor, those that `ours` is."""
        right, baseline = self.golden[name][rows], self.baseline[name][rows]
        if name != "losses":
            assert ours.dtype == self.dtype, (name, ours.dtype)
            check_promise(name, ours, right, baseline, self.dtype)
            return
        assert ours.dtype == torch.float32
        check_promise(name, ours, right, baseline, torch.float32)
        check_gate(name, ours, right, self.fp32_losses)

    def require_block(self, index: int, found: Mapping[str, Tensor | None]) -> None:
        """Its weight and bias at once: the few numbers of a bias may be near by luck in one."""
        names = [key for key in found if key.startswith(f"{index}.")]
        grads = [x for key in names if (x := found[key]) is not None]
        assert len(grads) == len(names) > 0 and all(x.dtype == self.dtype for x in grads)
        ours, *others = (
            torch.cat([x.flatten() for x in each])
            for each in (grads, *([y[key] for key in names] for y in (self.golden, self.baseline)))
        )
        check_promise(f"block {index}", ours, *others, self.dtype)


def without_merge() -> Any:
    """Each rank takes the log-sum-exp of its own rows for the whole one."""

    def start(local: Any, *_: Any, **__: Any) -> Any:
        return lambda: local

    return mock.patch.object(microbatch, "start_merge_stats", start)


def without_sum() -> Any:
    """The last stage takes its own part of the hidden gradient for the whole one."""

    def start(root: int, courier: Any, tensor: Tensor) -> Any:
        return lambda: None

    return mock.patch.object(pipeline_head, "start_reduce", start)


def adding_up_in_16_bits() -> Any:
    """The weight's gradient, from microbatch to microbatch."""
    as_it_was = PipelineHead.gradients

    def gradients(head: PipelineHead, index: int, root: int) -> Tensor:
        loss = as_it_was(head, index, root)
        place = head.grads.place()
        assert place is not None
        place.rows.copy_(place.rows.to(head.hidden_dtype))
        return loss

    return mock.patch.object(PipelineHead, "gradients", gradients)


BUGS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "no merge": without_merge,
    "no sum": without_sum,
    "adding up in 16 bits": adding_up_in_16_bits,
}
