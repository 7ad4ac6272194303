"""A job of real megatron-core over NCCL; or on a CPU, over gloo, with what stands in for torch.cuda
there.

In ranks of their own (`megatron_pools`), which nothing else uses: the stand-ins stay in a process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

SEQUENCE, BATCH, HIDDEN, CLASSES = 16, 2, 32, 96


@dataclass(frozen=True)
class Setup:
    """A small job of Megatron's."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vpp: int | None = None
    sequence_parallel: bool = False
    tied: bool = False
    mtp: bool = False
    experts: bool = False
    recompute: bool = False
    fusion: bool = False  # gradient accumulation fusion
    reduces_in_fp32: bool = True  # main_grad's dtype in 16-bit models
    distributed_optimizer: bool = False
    overlap: bool = False  # of gradients' reduction and parameters' gathering
    per_token: bool = False
    bf16: bool = False
    fp16: bool = False
    native: bool = False  # Megatron's fused loss
    layout: str | None = None
    fsdp: str | None = None  # torch's, the head in the "root" group or its own ("head"); "megatron"
    frozen_head: bool = False
    ignored: bool = False  # every fourth microbatch has no label that counts
    layers: int = 2
    microbatches: int = 2
    steps: int = 4
    device: str = "cpu"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def dtype(self) -> torch.dtype:
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.float32


class OnCpu(TorchFunctionMode):
    """device="cuda" means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        elif "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.device and str(args[0]).startswith("cuda"):
            args = ("cpu",)
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Stream()


@functools.cache
def import_megatron(device: str) -> None:
    """Without two extensions: one has a stand-in, the other is looked for in vain."""
    extension: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    extension.wgrad_gemm_accum_fp32 = lambda x, grad, main: main.add_(grad.t().float() @ x.float())
    extension.wgrad_gemm_accum_fp16 = extension.wgrad_gemm_accum_fp32
    sys.modules["fused_weight_gradient_mlp_cuda"] = extension
    if device == "cpu":
        stand_in_for_cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.optimizer  # noqa: F401
        import megatron.core.tensor_parallel.random as random
        from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401
        from megatron.core.transformer import multi_token_prediction
        from megatron.core.transformer.moe import moe_utils

    if device == "cpu":
        random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
        random._set_cuda_rng_state = lambda *_, **__: None
    # Not defined where TransformerEngine is absent, and asked for all the same.
    vars(moe_utils).setdefault("te_general_gemm", None)
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        multi_token_prediction.is_inference_column_parallel_linear = lambda layer: False


def stand_in_for_cuda() -> None:
    """For the rest of this process, before megatron is imported: what it calls of torch.cuda."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda *_, **__: None
    from_group: Any = DeviceMesh.from_group
    DeviceMesh.from_group = lambda group, device_type, **more: from_group(group, "cpu", **more)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    original = tensor.type

    # The optimizers compare names of types.
    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        if not isinstance(name, str) or name.startswith("torch.cuda."):
            return name
        return name.replace("torch.", "torch.cuda.", 1)

    tensor.type = type_of
    for name in ("FloatTensor", "IntTensor", "BFloat16Tensor", "HalfTensor"):
        setattr(cuda, name, getattr(torch, name))


# Groups before Megatron's, and with them, by the layout of the last job that kept its groups.
_kept: dict[tuple[Any, ...], tuple[set[Any], set[Any]]] = {}


@contextlib.contextmanager
def megatron(setup: Setup, timeout_s: float = 1800, *, keeps: bool = True) -> Iterator[None]:
    """Megatron's groups over all ranks of this process's job.

    Args:
        keeps: on a CPU the groups stay for a next job of the same layout, which is most of a small
            check's time. False where the job leaves ranks in the middle of a step.
    """
    import_megatron(setup.device)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    layout = (setup.tp, setup.pp, setup.vpp, setup.cp, timeout_s)
    on_cpu = OnCpu() if setup.device == "cpu" else contextlib.nullcontext()
    # Megatron's own fusions are compiled else, each by gcc for seconds.
    compiling = torch.compiler.set_stance("default" if setup.device == "cuda" else "force_eager")
    with warnings.catch_warnings(), on_cpu, compiling:
        warnings.simplefilter("ignore")
        if not everyone_has(layout, setup.device):
            forget_groups()
            before = set(c10d._world.pg_map)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=setup.tp,
                pipeline_model_parallel_size=setup.pp,
                virtual_pipeline_model_parallel_size=setup.vpp,
                context_parallel_size=setup.cp,
                distributed_timeout_minutes=timeout_s / 60,  # pyright: ignore[reportArgumentType]
            )
            _kept[layout] = before, set(c10d._world.pg_map)
        if setup.device == "cuda":
            model_parallel_cuda_manual_seed(1)
        keeping = False
        try:
            yield
            # A virtual stage's number stays in Megatron's state.
            keeping = keeps and setup.device == "cpu" and setup.vpp is None
        finally:
            if keeping:
                destroy_others(_kept[layout][1])
            else:
                forget_groups()


def everyone_has(layout: tuple[Any, ...], device: str) -> bool:
    """A rank on which the last job has failed has no groups any more."""
    if device == "cuda":
        return False
    found = torch.tensor(int(layout in _kept))
    c10d.all_reduce(found, c10d.ReduceOp.MIN)
    return bool(found)


def forget_groups() -> None:
    from megatron.core import parallel_state

    for before, _ in _kept.values():
        # It forgets its some twenty groups, whose threads would stay.
        parallel_state.destroy_model_parallel()
        destroy_others(before)
    _kept.clear()


def destroy_others(groups: set[Any]) -> None:
    for group in [x for x in c10d._world.pg_map if x not in groups]:
        c10d.destroy_process_group(group)
    # A group's threads stay as long as its object, which models hold that hold themselves.
    gc.collect()
