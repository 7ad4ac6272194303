"""TRL's trainers on two gloo ranks with DDP or ZeRO-3, with and without the patch."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cce_dist.testing import RankPool

pytest.importorskip("trl")


def prepare() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("tests.integrations.distillation.trainers")
        importlib.import_module("tests.integrations.trl.test_trl_trainers")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    new = RankPool(2, prepare=prepare)
    yield new
    new.close()


def as_a_job_starts_it(group: Any) -> str:
    rank = str(group.rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    warnings.simplefilter("ignore")
    return rank


def distil(group: Any, name: str, folder: str) -> tuple[Any, Any]:
    """Runs of one trainer without the patch, then with it."""
    from cce_dist.integrations import trl as patch
    from tests.integrations.distillation.trainers import run, tokenizer_of, trainer_of

    rank = as_a_job_starts_it(group)
    options = {"beta": 0.0, "gradient_accumulation_steps": 2}
    results = []
    for patched in (False, True):
        if patched:
            patch.apply(gradient="exact")
        trainer = trainer_of(name, tokenizer_of(), Path(folder) / rank, options)
        results.append(run(trainer))
        assert trainer.args.world_size == 2
    assert patch.status().calls >= 4
    patch.remove()
    return results[0], results[1]


@pytest.mark.parametrize("name", ["Distillation", "GKD"], ids=str)
def test_trainer_with_ddp(name: str, pool: RankPool, tmp_path: Path) -> None:
    from tests.integrations.distillation.trainers import check

    for theirs, ours in pool.run(2, distil, name, str(tmp_path)):
        check(ours, theirs)


def as_deepspeed_starts_it() -> dict[str, Any]:
    """Returns options of a Trainer under ZeRO-3, whose parameters are all split."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    importlib.import_module("deepspeed")
    # It would be compiled, for messages through shared memory.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return {"deepspeed": config}


def train(group: Any, name: str, folder: str, splits: bool) -> tuple[Any, Any]:
    """What one trainer logs without the patch, then with it."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from cce_dist.integrations import trl as patch
    from tests.integrations.trl.test_trl_trainers import OPTIONS, curve_of, tokenizer_of, trainer_of

    rank = as_a_job_starts_it(group)
    options = {"max_steps": 3, "gradient_accumulation_steps": 2}
    options |= as_deepspeed_starts_it() if splits else {}
    before, OPTIONS[name] = OPTIONS[name], OPTIONS[name] | options
    results = []
    for patched in (False, True):
        if patched:
            patch.apply(gradient="exact")
        trainer = trainer_of(name, tokenizer_of(), f"{folder}/model", Path(folder) / rank)
        results.append(curve_of(trainer))
        assert trainer.args.world_size == 2
        assert (type(trainer.model_wrapped).__name__ == "DeepSpeedEngine") is splits
    assert patch.status().calls >= 6
    patch.remove()
    OPTIONS[name] = before
    # The next test's trainer would be DeepSpeed's, too.
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return results[0], results[1]


@pytest.mark.parametrize("splits", [False, True], ids=["ddp", "zero3"])
@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"], ids=str)
def test_trainer_without_a_teacher(name: str, splits: bool, pool: RankPool, tmp_path: Path) -> None:
    from tests.integrations.trl.test_trl_trainers import model_of

    if splits:
        pytest.importorskip("deepspeed")
    model_of().save_pretrained(tmp_path / "model")
    for theirs, ours in pool.run(2, train, name, str(tmp_path), splits):
        assert len(ours) == len(theirs) > 3
        for got, expected in zip(ours, theirs, strict=True):
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)
