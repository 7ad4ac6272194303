"""Models and tokenizers of transformers whose ids are dealt out to ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cce_dist.cli.main import app
from cce_dist.dealing.deal import deal
from cce_dist.vocab_shard import VocabShard, dealt_ids

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tests.dealing.dealt_models import (  # noqa: E402
    KINDS,
    byte_level,
    check_same,
    load,
    save,
    word_piece,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_each_tokenizer(tmp_path: Path, kind: str, ranks: int) -> None:
    old = save(tmp_path / "old", kind)
    dealt = deal(old, tmp_path / "new", ranks=ranks)
    assert dealt.num_ids == 400 and dealt.num_rows == 400 // ranks
    # Six texts for each token that was added.
    assert dealt.samples == 27 + 6 * len(load(old)[1].added_tokens_decoder)
    check_same(old, tmp_path / "new")
    # Each rank has every other, or every eighth, of the first ids.
    new_ids = np.load(tmp_path / "new/new_ids.npy")
    assert (new_ids[:ranks] // dealt.num_rows).tolist() == list(range(ranks))


@pytest.mark.parametrize(
    ("model_type", "changes", "tensors"),
    [
        ("llama", {"tie_word_embeddings": True}, 1),
        ("gemma2", {}, 1),
        ("phi", {}, 3),  # its head has a bias
        ("gpt2", {}, 1),
        ("qwen3_moe", {}, 2),
    ],
)
def test_each_head(tmp_path: Path, model_type: str, changes: dict[str, Any], tensors: int) -> None:
    old = save(tmp_path / "old", "byte_level", model_type, **changes)
    dealt = deal(old, tmp_path / "new", ranks=4)
    assert len(dealt.tensors) == tensors
    check_same(old, tmp_path / "new")


def test_rows_beyond_the_tokens_stay_where_they_are(tmp_path: Path) -> None:
    old = save(tmp_path / "old", "byte_level", rows=430)
    dealt = deal(old, tmp_path / "new", ranks=2, divisible_by=128)
    assert (dealt.num_ids, dealt.num_rows) == (400, 256)
    new_ids = np.load(tmp_path / "new/new_ids.npy")
    assert new_ids[400:].tolist() == list(range(400, 430))
    assert new_ids[:5].tolist() == [0, 256, 1, 257, 2]
    check_same(old, tmp_path / "new")


def test_a_class_with_ids_of_its_own(tmp_path: Path) -> None:
    """T5's: its code says which id the unknown token has."""
    old = save(tmp_path / "old", "unigram")
    edit(old / "tokenizer_config.json", tokenizer_class="T5Tokenizer", extra_ids=0)
    spec = json.loads((old / "tokenizer.json").read_text())
    spec["model"]["vocab"][0], spec["model"]["vocab"][2] = (
        spec["model"]["vocab"][2],
        spec["model"]["vocab"][0],
    )
    spec["model"]["unk_id"] = 2
    for token in spec["added_tokens"]:
        token["id"] = {0: 2, 2: 0}.get(token["id"], token["id"])
    (old / "tokenizer.json").write_text(json.dumps(spec))
    transformers.AutoTokenizer.from_pretrained(str(old)).save_pretrained(old)
    deal(old, tmp_path / "new", ranks=2)
    check_same(old, tmp_path / "new")
    settings = json.loads((tmp_path / "new/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_folder_without_weights(tmp_path: Path) -> None:
    old = save(tmp_path / "old", "byte_level")
    (old / "model.safetensors").unlink()
    assert deal(old, tmp_path / "new", ranks=2).tensors == ()
    assert not list((tmp_path / "new").glob("*.safetensors"))


def test_files_of_other_forms_do_not_stay(tmp_path: Path) -> None:
    old = save(tmp_path / "old", "byte_level")
    (old / "vocab.json").write_text("{}")
    (old / "LICENSE").write_text("free")
    deal(old, tmp_path / "new", ranks=2)
    assert not (tmp_path / "new/vocab.json").exists()
    assert (tmp_path / "new/LICENSE").read_text() == "free"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add_tensor(old: Path, name: str, *shape: int) -> None:
    from safetensors.torch import load_file, save_file

    path = old / "model.safetensors"
    save_file({**load_file(path), name: torch.zeros(shape)}, path, {"format": "pt"})


def leave_out(old: Path) -> None:
    """Moves a token to an id that is not the next."""
    path = old / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocab = spec["model"]["vocab"]
    vocab[max(vocab, key=vocab.__getitem__)] = 410
    path.write_text(json.dumps(spec))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "quantized": (
        lambda old: edit(old / "config.json", quantization_config={"quant_method": "fp8"}),
        "must have no quantization_config",
    ),
    "code": (lambda old: edit(old / "config.json", auto_map={"AutoModel": "m.M"}), "'auto_map'"),
    "mixed": (
        lambda old: edit(old / "generation_config.json", forced_decoder_ids=[[1, 7]]),
        "generation_config.json: 'forced_decoder_ids' must not be set",
    ),
    "unknown_rows": (
        lambda old: add_tensor(old, "model.more.weight", 400, 3),
        "model.more.weight must have no dim of 400",
    ),
    "too_few_rows": (
        lambda old: edit(old / "config.json", vocab_size=390, pad_token_id=None),
        "a row for each of 400 ids, got 390",
    ),
    "added_beyond_the_rows": (
        lambda old: edit(
            old / "tokenizer_config.json", added_tokens_decoder={"400": {"content": "<more>"}}
        ),
        "the model must have a row for each of 401 ids, got 400",
    ),
    "other_rows": (
        lambda old: edit(old / "config.json", vocab_size=404),
        "must have a row for each of config.json's 404 ids, got (400,",
    ),
    "a_file_is_missing": (
        lambda old: (old / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}'
        ),
        "must have every file that model.safetensors.index.json names, lacks ['model-00002",
    ),
    "index": (
        lambda old: (old / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json must have a weight_map",
    ),
    "pickled": (
        lambda old: (old / "model.safetensors").rename(old / "pytorch_model.bin"),
        "in safetensors, got pytorch_model.bin",
    ),
    "no_tokenizer": (lambda old: (old / "tokenizer.json").unlink(), "with tokenizer.json"),
    "hole": (leave_out, "must leave no id out, got no token of"),
    "not_json": (lambda old: (old / "tokenizer.json").write_text("{"), "tokenizer that loads"),
    "no_model": (lambda old: (old / "tokenizer.json").write_text("{}"), "tokenizer that loads"),
    "config_not_json": (lambda old: (old / "config.json").write_text("{"), "must have files of J"),
    "not_an_object": (lambda old: (old / "config.json").write_text("[]"), "a JSON object"),
    "cut": (
        lambda old: (old / "model.safetensors").write_bytes(b"\x10"),
        "model.safetensors cannot be renamed",
    ),
}


@pytest.mark.parametrize("model_type", ["roberta", "xglm", "gemma3n_text"])
def test_tables_and_positions_by_ids_are_refused(tmp_path: Path, model_type: str) -> None:
    old = save(tmp_path / "old", "byte_level")
    ids = {"pad_token_id": 1, "vocab_size": 400, "num_hidden_layers": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    if model_type == "xglm":
        sizes = {"d_model": 32, "ffn_dim": 64, "attention_heads": 2, "num_layers": 1}
    if model_type == "gemma3n_text":
        sizes |= {"vocab_size_per_layer_input": 390, "layer_types": ["full_attention"] * 2}
        sizes |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]}
    config = transformers.AutoConfig.for_model(model_type, **ids, **sizes)
    config.save_pretrained(old)
    with pytest.raises(ValueError, match="must not have a padding_idx: it looks rows up by ids"):
        deal(old, tmp_path / "new", ranks=2)


