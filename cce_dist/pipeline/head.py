"""The vocabulary over pipeline ranks: the loss in phases that a schedule places between its own.

A microbatch goes through four phases. Each starts a collective, for which the next phase waits:

    post         sends hidden states and targets from the last stage's rank to all ranks
    statistics   computes log-sum-exp and target logit of this rank's columns; starts the merge
    gradients    computes loss and gradients; starts the sum of the hidden gradient
    take         returns the hidden gradient, which the last stage's backward needs

With reduction "none" the last stage's rank computes the scalar loss from each token's loss, and
differentiates it: `losses` returns the tokens' losses, and `weigh` sends their gradient to all
ranks before `gradients`.

The weight's gradient never travels. Each kind of collective has its own group, so the order of
microbatches must be the same on all ranks, but the order of phases may differ.
"""

from __future__ import annotations

import datetime
import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.algorithm import sharded
from cce_dist.core.phases import in_phase
from cce_dist.core.stats import Stats
from cce_dist.core.types import Upstream, accumulate_dtype
from cce_dist.frontend.inputs import Inputs
from cce_dist.frontend.prepare import prepare
from cce_dist.frontend.quantized import StepQuantizer
from cce_dist.options import LossOptions
from cce_dist.pipeline.checks import check_microbatch, check_product, check_same, check_weight
from cce_dist.pipeline.comm.groups import make_couriers, make_groups, start_broadcast, start_reduce
from cce_dist.pipeline.comm.neighbours import Neighbours
from cce_dist.pipeline.frequent_rows import FrequentRows
from cce_dist.pipeline.grads import RowGradients
from cce_dist.pipeline.microbatch import Microbatch, sent_grad, start_forward, without_autograd
from cce_dist.pipeline.warm_up import warm_up_head
from cce_dist.ranks.gather import gather_tokens
from cce_dist.ranks.hidden_sum import reduce_grad_hidden
from cce_dist.ranks.transport import group_size, process_group
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = datetime.timedelta(minutes=10)


