"""Loops that train a patched model beside the same loops without the patch: real text, 8 steps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from cce_dist.integrations import transformers as integration  # noqa: E402
from tests.integrations.architectures import make  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 8


@pytest.fixture(autouse=True)
def no_precision() -> Iterator[None]:
    yield
    # A Trainer's precision would stay for the next Accelerator.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def text(length: int = 24) -> list[dict[str, Tensor]]:
    """The license as bytes, which nobody edits, in sequences of which some tokens are ignored."""
    data = torch.tensor(list(Path("LICENSE").read_bytes()[: 64 * length])) + 3
    rows = data.view(-1, length)
    ignored = torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    labels = rows.masked_fill(ignored, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def trainer_of(folder: Path, **arguments: Any) -> Any:
    values = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 1,
    }
    rows = text()
    return transformers.Trainer(
        model=make("llama"),
        args=transformers.TrainingArguments(**{**values, **arguments}),
        train_dataset=rows[8:],
        eval_dataset=rows[:8],
    )


def losses(trainer: Any) -> list[float]:
    history = trainer.state.log_history
    return [row[key] for row in history for key in ("loss", "eval_loss") if key in row]


def test_trainer_with_accumulation_evaluation_prediction_and_resumption(tmp_path: Path) -> None:
    stock = trainer_of(tmp_path / "stock")
    stock.train()
    trainer = trainer_of(tmp_path / "patched")
    integration.patch(trainer.model)
    trainer.train()
    assert len(losses(stock)) == STEPS + 2
    assert losses(trainer) == pytest.approx(losses(stock), abs=2e-5)
    found, expected = trainer.predict(text()[:8]), stock.predict(text()[:8])
    assert found.predictions.shape == expected.predictions.shape == (8, 24, 311)
    assert abs(found.predictions - expected.predictions).max() < 1e-3
    # From the patched run's checkpoint, patched: the same steps again.
    resumed = trainer_of(tmp_path / "patched")
    integration.patch(resumed.model)
    resumed.train(resume_from_checkpoint=str(tmp_path / "patched" / "checkpoint-4"))
    assert losses(resumed) == pytest.approx(losses(trainer), abs=1e-6)


@pytest.mark.parametrize("arguments", [{"label_smoothing_factor": 0.1}, {"bf16": True}])
def test_trainers_options(tmp_path: Path, arguments: dict[str, Any]) -> None:
    few = {"eval_strategy": "no", "save_strategy": "no", **arguments}
    stock = trainer_of(tmp_path, **few)
    stock.train()
    trainer = trainer_of(tmp_path, **few)
    integration.patch(trainer.model)
    trainer.train()
    assert len(losses(trainer)) == STEPS
    assert losses(trainer) == pytest.approx(
        losses(stock), abs=5e-3 if "bf16" in arguments else 1e-5
    )


def test_trainer_with_lora_on_the_head(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    curves = []
    for patch in (False, True):
        few = {"eval_strategy": "no", "save_strategy": "no", "learning_rate": 3e-2}
        trainer = trainer_of(tmp_path, **few)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
        trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, config)
        if patch:
            integration.patch(trainer.model)
        trainer.train()
        curves.append(losses(trainer))
    assert curves[0][0] - curves[0][-1] > 0.1
    assert curves[1] == pytest.approx(curves[0], abs=2e-5)


def accelerated(patch: bool) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make("gemma2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(text()[: STEPS * 2], batch_size=2)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if patch:
        integration.patch(model)
    curve = []
    for inputs in loader:
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(loss.detach()))
    return curve


def test_accelerate() -> None:
    found = accelerated(True)
    assert len(found) == STEPS and found == pytest.approx(accelerated(False), abs=1e-5)


def lightning_curve(folder: Path, patch: bool) -> list[float]:
    lightning = pytest.importorskip("lightning")
    curve: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make("qwen2")
            if patch:
                integration.patch(self.model)

        def training_step(self, inputs: Any, index: int) -> Tensor:
            loss = self.model(**inputs).loss
            curve.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(text(), batch_size=2))  # pyright: ignore[reportArgumentType]
    return curve


def test_fabric() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    curves = []
    for patch in (False, True):
        model = make("qwen2").train()
        if patch:
            integration.patch(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = fabric.setup(model, optimizer)
        curve = []
        for inputs in itertools.islice(DataLoader(text(), batch_size=2), STEPS):
            loss = model(**inputs).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(loss.detach()))
        curves.append(curve)
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)


def test_lightning(tmp_path: Path) -> None:
    found = lightning_curve(tmp_path, True)
    assert len(found) == STEPS
    assert found == pytest.approx(lightning_curve(tmp_path, False), abs=1e-5)