# Of each layer, more rows of n-grams than there are ids.
HYBRID = {
    "eos_token_id": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["linear_attention"] * 2,
    "linear_num_value_heads": 16,
    "ple_layer_ids": [1, 2],
    "heads_per_ngram": 1,
    "ngram_vocab_size_base": 300,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "names"),
    [
        ("qwen4_exp_text", HYBRID, ["layers.0.ple.ple_embedding", "layers.1.ple.ple_embedding"]),
        ("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe"]}, ["layers.0.mlp.gate"]),
        ("blt", None, ["encoder_hash_tok_embedding"]),
    ],
)
def test_tables_of_hashed_ids_are_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any] | None, names: list[str]
) -> None:
    old = save(tmp_path / "old", "byte_level")
    sizes: dict[str, Any] = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2}
    # BLT's are those of its parts.
    sizes = {} if changes is None else {**sizes, "num_attention_heads": 2, **changes}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    config.save_pretrained(old)
    with pytest.raises(ValueError, match="must look up ids in its embedding alone") as refused:
        deal(old, tmp_path / "new", ranks=2)
    assert all(name in str(refused.value) for name in names)


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        ("word_piece", tokenizers.AddedToken("covid", single_word=True)),
        ("uncased", tokenizers.AddedToken("covid", special=True, normalized=False)),
        ("ignores_merges", tokenizers.AddedToken("covid", single_word=True)),
    ],
)
def test_an_added_token_that_the_model_would_find(
    tmp_path: Path, kind: str, token: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncased(size: int, special: list[str]) -> Any:
        tokenizer = word_piece(size, special)
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
        return tokenizer

    def ignores_merges(size: int, special: list[str]) -> Any:
        tokenizer = byte_level(size, special)
        tokenizer.model.ignore_merges = True
        return tokenizer

    monkeypatch.setitem(KINDS, "uncased", uncased)
    monkeypatch.setitem(KINDS, "ignores_merges", ignores_merges)
    old = save(tmp_path / "old", kind, rows=401)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(old))
    tokenizer.add_tokens([token])
    tokenizer.save_pretrained(old)
    with pytest.raises(ValueError, match="the renamed tokenizer must have"):
        deal(old, tmp_path / "new", ranks=2)


