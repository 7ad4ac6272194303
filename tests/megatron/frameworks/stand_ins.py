"""Modules with the names and signatures of the frameworks' own, for machines without them."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

VERL = "verl.models.mcore.model_forward_fused"
VERL_PATCH = "verl.models.transformers.monkey_patch"
SKYRL_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
SKYRL = "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"
NEMO_UTILS, NEMO = "nemo_rl.distributed.model_utils", "nemo_rl.models.megatron.train"
NEMO_SETUP = "nemo_rl.models.megatron.setup"

_VERL = """
from dataclasses import dataclass

@dataclass
class FusedOutputProcessorContext:
    temperature: float

@dataclass
class CausalLMOutputForPPO:
    hidden_states: object = None
    log_probs: object = None
    entropy: object = None

def fused_output_processor(
    *, hidden_states, output_layer, output_weight, labels, context, config, **_ignored
):
    return "theirs"

def patch_fused_forward(model):
    model.is_patched_by_verl = True
"""
_VERL_TORCH = """
import torch

class FusedLinearForPPO(torch.nn.Module):
    def __init__(self, chunk_size=512, impl_backend="torch"):
        super().__init__()

    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        return "theirs", "theirs"
"""
_VERL_TRITON = """
import torch

class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None
    ):
        return "theirs", "theirs"

linear_cross_entropy = LinearCrossEntropy.apply
"""
# Between the arguments of verl's modules for FSDP, of which each has two such functions.
_VERL_FORWARDS = """
from dataclasses import dataclass

import torch
from torch.utils import _pytree

@dataclass
class CausalLMOutputForPPO:
    log_probs: object
    entropy: object

# As transformers does, so that FSDP finds the tensors.
_pytree.register_dataclass(CausalLMOutputForPPO)

def forward_with_torch_backend(
    self, input_ids=None, {0} labels=None, {1} temperature=1.0, shift_labels=None, {2}
):
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    hidden = self.model(input_ids=input_ids)[0]
    labels = torch.roll(input_ids, -1, -1) if shift_labels is None else shift_labels
    function = FusedLinearForPPO(impl_backend=self._verl_fused_kernels_backend)
    log_probs, entropy = function.forward(
        hidden_states=hidden, vocab_weights=self.lm_head.weight, input_ids=labels,
        temperature=temperature,
    )
    return CausalLMOutputForPPO(log_probs, entropy)

def forward_with_triton_backend(
    self, input_ids=None, {0} labels=None, {1} temperature=1.0, shift_labels=None, {2}
):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    hidden = self.model(input_ids=input_ids)[0]
    labels = torch.roll(input_ids, -1, -1) if shift_labels is None else shift_labels
    log_probs, entropy = linear_cross_entropy(
        hidden, self.lm_head.weight, labels, temperature, "none"
    )
    return CausalLMOutputForPPO(log_probs, entropy)
"""
_VERL_DENSE = _VERL_FORWARDS.format(
    "attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,",
    "use_cache=None, output_attentions=None, output_hidden_states=None, return_dict=None, "
    "cache_position=None, logits_to_keep=0,",
    "**loss_kwargs",
)
_VERL_VISION = _VERL_FORWARDS.format("", "", "**kwargs")
_VERL_PATCH = """
def patch_forward_with_backends(model, use_fused_kernels=False, fused_kernels_backend=None):
    if not use_fused_kernels:
        return
    from verl.models.transformers import dense_common

    model._verl_fused_kernels_backend = fused_kernels_backend
    name = "triton" if fused_kernels_backend == "triton" else "torch"
    model.__class__.forward = getattr(dense_common, f"forward_with_{name}_backend")
"""
# As SkyRL's, these shift the targets, and one function below them knows the head.
_SKYRL_UTILS = """
def _fused_lm_head_logprob_apply(
    backend, hidden, weight, target, vocab_start_index, vocab_end_index, chunk_size, tp_group,
    inference_only=False,
):
    return "theirs"

def from_parallel_hidden_to_logprobs(
    hidden, lm_head_weight, target, vocab_start_index, vocab_end_index, tp_group,
    inference_only=False, cp_group=None, chunk_size=None, temperature=1.0, fused_backend="torch",
):
    if temperature != 1.0:
        lm_head_weight = lm_head_weight / temperature
    return _fused_lm_head_logprob_apply(
        fused_backend, hidden, lm_head_weight, target.roll(-1, -1), vocab_start_index,
        vocab_end_index, chunk_size, tp_group, inference_only,
    )[:, :-1]

def from_parallel_hidden_to_logprobs_packed_sequences(
    hidden, lm_head_weight, target, cu_seqlens_padded, unpacked_seqlen, vocab_start_index,
    vocab_end_index, group, inference_only=False, cp_group=None, chunk_size=None,
    attention_mask=None, sub_seq_lengths=None, temperature=1.0, fused_backend="torch",
):
    # One sequence, without padding.
    if temperature != 1.0:
        lm_head_weight = lm_head_weight / temperature
    return _fused_lm_head_logprob_apply(
        fused_backend, hidden, lm_head_weight, target.roll(-1, -1), vocab_start_index,
        vocab_end_index, chunk_size, group, inference_only,
    )[:, :-1]

