"""The output layer's rows over the pipeline: V / (pp tp) rows on each stage.

They are a parameter of the stage's model. Megatron has V / tp rows on the last stage instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist import VocabShard
from megatron_patch.deferred import DeferredLogits
from megatron_patch.errors import PatchError
from megatron_patch.options import PatchOptions
from megatron_patch.seams import parallel_state
from megatron_patch.stock import device_of

NO_LOGITS = (
    "logits are asked for, but with vocab_over_pipeline no stage has all rows of the output layer: "
    "generate and distil without the option (megatron_patch.gather_output_weight gathers the "
    "weight)"
)


class Rows(nn.Module):
    """The output layer's rows on a stage, in place of the layer.

    Megatron's rows of tensor-parallel rank t are on rank t of each stage, in the order of stages.
    A call without arguments returns the weight, which hooks of DDP may have gathered.
    """

    def __init__(self, weight: Tensor, *, options: PatchOptions, is_tied: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)  # [V / (pp tp), h]
        self.options, self.is_tied = options, is_tied
        # One call of the schedule takes the output of the model's forward: see schedule.py.
        self.step: Any = None
        self.pipeline: Any = None

    @property
    def shard(self) -> VocabShard:
        index, count = place()
        return VocabShard.even(len(self.weight), index, count, self.options.vocab_size)

    def forward(
        self,
        input_: Tensor | None = None,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        logits_wanted: bool = False,
    ) -> Any:
        if input_ is None:
            return self.weight
        if logits_wanted or weight is not None:
            raise PatchError(NO_LOGITS)
        return DeferredLogits.of(self, input_, None, runtime_gather_output), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Returns this stage's rows as part of the tensor that Megatron's own output layer saves.

        With tied embeddings that is the embedding's tensor. So the checkpoint is Megatron's.
        """
        from megatron.core.dist_checkpointing import ShardedTensor

        key = f"{prefix}weight"
        saved = key.replace("output_layer", "embedding.word_embeddings") if self.is_tied else key
        group = (metadata or {}).get("dp_cp_group")
        replica = parallel_state().get_data_parallel_rank(with_context_parallel=True)
        tensor = ShardedTensor.from_rank_offsets(
            saved,
            self.weight,
            (0, *place()),
            replica_id=(0, 0, replica if group is None else group.rank()),
            allow_shape_mismatch=True,
        )
        return {key: tensor}


def place() -> tuple[int, int]:
    """Returns the index of this rank's shard of the vocabulary, and the number of shards."""
    state = parallel_state()
    stages = state.get_pipeline_model_parallel_world_size()
    tensor = state.get_tensor_model_parallel_rank()
    index = tensor * stages + state.get_pipeline_model_parallel_rank()
    return index, stages * state.get_tensor_model_parallel_world_size()


def rows_of(model: Any) -> Rows:
    """Returns the rows of a model, wrapped or not.

    Raises:
        PatchError: the model has no rows.
    """
    rows = [x for x in model.modules() if isinstance(x, Rows)]
    if len(rows) != 1:
        raise PatchError(
            f"model must have its output layer over the pipeline, got {type(model).__name__} "
            "without: build it after megatron_patch.apply(vocab_over_pipeline=True)"
        )
    return rows[0]


def replace_output_layer(model: Any, options: PatchOptions, *, requires_grad: bool) -> Rows:
    """Puts `Rows` in place of a GPTModel's output layer, and of its tied embedding.

    The rows keep the values that Megatron initialised or loaded.
    Collectives: one scatter of the last stage's weight over the pipeline.
    """
    config, tied = model.config, model.share_embeddings_and_output_weights
    num_rows = model.vocab_size // place()[1]
    device = next((x.device for x in model.parameters()), device_of(_group()))
    weight = model.output_layer.weight.detach() if model.post_process else None
    shape = num_rows, config.hidden_size
    shard = torch.empty(shape, dtype=config.params_dtype, device=device)
    _scatter(weight, shard)
    rows = Rows(shard, options=options, is_tied=tied)
    rows.weight.requires_grad_(requires_grad)
    vars(rows.weight).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    vars(rows.weight).update(allreduce=True, is_embedding_or_output_parameter=True)
    model.output_layer = rows
    return rows


def gather_output_weight(model: Any) -> Tensor | None:
    """Gathers the output layer's weight [V / tp, h] on the last stage; returns None elsewhere.

    Args: model: this rank's model, wrapped or not, with its vocabulary over the pipeline.
    Collectives: one gather over the pipeline; every rank calls it.
    Raises:
        PatchError: the model's output layer is Megatron's own.
    """
    weight, group = rows_of(model).weight, _group()
    rows, chunks = weight.detach().to(device_of(group)).contiguous(), None
    last = group.size() - 1
    if group.rank() == last:
        chunks = [torch.empty_like(rows) for _ in range(group.size())]
    dist.gather(rows, chunks, group=group, group_dst=last)
    return None if chunks is None else torch.cat(chunks).to(weight.device)


def scatter_output_weight(model: Any, weight: Tensor | None) -> None:
    """Loads a weight of `gather_output_weight` into the parameter; optimizers keep their copies.

    Args: weight: [V / tp, h] of any dtype on the last stage; None elsewhere.
    Collectives: one scatter over the pipeline; every rank calls it.
    Raises:
        PatchError: the model's output layer is Megatron's own.
        ValueError: on the last stage, a weight of another shape.
    """
    target, group = rows_of(model).weight, _group()
    wanted = [group.size() * len(target), target.shape[1]]
    if group.rank() == group.size() - 1 and (weight is None or list(weight.shape) != wanted):
        got = None if weight is None else list(weight.shape)
        raise ValueError(f"weight must be {wanted} on the last stage, got {got}")
    _scatter(weight, target.data)


def _scatter(weight: Tensor | None, rows: Tensor) -> None:
    """Writes each stage's rows of the last stage's weight into `rows`."""
    group, device = _group(), device_of(_group())
    last, received = group.size() - 1, torch.empty_like(rows, device=device)
    chunks = None
    if group.rank() == last:
        assert weight is not None
        weight = weight.detach().to(device, rows.dtype)
        chunks = [chunk.contiguous() for chunk in weight.chunk(group.size())]
    dist.scatter(received, chunks, group=group, group_src=last)
    rows.copy_(received)


def _group() -> Any:
    return parallel_state().get_pipeline_model_parallel_group()
