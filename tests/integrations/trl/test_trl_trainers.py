"""TRL's trainers with the loss, beside their own: everything that they log, and the weights."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cce_dist.integrations import trl as patch

with warnings.catch_warnings():
    # Of the packages, about one another, as they are imported.
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(autouse=True)
def without_a_trace() -> Iterator[None]:
    yield
    patch.remove()


WORDS = list("abcdefghijklmnopqrstuvwxyz")
SPECIAL = ["<pad>", "<eos>", "<unk>", "user", "assistant", ":"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def tokenizer_of() -> Any:
    words = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of()


SIZES: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def text(start: int, length: int) -> str:
    return " ".join(WORDS[(start + 3 * i) % len(WORDS)] for i in range(length))


def dataset_of(trainer: str) -> Any:
    rows = range(12)
    if trainer == "SFT":
        return Dataset.from_dict({"text": [text(i, 5 + i % 4) for i in rows]})
    columns: dict[str, list[Any]] = {"prompt": [text(i, 3) for i in rows]}
    if trainer == "DPO":
        columns["chosen"] = [" " + text(i + 9, 4 + i % 3) for i in rows]
        columns["rejected"] = [" " + text(i + 2, 3 + i % 4) for i in rows]
    if trainer == "KTO":
        columns["completion"] = [" " + text(i + 9, 4 + i % 3) for i in rows]
        columns["label"] = [bool(i % 2) for i in rows]
    return Dataset.from_dict(columns)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(word in "abcdefgh" for word in text.split())) for text in completions]


OPTIONS: dict[str, dict[str, Any]] = {
    "SFT": {"max_steps": 20},
    "DPO": {"max_steps": 20},
    "DPO weighted": {"max_steps": 3, "use_weighting": True},
    "KTO": {"max_steps": 20, "per_device_train_batch_size": 2},
    "GRPO": {
        "max_steps": 20,
        "num_generations": 2,
        "max_completion_length": 4,
        "temperature": 0.8,
        "beta": 0.1,
        "entropy_coef": 0.01,
    },
    "GMPO": {"max_steps": 3, "num_generations": 2, "max_completion_length": 4, "beta": 0.1},
    "RLOO": {"max_steps": 2, "num_generations": 2, "max_completion_length": 4},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the model: TRL reads reference models from their names."""
    folder = str(tmp_path_factory.mktemp("model"))
    model_of().save_pretrained(folder)
    return folder


def trainer_of(case: str, tokenizer: Any, saved: str, folder: Path) -> Any:
    name = case.split()[0]
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **OPTIONS[case],
    }
    module = trl if name != "GMPO" else importlib.import_module("trl.experimental.gmpo")
    args = getattr(module, f"{name}Config")(**options)
    keywords = {"reward_funcs": reward} if name in ("GMPO", "GRPO", "RLOO") else {}
    return getattr(module, f"{name}Trainer")(
        model=saved,
        args=args,
        train_dataset=dataset_of(name),
        processing_class=tokenizer,
        **keywords,
    )


def curve_of(trainer: Any) -> list[dict[str, float]]:
    """What the trainer logs, but times, then the sums of the model's parameters."""
    torch.manual_seed(5)
    trainer.train()
    timed = ("runtime", "per_second", "time", "flos")
    steps = [
        {name: x for name, x in step.items() if not any(word in name for word in timed)}
        for step in trainer.state.log_history
    ]
    last = {name: float(x.double().square().sum()) for name, x in trainer.model.named_parameters()}
    return [*steps, last]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_trainer(case: str, tokenizer: Any, saved: str, tmp_path: Path) -> None:
    theirs = curve_of(trainer_of(case, tokenizer, saved, tmp_path))
    # The order of apply and of the trainer's construction does not matter.
    if case in ("SFT", "GRPO"):
        trainer = trainer_of(case, tokenizer, saved, tmp_path)
        patch.apply(gradient="exact")
    else:
        patch.apply(gradient="exact")
        trainer = trainer_of(case, tokenizer, saved, tmp_path)
    ours = curve_of(trainer)
    assert patch.status().calls >= OPTIONS[case]["max_steps"]
    assert len(ours) == len(theirs) > OPTIONS[case]["max_steps"]
    for got, expected in zip(ours, theirs, strict=True):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