def _fused_vocab_parallel_entropy_from_hidden(
    hidden, lm_head_weight, tp_group, chunk_size=None, temperature=1.0
):
    return "theirs"
"""
_SKYRL = f"""
from {SKYRL_UTILS} import (
    _fused_vocab_parallel_entropy_from_hidden,
    from_parallel_hidden_to_logprobs,
    from_parallel_hidden_to_logprobs_packed_sequences,
)

def _fused_lm_head_output_processor(**kwargs):
    return "theirs"
"""
_NEMO_UTILS = """
def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states, output_weight_layer, runtime_gather_output, target,
    vocab_start_index, vocab_end_index, tp_group, inference_only=False, cp_group=None,
    chunk_size=None,
):
    return "theirs"

def patch_gpt_model_forward_for_linear_ce_fusion(*, chunk_size):
    from megatron.core.models.gpt import GPTModel

    if getattr(GPTModel, "_linear_ce_fusion_forward_patched", False):
        GPTModel._linear_ce_fusion_chunk_size = chunk_size
        return
    GPTModel._original_forward_for_linear_ce_fusion = GPTModel.forward
    GPTModel._linear_ce_fusion_chunk_size = chunk_size
    GPTModel.forward = _gpt_forward_with_linear_ce_fusion
    GPTModel._linear_ce_fusion_forward_patched = True

# The decoder's layers are left out: decoder_input is the head's input.
def _gpt_forward_with_linear_ce_fusion(
    self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None, *,
    return_logprobs_for_linear_ce_fusion=False, **others,
):
    if not return_logprobs_for_linear_ce_fusion:
        return self._original_forward_for_linear_ce_fusion(
            input_ids, position_ids, attention_mask, decoder_input, labels, **others
        )
    group = self.output_layer.tp_group
    tied = self.share_embeddings_and_output_weights
    rows = self.vocab_size // group.size()
    return from_parallel_hidden_states_to_logprobs(
        decoder_input,
        self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
        None,
        labels,
        vocab_start_index=group.rank() * rows,
        vocab_end_index=(group.rank() + 1) * rows,
        tp_group=group,
        cp_group=None,
        chunk_size=self._linear_ce_fusion_chunk_size,
    )
"""
_NEMO_SETUP = f"""
from {NEMO_UTILS} import patch_gpt_model_forward_for_linear_ce_fusion
"""
_NEMO = """
def apply_temperature_scaling(logits, sampling_params):
    return logits / sampling_params.temperature
"""
SOURCES = {
    VERL: _VERL,
    "verl.utils.experimental.torch_functional": _VERL_TORCH,
    "verl.utils.kernel.linear_cross_entropy": _VERL_TRITON,
    "verl.models.transformers.dense_common": _VERL_DENSE,
    **{f"verl.models.transformers.{x}": _VERL_VISION for x in ("qwen2_vl", "qwen3_vl", "glm4v")},
    "verl.models.transformers.qwen3_5": _VERL_FORWARDS.format(
        "", "", "cu_seqlens=None, cu_seqlens_cpu=None, **kwargs"
    ),
    VERL_PATCH: _VERL_PATCH,
    SKYRL_UTILS: _SKYRL_UTILS,
    SKYRL: _SKYRL,
    NEMO_UTILS: _NEMO_UTILS,
    NEMO_SETUP: _NEMO_SETUP,
    NEMO: _NEMO,
}


@contextmanager
def stand_ins(sources: dict[str, str] = SOURCES) -> Iterator[None]:
    """Makes the modules importable; they are imported by nobody yet."""
    tops = {name.partition(".")[0] for name in sources}

    def forget() -> None:
        for name in [x for x in sys.modules if x.partition(".")[0] in tops]:
            del sys.modules[name]

    with tempfile.TemporaryDirectory() as folder:
        for name, source in sources.items():
            path = Path(folder, *name.split("."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(source)
            # Of an installed framework the folders here would be no part, without these.
            for package in path.relative_to(folder).parents[:-1]:
                Path(folder, package, "__init__.py").touch()
        forget()
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            forget()


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def shard(model: Any, kind: str, group: Any) -> Any:
    """Shards a model as verl does; a tied head is part of the root."""
    if kind == "fsdp1":
        wrap = partial(FullyShardedDataParallel, process_group=group, device_id=torch.device("cpu"))
        model.model.layer = wrap(model.model.layer)
        return wrap(model)
    mesh = DeviceMesh.from_group(group, "cpu")
    own = [model.model.layer]
    if kind == "untied":
        own += [model.model.embed_tokens, model.lm_head]
    for module in own:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)
