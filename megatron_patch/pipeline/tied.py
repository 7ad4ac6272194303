"""The input embedding that is tied to an output layer with rows over the pipeline.

All stages look up their rows of a microbatch's tokens before the first stage needs the sum. So the
first stage reads its data ahead: it calls forward_step_func for a later microbatch with a
`Recorder` in place of the model. When the microbatch's turn comes, the model gets the recorded
arguments.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.planner.orders.circles import asked_at
from megatron_patch.errors import PatchError
from megatron_patch.pipeline.rows import Rows
from megatron_patch.seams import Arguments

# While one microbatch's tokens are looked up, the tokens of so many others are on their way.
AHEAD = 1


class ShardedEmbedding(nn.Module):
    """The first stage's word_embeddings, looked up in the rows of `Rows`."""

    def __init__(self, rows: Rows, *, reduce_scatters: bool) -> None:
        super().__init__()
        self._rows = (rows,)  # no module of this one
        self.reduce_scatters = reduce_scatters

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings [b, s, h] of tokens [b, s].

        With Megatron's reduce_scatter_embeddings and sequence parallelism: this rank's
        [s / tp, b, h].
        """
        (rows,) = self._rows
        if rows.step is None:
            raise PatchError(
                "the model is called outside of get_forward_backward_func's function, where the "
                "other stages do not answer: with vocab_over_pipeline it has no embedding there"
            )
        embedding: TiedEmbedding = rows.pipeline.embedding
        vectors = embedding(tokens.transpose(0, 1).contiguous())
        if self.reduce_scatters:
            return vectors
        if embedding.head.slices > 1:
            # Megatron adds positions first, and takes its slice after that.
            mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
            gather = mappings.gather_from_sequence_parallel_region
            vectors = gather(vectors, tensor_parallel_output_grad=False)
        return vectors.transpose(0, 1).contiguous()


class Recorder:
    """A stand-in for the model while forward_step_func reads a microbatch ahead of its turn."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class TiedStep:
    """The passes E and G of one call of the schedule, and the first stage's data."""

    def __init__(self, embedding: TiedEmbedding, rows: Rows, arguments: Arguments) -> None:
        self.embedding, self.rows, self.arguments = embedding, rows, arguments
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def look_up(self, index: int) -> None:
        for each in asked_at(index, self.arguments.num_microbatches, AHEAD):
            tokens = self._read(each) if self.embedding.is_first else None
            self.embedding.ask(each, tokens)
        # By its __call__: hooks that gather parameters run before it.
        self.rows()
        self.embedding.look_up(index)

    def forward_step(self, index: int, model: Any) -> tuple[Any, None]:
        """Replaces forward_step_func, on the first stage."""
        args, kwargs = self._calls.pop(index)
        return model(*args, **kwargs), None

    def give(self, index: int) -> None:
        if self.arguments.forward_only:
            self.embedding.drop(index)
        else:
            self.embedding.give(index)

    def finish(self) -> None:
        self.embedding.finish_step()

    def _read(self, index: int) -> Tensor:
        recorder = Recorder(self.arguments.model)
        self.arguments.forward_step_func(self.arguments.data_iterator, recorder)
        if len(recorder.calls) != 1:
            raise PatchError(
                "forward_step_func must call its argument `model` once, got "
                f"{len(recorder.calls)} calls: with a tied embedding the first stage reads its "
                "data before the model runs"
            )
        self._calls[index] = args, kwargs = recorder.calls[0]
        tokens = args[0] if args else kwargs.get("input_ids")
        if not isinstance(tokens, Tensor):
            raise PatchError(f"the model must be called with input_ids, got {type(tokens)}")
        return tokens.transpose(0, 1).contiguous()
