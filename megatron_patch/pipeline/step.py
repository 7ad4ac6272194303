"""One call of Megatron's schedule on one stage, where the vocabulary is over the pipeline.

The stage runs the passes of `plan_vocab_order` in turn: forward, backward, log-sum-exp, gradients
of the head. Megatron's own functions run the layers and the loss function. The loss function runs
on the last stage as before, as soon as each token's loss is known; it gets the losses alone, and
its gradient goes to all stages.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from cce_dist.pipeline.schedules.server import Waiting
from megatron_patch.deferred import version_of
from megatron_patch.errors import PatchError, failing_in
from megatron_patch.head import classes_of
from megatron_patch.pipeline.rows import Rows
from megatron_patch.pipeline.stages import Pipeline
from megatron_patch.pipeline.tied import TiedStep
from megatron_patch.seams import Arguments, PipelineSeams, arguments_of, parallel_state

# A rank that needs no hidden gradients leaves this many of their sums unawaited.
_UNAWAITED = 2
# Passes of a microbatch: the stage's work, and the result of other stages that it waits for.
_PASSES = {
    "E": "look-up of its tokens, which come from the first stage",
    "F": "forward of the layers, on hidden states of the stage before",
    "S": "log-sum-exp of this stage's rows, on hidden states of the last stage",
    "U": "loss function, on the log-sum-exps of all stages",
    "T": "gradients of this stage's rows, by the log-sum-exps of all stages",
    "B": "backward of the layers, from the gradient that the other stages make",
    "G": "gradient of the tied embedding, which comes from the first stage",
}


class Step:
    """A step's passes, in their order; `Waiting` asks it for the gradients."""

    infers = False

    def __init__(self, seams: PipelineSeams, rows: Rows, arguments: Arguments) -> None:
        self.seams, self.schedules = seams, seams.schedules
        self.rows, self.arguments = rows, arguments
        self.pipeline: Pipeline = rows.pipeline
        self.head = self.pipeline.head
        self.root, self.is_last = self.pipeline.last, self.pipeline.rank == self.pipeline.last
        self.config = self.schedules.get_model_config(arguments.model)
        self.trains = not arguments.forward_only
        embedding = self.pipeline.embedding
        self.tied = None if embedding is None else TiedStep(embedding, rows, arguments)
        # DDP reduces gradients when this is closed.
        self._unsynced = contextlib.ExitStack()
        self._store: list[Any] = []
        self._inputs: dict[int, list[Tensor | None]] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._loss_funcs: dict[int, Any] = {}
        self._accepted: tuple[Tensor, Tensor, Tensor] | None = None
        self._unawaited: list[int] = []
        self._num_tokens = torch.zeros([], dtype=torch.int, device=rows.weight.device)

    def run(self) -> list[Any]:
        """Runs all passes.

        Raises:
            RuntimeError: another rank died or stayed away; names the pass in which this rank
                noticed.
        """
        arguments, timers = self.arguments, self.config.timers
        if timers is not None:
            barrier = self.config.barrier_with_L1_time
            timers("forward-backward", log_level=1).start(barrier=barrier)
        stage = f"stage {self.pipeline.rank} of {self.pipeline.size}"
        with failing_in(f"{stage}, the beginning of a step"):
            self._start()
        passes = {
            "F": self._forward,
            "S": self._statistics,
            "U": self._weigh,
            "T": self._gradients,
            "B": self._backward,
        }
        if self.tied is not None:
            passes |= {"E": self.tied.look_up, "G": self.tied.give}
        for kind, index in self.pipeline.order(arguments.num_microbatches, trains=self.trains):
            if self.trains or kind != "B":
                with failing_in(f"{stage}, microbatch {index}, {_PASSES[kind]}"):
                    passes[kind](index)
        with failing_in(f"{stage}, the end of a step, which waits for the last transfers"):
            self._await_sums(0)
            self.pipeline.finish_sends()
            if self.tied is not None:
                self.tied.finish()
        with failing_in(f"{stage}, the reduction of gradients, finalize_model_grads_func's"):
            self._finish()
        if timers is not None:
            timers("forward-backward").stop()
        return self._store

    def _start(self) -> None:
        if self.trains:
            self._unsynced.enter_context((self.config.no_sync_func or contextlib.nullcontext)())
        # By its __call__: hooks that gather parameters run before it.
        self.rows()
        self.head.start_step(record=self.trains)
        if self.trains:
            self._sum_into_main_grad()
        self.pipeline.start_step(self.arguments.num_microbatches, trains=self.trains)

    def _finish(self) -> None:
        arguments = self.arguments
        if not self.trains:
            self.head.finish_step()
            return
        self._finish_grads()
        if self._syncs_later:
            self._unsynced.close()
            self.config.grad_sync_func(arguments.model.parameters())
        if self.config.finalize_model_grads_func is not None:
            per_token = self.config.calculate_per_token_loss
            self.config.finalize_model_grads_func(
                [arguments.model],
                self._num_tokens if per_token else None,
                **{name: getattr(arguments, name) for name in self.seams.finalizing()},
            )

    @property
    def _syncs_later(self) -> bool:
        """As in Megatron's schedule DDP reduces gradients during the last microbatch's backward.

        With a grad_sync_func only the first stage does so; the others reduce after that backward.
        """
        return self.config.grad_sync_func is not None and self.pipeline.rank > 0

    def accept(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Takes hidden [s, b, h] and labels [b, s] of the microbatch whose forward is under way.

        Returns: a placeholder for its losses.
        """
        if self._accepted is not None:
            raise PatchError("the model computes more than one loss of a microbatch")
        unknown = torch.full_like(labels, float("nan"), dtype=torch.float32)
        self._accepted = hidden, labels, unknown
        return unknown

    def grad(self, index: int) -> Tensor:
        """Returns the hidden gradient, for which the last stage's backward waits."""
        return self.head.take(index)

    def _forward(self, index: int) -> None:
        arguments, schedules = self.arguments, self.schedules
        received: list[Tensor | None] = [self.pipeline.receive_forward()]
        self._accepted = None

        def step_func(iterator: Any, model: Any) -> Any:
            if self.tied is not None and self.pipeline.rank == 0:
                return self.tied.forward_step(index, model)
            output, loss_func = arguments.forward_step_func(iterator, model)
            if self.is_last:
                self._loss_funcs[index] = loss_func
            return output, None

        (output,), _ = schedules.forward_step(
            step_func,
            arguments.data_iterator,
            arguments.model,
            arguments.num_microbatches,
            received,
            [],
            self.config,
            cp_group_size=parallel_state().get_context_parallel_world_size(),
            is_first_microbatch=schedules.check_first_val_step(
                arguments.first_val_step, arguments.forward_only, index == 0
            ),
            current_microbatch=index,
            is_last_stage=False,
        )
        if self.is_last:
            output = self._post(index, output)
        else:
            self._require_shape(output)
            self.pipeline.send_forward(output)
        if self.trains:
            self._inputs[index], self._outputs[index] = received, [output]
            if not self.is_last:
                schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def _require_shape(self, output: Any) -> None:
        """Checks the shape and dtype of a tensor before it is sent.

        gloo ends a process that receives more bytes than it expects. If fewer come, it leaves the
        end of the buffer as it was.
        """
        wanted, got = self.pipeline.described, type(output).__name__
        if isinstance(output, Tensor):
            got = f"{list(output.shape)} {output.dtype}"
        if got != wanted:
            raise PatchError(
                f"hidden states of every microbatch must be {wanted}, by seq_length, "
                f"micro_batch_size and pipeline_dtype, got {got}: pad microbatches to one shape, "
                "and set pipeline_dtype to the dtype of the stages' outputs"
            )

    def _post(self, index: int, output: Any) -> Tensor:
        """Sends a microbatch to the head. Returns: the root of the last stage's backward."""
        accepted = self._accepted
        if accepted is None or output is not accepted[2] or version_of(output) != 0:
            raise PatchError(
                "forward_step_func must return the model's losses as the model's "
                "compute_language_model_loss returned them, unchanged, got "
                f"{type(output).__name__}: compute with them in the loss function, and call the "
                "model with labels, since vocab_over_pipeline computes no logits"
            )
        hidden, labels, _ = accepted
        self._accepted = None
        targets = classes_of(labels, self.rows.shard).transpose(0, 1)
        self.head.post(index, self.root, *self.head.checked(hidden, targets))
        return Waiting.apply(hidden, self, index)  # pyright: ignore[reportReturnType]

    def _statistics(self, index: int) -> None:
        if not self.is_last:
            self.head.expect(index, self.root, self.arguments.num_microbatches)
        # By its __call__: hooks that gather parameters run before it.
        self.rows()
        self.head.statistics(index, record=self.trains)
        if self.trains and not self.is_last:
            self.head.weigh(index, self.root)

    def _weigh(self, index: int) -> None:
        """Calls the loss function, on the last stage."""
        losses = self.head.losses(index) if self.trains else self.head.value(index)
        losses = losses.transpose(0, 1).contiguous().requires_grad_(self.trains)
        # The loss function may write into its input, which autograd forbids for a leaf.
        loss_input = losses.clone()
        if self.config.timers is not None:
            # Megatron's function stops this timer.
            self.config.timers("forward-compute", log_level=2).start()
        loss, num_tokens = self.schedules.forward_step_calc_loss(
            self.arguments.model,
            loss_input,
            self._loss_funcs.pop(index),
            self.config,
            None,
            self.arguments.collect_non_loss_data,
            self.arguments.num_microbatches,
            self._store,
            parallel_state().get_context_parallel_world_size(),
            True,
        )
        self._num_tokens += num_tokens
        if not self.trains:
            return
        if self.config.grad_scale_func is not None:
            loss = self.config.grad_scale_func(loss)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        grad = torch.zeros_like(losses) if losses.grad is None else losses.grad
        self.head.weigh(index, self.root, grad.transpose(0, 1))

    def _gradients(self, index: int) -> None:
        if not self.trains:
            if not self.is_last:
                self.head.value(index)
            return
        self.head.gradients(index, self.root)
        if not self.is_last:
            self._unawaited.append(index)
            self._await_sums(_UNAWAITED)

    def _backward(self, index: int) -> None:
        received, output = self._inputs.pop(index), self._outputs.pop(index)
        grad = torch.ones_like(output[0]) if self.is_last else self.pipeline.receive_backward()
        if index == self.arguments.num_microbatches - 1 and not self._syncs_later:
            self._unsynced.close()
        arguments = {
            "input_tensor": received,
            "output_tensor": output,
            "output_tensor_grad": [grad],
            "config": self.config,
            "model_type": self.schedules.get_model_type(self.arguments.model),
            "pipeline_model_parallel_size": self.pipeline.size,
        }
        # Some releases do not take the last two.
        function = self.schedules.backward_step
        (input_grad,) = function(**{name: arguments[name] for name in arguments_of(function)})
        self.pipeline.send_backward(input_grad)

    def _await_sums(self, at_most: int) -> None:
        """Waits for the oldest sums, until at most so many are left unawaited."""
        while len(self._unawaited) > at_most:
            self.head.take(self._unawaited.pop(0))

    def _sum_into_main_grad(self) -> None:
        main_grad = getattr(self.rows.weight, "main_grad", None)
        if main_grad is not None and main_grad.dtype == torch.float32:
            self.head.grads.add_into(main_grad)

    def _finish_grads(self) -> None:
        """Leaves the parameter's gradient in the place where DDP reads it after a backward."""
        weight: Any = self.rows.weight
        self.head.finish_step()
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None or not weight.requires_grad:
            return
        if main_grad.dtype == torch.float32:
            weight.grad_added_to_main_grad = True
        # DDP's hook is on the node that accumulates the gradient.
        with torch.enable_grad():
            node = weight.expand_as(weight)
        torch.autograd.backward(node, weight.new_zeros(()).expand_as(weight))