def test_weights_of_other_forms_do_not_stay(tmp_path: Path) -> None:
    old = save(tmp_path / "old", "byte_level")
    for name in ("model.gguf", "tf_model.h5", "model.onnx"):
        (old / name).write_text("")
    deal(old, tmp_path / "new", ranks=2)
    assert not [*(tmp_path / "new").glob("*.gguf"), *(tmp_path / "new").glob("*.h5")]
    (old / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"in safetensors, got model\.gguf"):
        deal(old, tmp_path / "newer", ranks=2)


@pytest.mark.parametrize("spoil", REFUSED)
def test_what_cannot_be_renamed_is_refused(tmp_path: Path, spoil: str) -> None:
    change, message = REFUSED[spoil]
    change(save(tmp_path / "old", "byte_level"))
    command = ["vocab", "deal", str(tmp_path / "old"), "--ranks", "2"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "new")])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"], "something is left behind"


def test_tokens_after_a_unigrams_pieces_without_a_row(tmp_path: Path) -> None:
    old = save(tmp_path / "old", "unigram")
    edit(old / "tokenizer_config.json", added_tokens_decoder={"400": {"content": "<more>"}})
    with pytest.raises(ValueError, match="must be below the model's 400 rows, got 400"):
        deal(old, tmp_path / "new", ranks=2)


def test_an_older_file_that_does_not_name_its_kind(tmp_path: Path) -> None:
    """As GPT-2's does not."""
    old = save(tmp_path / "old", "byte_level")
    spec = json.loads((old / "tokenizer.json").read_text())
    del spec["model"]["type"]
    (old / "tokenizer.json").write_text(json.dumps(spec))
    deal(old, tmp_path / "new", ranks=2)
    check_same(old, tmp_path / "new")


def test_arguments(tmp_path: Path) -> None:
    old = save(tmp_path / "old", "byte_level")
    with pytest.raises(ValueError, match="ranks must be >= 2, got 1"):
        deal(old, tmp_path / "new", ranks=1)
    with pytest.raises(ValueError, match="divisible_by must be >= 1, got 0"):
        deal(old, tmp_path / "new", ranks=2, divisible_by=0)
    with pytest.raises(ValueError, match="out must not exist"):
        deal(old, old, ranks=2)


def test_the_command(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", "byte_level"), tmp_path / "some" / "new"
    result = CliRunner().invoke(
        app, ["vocab", "deal", str(old), "--ranks", "4", "--out", str(new)], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    assert "400 ids dealt out to 4 ranks of 100 rows" in result.output
    assert "lm_head.weight, model.embed_tokens.weight" in result.output
    check_same(old, new)


@hypothesis.given(
    num_ids=st.integers(1, 300), num_ranks=st.integers(1, 9), extra=st.integers(0, 40)
)
def test_each_rank_has_as_many_of_the_first_ids(num_ids: int, num_ranks: int, extra: int) -> None:
    num_rows = -(-num_ids // num_ranks) + extra
    new_ids = dealt_ids(num_ids, num_ranks, num_rows)
    assert new_ids.sort().values.equal(torch.arange(num_ids))
    shards = [VocabShard.even(num_rows, rank, num_ranks) for rank in range(num_ranks)]
    room = [max(0, min(shard.stop, num_ids) - shard.start) for shard in shards]
    for first in range(0, num_ids, 7):
        counts = torch.bincount(new_ids[:first] // num_rows, minlength=num_ranks).tolist()
        open_ranks = [count for count, most in zip(counts, room, strict=True) if count < most]
        assert not open_ranks or max(open_ranks) - min(open_ranks) <= 1
    for rank in range(num_ranks):
        mine = new_ids[new_ids // num_rows == rank]
        assert mine.equal(mine.sort().values), "a rank's ids keep their order"


def test_ranks_without_room_for_the_ids() -> None:
    with pytest.raises(ValueError, match="must be >= num_ids=10, got 3 \\* 3"):
        dealt_ids(10, 3, 3)
