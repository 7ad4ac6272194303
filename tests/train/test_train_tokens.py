"""Text, vocabulary and batches: deterministic, cached, and refused with the reason."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from cce_dist.train.config.schema import DataConfig, TrainConfig
from cce_dist.train.data.batches import split_tokens
from cce_dist.train.data.text import collect_documents
from cce_dist.train.data.tokens import prepare_tokens
from cce_dist.train.errors import ConfigError


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_collect_documents_default_is_bounded_and_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two folders in place of all: there are some hundred thousand files, listed twice. The whole of
    # it is what `cce-dist bench capture` reads in its test.
    roots = {
        "stdlib": Path(argparse.__file__).parent / "email",
        "purelib": Path(np.__file__).parent,
    }
    monkeypatch.setattr(sysconfig, "get_paths", lambda: roots)
    documents = collect_documents((), 0.5)
    assert 0.5e6 <= sum(len(text) for text in documents) < 0.6e6
    assert documents == collect_documents((), 0.5)


def test_collect_documents_default_leaves_out_jsonl_of_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "data.jsonl", '{"prompt": "no text"}')
    write(tmp_path, "a.py", "first")
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda: dict.fromkeys(("stdlib", "purelib"), tmp_path)
    )
    assert collect_documents((), 1.0) == ["first"]


def test_collect_documents_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("a.md", "a/b.md", "a-b/c.md", ".hidden/a.md", "A.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, name, name)
    expected = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.md"))]
    assert collect_documents((tmp_path,), 1.0) == expected != sorted(expected)


def test_collect_documents_folder(tmp_path: Path) -> None:
    write(tmp_path, "b.txt", "second")
    write(tmp_path, "a.py", "first")
    write(tmp_path, "copy.md", "second")
    write(tmp_path, "binary.txt", b"\xff\xfe")
    write(tmp_path, "picture.png", "not a document")
    write(tmp_path, "empty.txt", " \n")
    # Looking at its target raises, as in a folder that others may not search.
    (tmp_path / "hidden.txt").symlink_to(300 * "x")
    assert collect_documents((tmp_path,), 1.0) == ["first", "second"]


def test_collect_documents_jsonl(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", '{"text": "one", "id": 1}\n\n{"text": "two"}\n')
    assert collect_documents((path,), 1.0) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        pytest.param(
            "x.jsonl",
            '{"text": "a"}\n{"text": b}\n',
            "x.jsonl:2: each line must be a JSON object, got '{\"text\": b}'",
            id="bad JSON",
        ),
        pytest.param("x.jsonl", "[1]", "x.jsonl:1: each line must be a JSON object", id="list"),
        pytest.param(
            "x.jsonl",
            '{"content": "a"}',
            "x.jsonl:1: each object must have a field \"text\" of text, got fields ['content']",
            id="no field",
        ),
        pytest.param("x.jsonl", '{"text": 3}', "got text=3", id="no text"),
        pytest.param(
            "x.jsonl",
            '{"text": "\\ud83d\\ude00"}\n{"text": "ab\\ud83d"}',
            "x.jsonl:2: \"text\" must be Unicode, got '\\ud83d', half of a character, at offset 2",
            id="lone surrogate",
        ),
        pytest.param("x.jsonl", "9" * 5000, "x.jsonl:1: each line must be a JSON", id="digits"),
        pytest.param("x.jsonl", "[" * 200_000, "x.jsonl:1: each line must be", id="depth"),
        pytest.param(
            "x.jsonl", b'{"text": "a"}\n"\xff"', "x.jsonl:2: each line must be", id="no UTF-8 line"
        ),
        pytest.param("x.txt", b"ab\xff", "got the byte 0xff at offset 2", id="not UTF-8"),
        pytest.param("x.txt", "", "must hold some text, got none in", id="empty"),
    ],
)
def test_collect_documents_refuses(
    tmp_path: Path, name: str, data: str | bytes, expected: str
) -> None:
    path = write(tmp_path, name, data)
    with pytest.raises(ConfigError) as caught:
        collect_documents((path,), 1.0)
    assert expected in str(caught.value)


def test_collect_documents_refuses_a_missing_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere"):
        collect_documents((tmp_path / "nowhere",), 1.0)
    with pytest.raises(ConfigError, match=r"cannot read .*: File name too long"):
        collect_documents((tmp_path / (300 * "x"),), 1.0)


def test_prepare_tokens_round_trip_and_cache(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    text = "def naïve(x):\n\treturn x  # ∑ 😀\n" * 20
    path = write(tmp_path, "a.txt", text)
    config = DataConfig(paths=(path,), vocab_size=280, cache=tmp_path / "cache")
    said: list[str] = []
    cache = prepare_tokens(config, said.append)
    ids = cache.tokens()
    assert isinstance(ids, np.memmap) and ids.dtype == np.uint16
    tokenizer = Tokenizer.from_file(str(cache.folder / "tokenizer.json"))
    assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text
    assert ids[-1] == tokenizer.token_to_id("<eos>")
    assert int(ids.max()) < cache.num_merged <= 280
    assert prepare_tokens(config, said.append) == cache
    assert len(said) == 1, "the second call must find the cache"
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [cache.key]


def test_prepare_tokens_key_follows_text_and_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "some text, some more text")
    keys = set()
    for vocab_size in (257, 258):
        config = DataConfig(paths=(path,), vocab_size=vocab_size, cache=tmp_path / "cache")
        keys.add(prepare_tokens(config, lambda text: None).key)
    write(tmp_path, "a.txt", "other text")
    cache = prepare_tokens(config, lambda text: None)
    assert len(keys | {cache.key}) == 3
    (old,) = keys - {prepare_tokens(config, lambda text: None, key=min(keys)).key}
    assert old in keys, "a key that is given and cached is taken without reading the text"


def make_config(**values: object) -> TrainConfig:
    return TrainConfig.model_validate({"data": {"sequence_length": 4}, "batch": 2, **values})


def test_split_tokens_batches_are_a_function_of_seed_step_and_rank() -> None:
    batches = split_tokens(np.arange(1000, dtype=np.uint16), make_config(), 2)
    ids, targets = batches.step(7, dp_rank=1, dp=2)
    assert ids.shape == targets.shape == (2, 4)
    assert (targets == ids + 1).all()
    again = batches.step(7, dp_rank=1, dp=2)[0]
    assert (ids == again).all()
    assert not (ids == batches.step(8, dp_rank=1, dp=2)[0]).all()
    other = split_tokens(np.arange(1000, dtype=np.uint16), make_config(run={"seed": 1}), 2)
    assert not (ids == other.step(7, dp_rank=1, dp=2)[0]).all()


# Of the short text one batch is more than data.held_out.
@pytest.mark.parametrize("num_tokens", [1000, 100], ids=["long", "short"])
def test_split_tokens_layouts_see_the_same_global_batch(num_tokens: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    whole = split_tokens(tokens, make_config(batch=4), 1).step(3, dp_rank=0, dp=1)[0]
    parts = split_tokens(tokens, make_config(batch=2), 2)
    halves = [parts.step(3, dp_rank=rank, dp=2)[0] for rank in range(2)]
    assert (whole[:2] == halves[0]).all() and (whole[2:] == halves[1]).all()


def test_split_tokens_never_trains_on_held_out_text() -> None:
    batches = split_tokens(np.arange(100, dtype=np.uint16), make_config(), 1)
    first_held_out = int(batches.held_out_batch()[0].min())
    for step in range(200):
        assert int(batches.step(step, dp_rank=0, dp=1)[1].max()) < first_held_out


def test_split_tokens_refuses_too_little_text() -> None:
    with pytest.raises(ConfigError, match=r"at least 14 tokens .* got 13: add text"):
        split_tokens(np.arange(13, dtype=np.uint16), make_config(), 1)
    split_tokens(np.arange(14, dtype=np.uint16), make_config(), 1)
