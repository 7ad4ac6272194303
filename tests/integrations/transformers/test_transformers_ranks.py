"""Patched models of transformers on two gloo ranks beside the same ranks without the patch."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from cce_dist.testing import RankPool
from tests.integrations.architectures import batch, make

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
STEPS = 4


def prepare() -> None:
    for name in ("transformers", "cce_dist.integrations.transformers"):
        importlib.import_module(name)
    # Modules that each rank would import anew.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make("llama")
        make("gemma2")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    new = RankPool(2, prepare=prepare)
    yield new
    new.close()


def ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def fsdp2(model: Any, head: str) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head == "own":
        fully_shard(model.lm_head, mesh=mesh)
    if head == "with-norm":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: Any, head: str) -> Any:
    wrap = functools.partial(
        FullyShardedDataParallel,
        device_id=torch.device("cpu"),
        use_orig_params=head != "flat",
    )
    if head == "own":
        model.lm_head = wrap(model.lm_head)
        return wrap(model)
    return wrap(model, auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}))


def tensor_parallel(model: Any) -> Any:
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


WRAPS = {
    "ddp": ddp,
    **{f"fsdp2-{x}": functools.partial(fsdp2, head=x) for x in ("root", "own", "with-norm")},
    **{f"fsdp1-{x}": functools.partial(fsdp1, head=x) for x in ("root", "flat", "own")},
    "tp": tensor_parallel,
}


def curve_of(model: Any, same_tokens: bool, steps: int = STEPS) -> tuple[list[float], str]:
    """Returns the losses of some steps, of other tokens on each rank unless they share a head."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    logits = ""
    for step in range(steps):
        optimizer.zero_grad()
        output = model(**batch(2 * step + (0 if same_tokens else dist.get_rank())))
        output.loss.backward()
        optimizer.step()
        losses.append(float(output.loss.detach()))
        logits = type(output.logits).__name__
    return losses, logits


def beside(
    group: Any, kind: str, model_type: str, patch_first: bool
) -> tuple[list[float], list[float], str]:
    from cce_dist.integrations import transformers as integration

    warnings.simplefilter("ignore")
    same = kind == "tp"
    stock, _ = curve_of(WRAPS[kind](make(model_type)), same)
    model = make(model_type)
    try:
        if patch_first:
            integration.patch(model)
        wrapped = WRAPS[kind](model)
        if not patch_first:
            integration.patch(wrapped)
        found, logits = curve_of(wrapped, same)
    finally:
        integration.remove()
    return stock, found, logits


@pytest.mark.parametrize(
    ("kind", "patch_first"),
    [(name, True) for name in WRAPS] + [("fsdp2-own", False), ("fsdp1-root", False)],
)
def test_wrapped_models(pool: RankPool, kind: str, patch_first: bool) -> None:
    for stock, found, logits in pool.run(2, beside, kind, "llama", patch_first):
        assert found == pytest.approx(stock, abs=1e-5)
        assert len(found) == STEPS and logits == "DeferredLogits"


def deepspeed_curve(group: Any, stage: int) -> tuple[list[float], list[float], str]:
    import deepspeed

    from cce_dist.integrations import transformers as integration

    warnings.simplefilter("ignore")
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    # It would be compiled, for messages through shared memory.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    curves = []
    for patch in (False, True):
        model = make("llama")
        if patch:
            integration.patch(model)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
            config=config,
            dist_init_required=False,
        )
        losses: list[float] = []
        logits = ""
        for step in range(STEPS):
            output = engine(**batch(2 * step + dist.get_rank()))
            engine.backward(output.loss)
            engine.step()
            losses.append(float(output.loss.detach()))
            logits = type(output.logits).__name__
        curves.append(losses)
    stock, patched = curves
    return stock, patched, logits


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(pool: RankPool, stage: int) -> None:
    pytest.importorskip("deepspeed")
    for stock, patched, logits in pool.run(2, deepspeed_curve, stage):
        assert patched == pytest.approx(stock, abs=1e-5)
        assert len(patched) == STEPS and logits == "DeferredLogits"


def split_by_plan(group: Any, folder: str, patch: bool) -> tuple[list[float], float]:
    from transformers import AutoModelForCausalLM

    from cce_dist.integrations import transformers as integration

    warnings.simplefilter("ignore")
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    if patch:
        integration.patch(model)
    curve, kind = curve_of(model.train(), same_tokens=True, steps=5)
    assert (kind == "DeferredLogits") is patch
    logits = model(**batch()).logits.clone()
    return curve, float(logits.detach().double().square().sum())


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_tp_plan(pool: RankPool, model_type: str, tmp_path: Path) -> None:
    make(model_type).save_pretrained(tmp_path)
    (stock, squares), *_ = pool.run(2, split_by_plan, str(tmp_path), False)
    for found, other in pool.run(2, split_by_plan, str(tmp_path), True):
        assert found == pytest.approx(stock, abs=1e-5)
        assert other == pytest.approx(squares, rel=1e-5)