class PipelineHead:
    """An LM head whose rows are spread over the ranks of a pipeline, and its cross-entropy.

    Args:
        weight: [V_local, D] this rank's rows, bf16 | fp16 | fp32 | float64. `finish_step` adds the
            phases' gradient to weight.grad; no hook of the parameter runs.
        group: the ranks of the pipeline.
        vocab_group: the ranks that share the vocabulary, in the vocabulary's order: the pipelines
            of all tensor-parallel ranks; None: group.
        tensor_group: with vocab_group, the tensor-parallel ranks of this stage.
        sequence_parallel: a stage's hidden states are this tensor-parallel rank's slice of dim 0.
        hidden_shape: [..., D] of every microbatch's hidden states on a rank, in weight's dtype.
            Targets have this shape without D; under sequence_parallel they cover all tokens.
        vocab_shard: see `linear_cross_entropy`.
        bias: [V_local] this rank's part; its gradient goes to bias.grad in the same way.
        class_weight: [V], the same on every rank.
        options: options of the loss; reduction "mean" or "sum" of a microbatch, or "none".
        loss_scale: a factor of all microbatches' gradients, such as 1 / their number. It and the
            options must be the same on all ranks of vocab_group.
        timeout: the timeout of the groups that the head makes.
        quantize_once: with logits="screened" a step's first microbatch quantises the weight for the
            whole step: V_local (D + 8) bytes until `finish_step`. False: each microbatch does.
        paced: ranks meet on the host before each of the head's collectives, and so do not wait for
            each other in kernels, which would slow down the stages' kernels; None: True on GPUs.
    Raises:
        ValueError: an argument is not supported; the message says which.
    Collectives: makes three groups, four with tensor_group, and with `paced` twice as many: every
        rank of the job, of other pipelines too, makes its head at the same time. A microbatch costs
        a broadcast of its hidden states and targets over `group`, an all-gather of 8 N + 32 bytes
        (fp32: 12 N + 32) a rank over vocab_group, and a sum of [N, D] in fp32 over `group` to the
        last stage's rank. The last stage also has an all-reduce over tensor_group; or under
        sequence_parallel an all-gather of hidden first, and a reduce-scatter. Reduction "none" adds
        a group, and a broadcast of 4 N bytes over it. With gradient="filtered" and the Triton
        backend a step begins with the all-gather of `FrequentRows` over vocab_group; with
        logits="screened" so does a step without gradients. On GPUs three steps of made-up
        microbatches warm it up.
    Determinism: the same as the loss's.
    Source: arXiv:2411.05288, its schedule of two barriers, without logits in memory.
    """

    def __init__(
        self,
        weight: Tensor,  # [V_local, D]
        *,
        group: ProcessGroup | DeviceMesh,
        hidden_shape: tuple[int, ...],
        vocab_group: ProcessGroup | DeviceMesh | None = None,
        tensor_group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
        vocab_shard: VocabShard | None = None,
        bias: Tensor | None = None,  # [V_local]
        class_weight: Tensor | None = None,  # [V]
        options: LossOptions = LossOptions(),  # noqa: B008 - frozen
        loss_scale: float = 1.0,
        timeout: datetime.timedelta = TIMEOUT,
        quantize_once: bool = True,
        paced: bool | None = None,
    ) -> None:
        stages, tensor = (process_group(x, "of a pipeline") for x in (group, tensor_group))
        vocab = stages if vocab_group is None else process_group(vocab_group, "of a pipeline")
        check_weight(stages, weight, hidden_shape, options)
        assert stages is not None and vocab is not None
        check_product(stages, vocab, tensor, sequence_parallel)
        check_same(vocab, {"loss_scale": loss_scale, "options": options})
        self.weight, self.bias, self.class_weight = weight, bias, class_weight
        self._vocab_shard, self.options, self.loss_scale = vocab_shard, options, loss_scale
        self.hidden_shape = tuple(hidden_shape)
        self.hidden_dtype = weight.dtype
        self.group = stages
        self.rank, self.size = dist.get_rank(stages), dist.get_world_size(stages)
        place = dist.get_rank(vocab), dist.get_world_size(vocab)
        self.shard = vocab_shard or VocabShard.even(weight.shape[0], *place)
        self.ranks = dist.get_process_group_ranks(stages)
        self.paced = weight.device.type == "cuda" if paced is None else paced
        make = functools.partial(
            make_couriers, timeout=timeout, device=weight.device, paced=self.paced
        )
        self._posting, self._summing = make(self.ranks, 2)
        self._weighing = make(self.ranks, 1)[0] if options.reduction == "none" else None
        (self._merging,) = make(dist.get_process_group_ranks(vocab), 1)
        self.vocab_group = self._merging.group  # of the argument's ranks
        self._tensor = None
        if tensor is not None:
            # A stage's tensor-parallel ranks run in step: they need not meet on the host.
            ranks = dist.get_process_group_ranks(tensor)
            (self._tensor,) = make_groups(ranks, 1, timeout, weight.device)
        self.tensor_group, self.slices = tensor, group_size(tensor) if sequence_parallel else 1
        self._microbatches: dict[int, Microbatch] = {}
        self.grads = RowGradients(weight, bias, self.shard.num_classes)
        # The schedule sets it after a failed step, which leaves ranks at different phases.
        self.is_broken = False
        self._neighbours: Neighbours | None = None
        self._timeout = timeout
        self.screens = options.logits == "screened"
        self._quantizer = StepQuantizer() if self.screens and quantize_once else None
        self._frequent = None
        kernels = weight.device.type == "cuda" or options.backend == "triton"
        if options.filters and kernels and group_size(vocab) > 1:
            self._frequent = FrequentRows(weight, bias, self.shard, self._merging)
        warm_up_head(self)

    def start_step(self, *, record: bool = True) -> None:
        """Starts a step, on every rank, before the first microbatch; does not wait.

        For the Triton backend's filter it sends all ranks the rows that tell most of a token's lse.
        A step without this call has the same loss, and its filter keeps more columns. The weight
        must keep its values until `finish_step`, which also ends a step without gradients.

        Args: record: the step has gradients.
        """
        if self._frequent is not None and (record or self.screens):
            self._frequent.exchange()
        if self._quantizer is not None:
            self._quantizer.begin()

    def neighbours(self) -> Neighbours:
        """Returns the connections by which our own schedules send between stages. The first call
        makes them: every rank of the job makes that call at the same time."""
        if self._neighbours is None:
            device, timeout = self.weight.device, self._timeout
            self._neighbours = Neighbours(self.ranks, device, timeout, paced=self.paced)
        return self._neighbours

    @property
    def weighs(self) -> bool:
        """Tells whether `weigh` must come before `gradients`."""
        return self._weighing is not None

    def reshape(self, hidden_shape: tuple[int, ...]) -> None:
        """Sets the shape of later microbatches: between steps, on every rank of the job."""
        if hidden_shape != self.hidden_shape:
            self.hidden_shape = hidden_shape
            warm_up_head(self)

    @property
    def targets_shape(self) -> tuple[int, ...]:
        first, *others = self.hidden_shape[:-1]
        return (first * self.slices, *others)

    def post(
        self, index: int, root: int, hidden: Tensor | None = None, targets: Tensor | None = None
    ) -> None:
        """Starts to send a microbatch to all ranks, without waiting.

        Args:
            root: the rank in the group that has the last stage.
            hidden: on the root; None elsewhere.
            targets: on the root; None elsewhere.
        Raises:
            ValueError: on the root, if a shape or dtype is not the one that all ranks expect.
        """
        if index in self._microbatches:
            raise ValueError(f"index must be of a microbatch that is not under way, got {index}")
        device = self.weight.device
        if self.rank == root:
            hidden, targets = self.checked(hidden, targets)
        else:
            hidden = torch.empty(self.hidden_shape, dtype=self.hidden_dtype, device=device)
            targets = torch.empty(self.targets_shape, dtype=torch.int64, device=device)
        arrive = start_broadcast(root, self._posting, hidden, targets)
        self._microbatches[index] = Microbatch((hidden, targets, arrive))

    def expect(self, index: int, root: int, count: int) -> None:
        """Calls `post` on a rank without the last stage, for this microbatch and, if it is below
        `count`, the next: the next can then arrive while this rank computes."""
        for each in range(index, min(index + 2, count)):
            if each not in self._microbatches:
                self.post(each, root)

    @without_autograd
    def statistics(self, index: int, *, record: bool = True) -> None:
        """Waits for the posted tensors, computes this rank's statistics, and starts their merge.

        Args:
            record: True if `gradients` follows, False if `value` does.
        Raises:
            ValueError: targets beyond the vocabulary, on every rank.
        """
        batch = self._under_way(index)
        if batch.posted is None:
            raise RuntimeError(f"statistics must be called once a microbatch, got {index} again")
        (hidden, targets, arrive), batch.posted = batch.posted, None
        arrive()
        if self.slices > 1:
            hidden = gather_tokens(hidden, self._tensor)
        inputs = Inputs(
            hidden, self.weight, targets, bias=self.bias, class_weight=self.class_weight
        )
        group, shard, quantizer = self._merging.group, self._vocab_shard, self._quantizer
        call, finish = prepare(inputs, self.options, group, shard, quantizer, record=record)
        # Kernels that wait for other ranks run at the same time, for other microbatches.
        call = replace(call, plan=replace(call.plan, shares_device=True))
        tokens = call.tokens(hidden.reshape(-1, self.hidden_shape[-1]))
        head = call.head(self.weight.detach(), self.bias)
        batch.step = call, finish, tokens, head
        elsewhere = None
        if self._frequent is not None and (record or self.screens):
            elsewhere = self._frequent.elsewhere(head)
        if self._frequent is not None and record:
            self._frequent.count(tokens.local_targets)
        issue = self._merging.issue
        batch.merge, batch.scores = start_forward(
            tokens, head, call.plan, score=record, elsewhere=elsewhere, issue=issue
        )

    @without_autograd
    def value(self, index: int) -> Tensor:
        """Waits for the merge, and ends the microbatch.

        Returns: on every rank the loss [], or with reduction "none" a loss for each target; fp32 or
            float64.
        """
        return self._merged(self._under_way(index, pop=True))[0]

    @without_autograd
    def losses(self, index: int) -> Tensor:
        """Returns the losses of `value` with reduction "none", and does not end the microbatch."""
        return self._merged(self._under_way(index))[0]

    def weigh(self, index: int, root: int, grad_losses: Tensor | None = None) -> None:
        """Starts to send the gradient of `losses`, of their shape and in fp32 or float64, from the
        last stage's rank to all ranks, without waiting."""
        batch, dtype = self._under_way(index), accumulate_dtype(self.hidden_dtype)
        assert self._weighing is not None
        *others, length = self.targets_shape
        like = self.weight.new_empty(*others, max(length - self.options.shift, 0), dtype=dtype)
        batch.grad_losses = sent_grad(grad_losses, like) if self.rank == root else like
        batch.weighed = start_broadcast(root, self._weighing, batch.grad_losses)

    @without_autograd
    def gradients(self, index: int, root: int) -> Tensor:
        """Waits for the merge, and starts the sum of the hidden gradient.

        Adds this microbatch's part to the gradients of weight and bias.
        Returns: the loss [], on every rank.
        """
        batch = self._under_way(index)
        if self._weighing is not None and batch.weighed is None:
            raise RuntimeError('reduction="none" needs weigh before gradients')
        if batch.weighed is not None and self.rank != root:
            batch.weighed()
        loss, stats, upstream = self._merged(batch)
        assert batch.step is not None
        call, _, tokens, head = batch.step
        out = sharded.backward(
            tokens,
            head,
            # No group: this method starts the sum itself.
            replace(call.plan, group=None),
            stats,
            upstream,
            kept=sharded.choose_columns(tokens, head, call.plan, batch.scores, stats),
            hidden=True,
            weight=self.grads.place(),
            bias=self.bias is not None and self.bias.requires_grad,
            in_fp32=True,
        )
        assert out.hidden is not None
        if out.bias is not None:
            self.grads.add_bias(out.bias)
        # Only the sum of the hidden gradient is still needed.
        batch.step = batch.scores = batch.merge = batch.merged = None
        batch.grad, batch.is_taken = out.hidden, self.rank == root
        with in_phase("reduce"):
            batch.summed = start_reduce(root, self._summing, batch.grad)
        return loss

    @in_phase("reduce", begins=False)
    def take(self, index: int) -> Tensor:
        """Waits for the sum, and ends the microbatch.

        Returns: the hidden gradient [..., D] in hidden's dtype on the last stage's ranks; on other
            ranks a tensor without use.
        """
        batch = self._under_way(index, pop=True)
        assert batch.summed is not None and batch.grad is not None
        batch.summed()
        if batch.weighed is not None:
            batch.weighed()
        grad = batch.grad
        if not batch.is_taken:
            return grad
        scatter, dtype = self.slices > 1, self.hidden_dtype
        grad = reduce_grad_hidden(grad, self._tensor, scatter=scatter, dtype=dtype)
        return grad.to(dtype).view(self.hidden_shape)

    def finish_step(self, divide_by: int = 1) -> None:
        """Ends a step, also one without gradients: adds its sums to weight.grad and bias.grad.

        Drops the rows that `start_step` has sent.

        Args: divide_by: divides the sums, as a schedule's `scale_grads` divides its stages' grads.
        Raises:
            RuntimeError: a microbatch is still under way.
        """
        if self._microbatches:
            left = sorted(self._microbatches)
            raise RuntimeError(f"microbatches {left} were begun and not finished in this step")
        self.grads.finish(divide_by)
        self.forget()

    def forget(self) -> None:
        """Drops a step's gradients, and the copies of the weight's present rows."""
        self.grads.forget()
        if self._frequent is not None:
            self._frequent.forget()
        if self._quantizer is not None:
            self._quantizer.end()

    def close(self) -> None:
        """Destroys the groups that the head made, and nothing else."""
        couriers = (self._posting, self._summing, self._merging, self._weighing)
        for each in (*couriers, self._neighbours):
            if each is not None:
                each.close()
        if self._tensor is not None:
            dist.destroy_process_group(self._tensor)

    def _under_way(self, index: int, *, pop: bool = False) -> Microbatch:
        if index not in self._microbatches:
            raise ValueError(f"index must be of a microbatch that is under way, got {index}")
        return self._microbatches.pop(index) if pop else self._microbatches[index]

    def _merged(self, batch: Microbatch) -> tuple[Tensor, Stats, Upstream]:
        assert batch.step is not None and batch.merge is not None
        if batch.merged is None:
            with in_phase("merge", begins=False):
                batch.merged = batch.merge()
        stats, finish, scale = batch.merged, batch.step[1], self.loss_scale
        vectors = (stats.nll, stats.lse, stats.smooth_logit)
        loss = finish.result(*vectors, None, [])
        assert isinstance(loss, Tensor)
        if batch.grad_losses is not None:
            scale = scale * finish.of_tokens(batch.grad_losses)
        return loss, stats, finish.terms.upstream(*vectors[1:]).scaled(scale)

    def checked(self, hidden: Tensor | None, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        if hidden is None or targets is None:
            raise ValueError("hidden and targets must be given on the rank of the last stage")
        shapes = self.hidden_shape, self.targets_shape
        check_microbatch(hidden, targets, *shapes, self.hidden_dtype)
        return hidden.detach().contiguous(), targets.contiguous()
