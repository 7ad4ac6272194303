"""`bench fine-tune` on a CPU: tiny models, the losses that need no other package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import fine_tune

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 320}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PLAN = fine_tune.Plan(batch=2, sequence=16, repeats=3, device="cpu", megabytes=0.2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
def test_every_loss_trains_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fine_tune, "MODELS", {"tiny": ("llama", TINY)})
    monkeypatch.setattr(fine_tune, "BATCHES", (2, 4))
    monkeypatch.setattr(fine_tune, "CACHE", tmp_path)
    losses = ("default", "liger", "filtered", "exact")
    default, liger, *ours = fine_tune.bench_fine_tune("tiny", losses, PLAN, largest=True)
    assert "liger_kernel" in str(liger["failed"])
    rows: list[Any] = [default, *ours]
    for row in rows:
        assert row["failed"] == "" and row["tokens_per_s"] > 0 and row["largest_batch"] == 4
        assert row["mean_loss"] == pytest.approx(rows[0]["mean_loss"], abs=1e-5)


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match=r"model must be one of .* and loss among .* got 'gpt'"):
        fine_tune.bench_fine_tune("gpt", ("default",), PLAN, largest=False)
    with pytest.raises(ValueError, match="loss among"):
        fine_tune.bench_fine_tune("llama-3.2-1b", ("fast",), PLAN, largest=False)
