"""The backend in Triton: each method, and the module that has it."""

from __future__ import annotations

from torch import Tensor

from cce_dist.backends.protocol import ExpectedBackward, ForwardRequest, Traits
from cce_dist.backends.triton.filter.kept_logits import KeptLogits
from cce_dist.backends.triton.filter.lists import ListedLogits
from cce_dist.backends.triton.filter.marks import Marks, keep
from cce_dist.backends.triton.forward.largest import largest
from cce_dist.backends.triton.grads import backward, scale
from cce_dist.backends.triton.stats import forward
from cce_dist.backends.triton.tokens.merge import KERNELS
from cce_dist.backends.triton.tokens.pick import pick_on_device
from cce_dist.backends.triton.warm_up import warm_up
from cce_dist.core.types import Head


class TritonBackend:
    """Kernels for bf16, fp16 and fp32 on a GPU, or in Triton's interpreter."""

    traits = Traits(
        counts_on_device=True,
        orders_tokens=True,
        chooses_in_forward=True,
        in_forward_filters=True,
        narrow_logits=True,
    )
    merge_kernels = KERNELS

    pick = staticmethod(pick_on_device)
    forward = staticmethod(forward)
    keep = staticmethod(keep)
    backward = staticmethod(backward)
    scale = staticmethod(scale)
    largest = staticmethod(largest)
    scores_like = staticmethod(Marks.like)
    warm_up = staticmethod(warm_up)

    def store_for(
        self,
        head: Head,
        num_tokens: int,
        request: ForwardRequest,
        backward: ExpectedBackward,
        spare: Tensor | None,
    ) -> KeptLogits | ListedLogits | None:
        if request.screen is not None:
            assert request.filter is not None
            return ListedLogits(request.filter.draws and backward.hidden is not None)
        return KeptLogits.make(head.weight, num_tokens, request.room.workspace_bytes, spare)

    def store_for_chunk(self, head: Head, num_tokens: int) -> KeptLogits:
        return KeptLogits.make_for_chunk(head.weight, num_tokens)
