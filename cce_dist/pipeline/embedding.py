"""The input embedding over pipeline ranks, tied to the LM head's weight.

Each rank has the same rows of embedding and head, so tying costs no collective.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist.core.phases import in_phase
from cce_dist.pipeline.checks import check_ids
from cce_dist.pipeline.comm.groups import make_couriers, make_groups, start_broadcast, start_reduce
from cce_dist.pipeline.head import TIMEOUT, PipelineHead
from cce_dist.pipeline.warm_up import warm_up_embedding
from cce_dist.ranks.gather import gather_tokens, require
from cce_dist.ranks.hidden_sum import reduce_grad_hidden

_ONCE = (
    "the first stage must call the embedding once a microbatch, on the tokens that the schedule "
    "was given"
)


@dataclass
class _Microbatch:
    tokens: Tensor  # [...] int64
    wait: Callable[[], object]  # waits for the transfer under way
    rows: Tensor | None = None  # [N, D] this rank's part, then the sum, then the gradient


class TiedEmbedding(nn.Module):
    """The first stage's embedding of tokens, looked up and trained on all pipeline ranks.

    Every rank makes it; the first stage's module calls it on its tokens. It has no parameter;
    gradients go to the head's weight. Every rank runs four phases of a microbatch:

        ask        starts to send the tokens from the first stage's rank to all ranks
        look_up    starts the sum of all ranks' rows for the tokens, on the first stage's rank
        give       starts to send the gradient of the sum from that rank to all ranks
        add        adds the gradient to this rank's rows

    Between `look_up` and `give` the first stage runs `forward`, which waits for the sum, and its
    backward, which keeps the gradient. Ranks must not wait for each other in different phases: call
    `ask` for all microbatches first. `give` of the next microbatch calls `add`, or `finish_step`.

    Args:
        head: a head of the same ranks; the embedding has its hidden_shape, too.
        root: the rank in the head's group that has the first stage.
        timeout: the timeout of the groups that it makes.
    Collectives: makes at most four groups, at the same time on every rank, as the head does. A
        microbatch costs a broadcast of its tokens; a sum of [N, D] in hidden's dtype to the first
        stage, where each token's row comes from one rank and the others add 0; and a broadcast of
        [N, D] back. With tensor-parallel ranks there is also an all-reduce on the first stage, or
        under sequence_parallel a reduce-scatter and an all-gather.
    Determinism: bitwise equal from run to run.
    """

    def __init__(
        self, head: PipelineHead, *, root: int = 0, timeout: datetime.timedelta = TIMEOUT
    ) -> None:
        super().__init__()
        self.head, self.root = head, root
        device, tensor = head.weight.device, head.tensor_group
        self._asking, self._summing, self._giving = make_couriers(
            head.ranks, 3, timeout, device, paced=head.paced
        )
        self._tensor = None
        if tensor is not None:
            (self._tensor,) = make_groups(dist.get_process_group_ranks(tensor), 1, timeout, device)
        self._microbatches: dict[int, _Microbatch] = {}
        self._called = 0
        self.infers = False  # a schedule asks for shapes
        warm_up_embedding(self, head)

    @property
    def is_first(self) -> bool:
        return self.head.rank == self.root

    def ask(self, index: int, tokens: Tensor | None = None) -> None:
        """Starts to send a microbatch's tokens to all ranks, without waiting.

        Args: tokens: [...] of the microbatch on the rank of the first stage; None elsewhere.
        Raises:
            ValueError: on that rank, if the tokens lack the shape or dtype that all ranks expect.
        """
        head = self.head
        if self.is_first:
            check_ids("tokens", tokens, head.targets_shape)
            assert tokens is not None
            tokens = tokens.contiguous()
        else:
            tokens = torch.empty(head.targets_shape, dtype=torch.int64, device=head.weight.device)
        wait = start_broadcast(self.root, self._asking, tokens)
        self._microbatches[index] = _Microbatch(tokens, wait)

    @torch.no_grad()
    def look_up(self, index: int) -> None:
        """Waits for the tokens, and starts the sum of their rows without waiting for it."""
        batch, head = self._microbatches[index], self.head
        batch.wait()
        mine, rows = self._local_rows(batch.tokens)
        vectors = rows.new_zeros(len(rows), head.hidden_shape[-1], dtype=head.hidden_dtype)
        if head.shard.num_classes:
            vectors = head.weight.detach()[rows].to(head.hidden_dtype)
            vectors = vectors.masked_fill_(~mine[:, None], 0)
        batch.rows, batch.wait = vectors, start_reduce(self.root, self._summing, vectors)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns rows [..., D] of tokens [...]; under sequence_parallel this rank's slice."""
        head = self.head
        if self.infers or not self._microbatches:
            if not self.infers:
                raise RuntimeError(
                    "the embedding was called outside of a schedule's step, where the other ranks "
                    "do not answer"
                )
            return tokens.new_zeros(head.hidden_shape, dtype=head.hidden_dtype).requires_grad_()
        index, self._called = self._called, self._called + 1
        batch, rule = self._microbatches.get(index), _ONCE
        if batch is None or batch.tokens.shape != tokens.shape:
            raise ValueError(f"{rule}, got {list(tokens.shape)} in call {index}")
        require((batch.tokens == tokens).all(), lambda: f"{rule}, got others", rule)
        # Autograd must ask for a gradient, and the weight's node must not run.
        anchor = torch.empty(0, device=head.weight.device, requires_grad=True)
        return _Rows.apply(anchor, self, index)

    def rows(self, index: int) -> Tensor:
        """Returns the rows of `forward`, without autograd."""
        batch = self._microbatches[index]
        assert batch.rows is not None
        batch.wait()
        vectors, batch.rows = batch.rows, None
        head, dtype = self.head, self.head.hidden_dtype
        # `reduce_grad_hidden` sums rows here, not a gradient, and on some ranks only: watchers must
        # not count it as another phase.
        with in_phase("reduce", begins=False):
            vectors = reduce_grad_hidden(
                vectors, self._tensor, scatter=head.slices > 1, dtype=dtype
            )
        return vectors.view(head.hidden_shape)

    def keep(self, index: int, grad: Tensor) -> None:
        """Keeps the gradient of `rows`, for `give`."""
        if self.head.slices > 1:
            grad = gather_tokens(grad, self._tensor)
        self._microbatches[index].rows = grad.reshape(-1, grad.shape[-1]).contiguous()

    @torch.no_grad()
    def give(self, index: int) -> None:
        """Starts to send the gradient of the rows to all ranks, and adds that of `index` - 1."""
        batch, head = self._microbatches[index], self.head
        if not self.is_first:
            # Only the first stage needs the sum; this rank has not waited for its end yet.
            batch.wait()
            shape = (batch.tokens.numel(), head.hidden_shape[-1])
            batch.rows = head.weight.new_empty(shape, dtype=head.hidden_dtype)
        assert batch.rows is not None
        batch.wait = start_broadcast(self.root, self._giving, batch.rows)
        if index - 1 in self._microbatches:
            self.add(index - 1)

    @torch.no_grad()
    def add(self, index: int) -> None:
        """Waits for the gradient, adds it to this rank's rows, and ends the microbatch."""
        batch, head = self._microbatches.pop(index), self.head
        batch.wait()
        assert batch.rows is not None
        if head.weight.requires_grad and head.shard.num_classes:
            mine, rows = self._local_rows(batch.tokens)
            head.grads.add_to_rows(rows, batch.rows.masked_fill(~mine[:, None], 0))

    def drop(self, index: int) -> None:
        """Ends a microbatch of an evaluation, in place of `give` and `add`."""
        batch = self._microbatches.pop(index)
        if not self.is_first:
            batch.wait()

    def look_up_all(self, tokens: Sequence[Tensor | None]) -> None:
        """Calls `ask` and `look_up` for every microbatch of a step."""
        for index, each in enumerate(tokens):
            self.ask(index, each)
        for index in range(len(tokens)):
            self.look_up(index)
        if not self.is_first:
            for batch in self._microbatches.values():
                batch.wait()
                batch.rows, batch.wait = None, _nothing

    def finish_all(self, *, backward: bool) -> None:
        """Calls `give`, or `drop`, for every microbatch of a step, and `finish_step`."""
        for index in range(len(self._microbatches)):
            if backward:
                self.give(index)
            else:
                self.drop(index)
        self.finish_step()

    def finish_step(self) -> None:
        """Ends a step: adds the gradient of its last microbatch."""
        for index in list(self._microbatches):
            self.add(index)
        self._called = 0

    def close(self) -> None:
        """Destroys the groups that the embedding made, and nothing else."""
        for courier in (self._asking, self._summing, self._giving):
            courier.close()
        if self._tensor is not None:
            dist.destroy_process_group(self._tensor)

    def _local_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [N] bool, True where this rank has the token's row; and [N] rows, 0 elsewhere."""
        rows = self.head.shard.local_targets(tokens.reshape(-1))
        mine = rows >= 0
        return mine, rows.clamp_min(0)


def _nothing() -> None:
    """Waits for nothing: the microbatch's transfer has ended."""


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, embedding: TiedEmbedding, index: int):
        ctx.embedding, ctx.index = embedding, index
        return embedding.rows(index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor):
        ctx.embedding.keep(ctx.index, grad)
        return None, None, None
