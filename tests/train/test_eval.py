"""`cce-dist eval` against a dense float64 evaluation, on any number of ranks; its refusals."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cce_dist.train.checkpoint import Checkpoint, find_checkpoint
from cce_dist.train.data.tokens import encode_texts, open_tokens
from cce_dist.train.errors import ConfigError
from cce_dist.train.evaluate.perplexity import Request, load_request, read_texts
from cce_dist.train.evaluate.scores import frequency_groups, score
from cce_dist.train.evaluate.windows import IGNORED, cut_windows
from cce_dist.train.model.decoder import Block, rotary_table
from tests.support.torchrun import run_forked, write_config

# Ranks are processes that take a while to start on a loaded machine.
pytestmark = pytest.mark.timeout(180)

DIM, HEADS, LAYERS, LENGTH = 16, 2, 2, 16
SOFTCAP, SCALE = 3.0, 2.0


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes two texts, and a run of two ranks, each of which has other layers and other rows."""
    folder = tmp_path_factory.mktemp("eval")
    held = Path(json.__file__).read_text()
    (folder / "a.txt").write_text(held[:900])
    (folder / "b.txt").write_text(f"\u00e9t\u00e9 {held[900:1300]}")
    job: dict[str, Any] = {
        "data": {"sequence_length": LENGTH},
        "model": {"dim": DIM, "layers": LAYERS, "heads": HEADS},
        "parallel": {"pp": 2, "vocab_over_pipeline": True},
        # The objective is not the likelihood, and the logits are not hidden @ weight.T.
        "loss": {
            "gradient": "exact",
            "z_loss": 0.1,
            "label_smoothing": 0.1,
            "softcap": SOFTCAP,
            "logit_scale": SCALE,
        },
        "optimizer": {"lr": 0.01, "warmup": 3, "schedule": "constant"},
        "checkpoint": {"every": 6},
        "steps": 12,
    }
    config = write_config(folder, **job)
    code, output = run_forked(2, folder / "train.out", "train", str(config))
    assert code == 0, output
    return folder


def evaluate(out: Path, num_ranks: int, name: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Runs the command; returns the findings and the command's output."""
    results = out / f"{name}.json"
    texts = str(out / "a.txt"), str(out / "b.txt")
    command = ("eval", str(out / "run"), *texts, "--json", str(results), *arguments)
    code, output = run_forked(num_ranks, out / f"{name}.out", *command)
    assert code == 0, output
    assert "Warning" not in output
    return json.loads(results.read_text()), output


def weights_of(out: Path, checkpoint: Checkpoint) -> dict[str, Tensor]:
    file = out / f"{checkpoint.step}.pt"
    dcp_to_torch_save(checkpoint.folder, file)
    return {name: weight.double() for name, weight in torch.load(file)["model"].items()}


def dense_nats(weights: dict[str, Tensor], ids: np.ndarray, stride: int) -> Tensor:
    """Computes the nats of each token of a text, [T] float64, from ids [1 + T]."""
    num_tokens = len(ids) - 1
    nats = torch.full((num_tokens,), math.nan, dtype=torch.float64)
    rotary = rotary_table(LENGTH, DIM // HEADS)
    rotary = rotary[0].double(), rotary[1].double()
    start = 0
    while nats.isnan().any():
        first = min(start, num_tokens - LENGTH)
        window = torch.from_numpy(ids[first : first + LENGTH + 1].astype(np.int64))
        x = weights["embedding"][window[:-1]][None] * math.sqrt(DIM)
        for layer in range(LAYERS):
            block, prefix = Block(DIM, HEADS).double(), f"blocks.{layer}."
            state = {
                name.removeprefix(prefix): weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            }
            block.load_state_dict(state)
            x = block(x, rotary)
        hidden = F.rms_norm(x[0], (DIM,), weights["final_norm.weight"])
        logits = SCALE * SOFTCAP * torch.tanh(hidden @ weights["head"].T / SOFTCAP)
        of_window = F.cross_entropy(logits, window[1:], reduction="none").detach()
        part = nats[first : first + LENGTH]
        part.copy_(torch.where(part.isnan(), of_window, part))
        start += stride
    return nats


def texts_of(out: Path, checkpoint: Checkpoint) -> list[np.ndarray]:
    cache = open_tokens(out / "cache", checkpoint.data_key)
    return encode_texts(cache, [(out / name).read_text() for name in ("a.txt", "b.txt")])


def test_eval_is_the_dense_evaluation_on_any_ranks(out: Path) -> None:
    checkpoint = find_checkpoint(out / "run" / "checkpoints", None)
    assert checkpoint.step == 12
    texts, weights = texts_of(out, checkpoint), weights_of(out, checkpoint)
    nats = [dense_nats(weights, ids, LENGTH) for ids in texts]
    whole = torch.cat(nats)
    alone, output = evaluate(out, 0, "alone", "--batch", "3")
    layouts = [
        (alone, 1, 1),
        (evaluate(out, 2, "two")[0], 1, 2),
        (evaluate(out, 4, "four", "--batch", "64")[0], 1, 4),
        # Neither the windows nor the batches can be divided equally.
        (evaluate(out, 4, "mesh", "--tp", "2", "--batch", "3")[0], 2, 2),
    ]
    for results, dp, tp in layouts:
        assert (results["dp"], results["tp"], results["step"]) == (dp, tp, 12)
        assert results["tokens"] == len(whole)
        assert results["nats_per_token"] == pytest.approx(float(whole.mean()), rel=1e-6)
        # Other ranks sum fp32 numbers in another order, so they differ by rounding.
        assert results["nats_per_token"] == pytest.approx(alone["nats_per_token"], rel=1e-7)
        assert results["perplexity"] == pytest.approx(math.exp(whole.mean()), rel=1e-5)
        for path, of_text, dense in zip(("a.txt", "b.txt"), results["texts"], nats, strict=True):
            size = (out / path).stat().st_size
            assert (of_text["path"], of_text["bytes"]) == (str(out / path), size)
            assert of_text["nats_per_token"] == pytest.approx(float(dense.mean()), rel=1e-6)
            bits = float(dense.sum()) / math.log(2) / size
            assert of_text["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    check_frequency(alone, np.concatenate([ids[1:] for ids in texts]), whole)
    assert "dp 1, tp 1" in output and f"windows of {LENGTH} tokens, {LENGTH} apart" in output
    assert re.search(rf"all +\S +{len(whole):,} \S +{alone['nats_per_token']:.6f} ", output), output


def check_frequency(results: dict[str, Any], ids: np.ndarray, nats: Tensor) -> None:
    """Rows are from the most frequent ids to the rarest, and add up."""
    counts = np.bincount(ids, minlength=301)
    rows = results["frequency"]
    assert sum(row["tokens"] for row in rows) == len(ids)
    assert sum(row["ids"] for row in rows) == len(np.unique(ids))
    bounds = [time for row in rows for time in reversed(row["times"])]
    assert bounds == sorted(bounds, reverse=True)
    present = sorted(np.unique(ids).tolist(), key=lambda each: (-counts[each], each))
    rarest = rows[-1]
    rare = present[-rarest["ids"] :]
    assert (rarest["tenth"], rarest["times"][0], rarest["times"][1]) == (10, 1, counts[rare[0]])
    assert rarest["tokens"] == sum(counts[rare])
    dense = float(nats[np.isin(ids, rare)].mean())
    assert rarest["nats_per_token"] == pytest.approx(dense, rel=1e-6)


def test_eval_with_overlap_and_an_earlier_checkpoint(out: Path) -> None:
    checkpoint = find_checkpoint(out / "run" / "checkpoints", 6)
    weights = weights_of(out, checkpoint)
    stride = 5
    whole = torch.cat([dense_nats(weights, ids, stride) for ids in texts_of(out, checkpoint)])
    # The cache has moved.
    (out / "moved").symlink_to(out / "cache")
    options = ("--checkpoint", "6", "--stride", str(stride), "--cache", str(out / "moved"))
    results, _ = evaluate(out, 3, "overlap", "--tp", "1", *options)
    assert (results["dp"], results["step"], results["stride"]) == (3, 6, stride)
    assert results["nats_per_token"] == pytest.approx(float(whole.mean()), rel=1e-6)


def test_eval_in_bfloat16(out: Path) -> None:
    shutil.copytree(out / "run", out / "bf16")
    change_config(out / "bf16", dtype="bfloat16")
    checkpoint = find_checkpoint(out / "bf16" / "checkpoints", None)
    text = texts_of(out, checkpoint)[0]
    dense = float(dense_nats(weights_of(out, checkpoint), text, LENGTH).mean())
    results = out / "bf16.json"
    command = ("eval", str(out / "bf16"), str(out / "a.txt"), "--json", str(results))
    code, output = run_forked(2, out / "bf16.out", *command)
    assert code == 0, output
    nats = json.loads(results.read_text())["nats_per_token"]
    assert 1e-6 < abs(nats - dense) / dense < 1e-2


def change_config(run: Path, **changes: Any) -> None:
    """Changes the configuration in the newest checkpoint."""
    info = run / "checkpoints" / "step_00000012" / "run.json"
    changed = json.loads(info.read_text())
    changed["config"].update(changes)
    info.write_text(json.dumps(changed))


@pytest.mark.parametrize(
    ("num_tokens", "length", "stride"),
    [
        pytest.param(16, 16, 16, id="one window"),
        pytest.param(17, 16, 16, id="one token more"),
        pytest.param(48, 16, 16, id="whole windows"),
        pytest.param(50, 16, 1, id="every token a window"),
        pytest.param(61, 16, 7, id="overlap"),
    ],
)
def test_cut_windows_scores_each_token_once(num_tokens: int, length: int, stride: int) -> None:
    sizes = (num_tokens, length)
    texts = [np.arange(size + 1) + 1000 * number for number, size in enumerate(sizes)]
    windows = cut_windows(texts, [Path("a"), Path("b")], length, stride)
    ids, targets, text = windows.batch(np.arange(len(windows)))
    scored = targets != IGNORED
    expected = torch.cat([torch.from_numpy(tokens[1:]) for tokens in texts])
    assert torch.equal(targets[scored], expected)
    assert torch.equal((targets - ids)[scored], torch.ones(len(expected), dtype=torch.int64))
    assert torch.equal(text, ids[:, 0] // 1000)
    # All but a text's first window have at least this much context.
    context = scored.int().argmax(1)
    assert context[text == 0][1:].ge(length - stride).all()


def test_frequency_groups_divide_no_id() -> None:
    counts = np.array([0, 1, 50, 25, 1, 1, 22])
    # Middles at 25, 62.5, 86, 97.5, 98.5 and 99.5 of 100 tokens.
    assert frequency_groups(counts).tolist() == [9, 9, 2, 6, 9, 9, 8]


def test_score_beyond_the_largest_float() -> None:
    assert score(tokens=2, nats=2000.0)["perplexity"] is None
    assert score(tokens=2, nats=2.0)["perplexity"] == pytest.approx(math.e)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"run_dir": Path("none")}, "must hold a checkpoint of .*, got none", id="run"),
        pytest.param({"checkpoint": 7}, "step 7, got checkpoints of steps 6, 12", id="checkpoint"),
        pytest.param({"tp": 3}, "--tp must divide the number of ranks, got tp=3", id="tp"),
        pytest.param({"batch": 0}, "--batch must be >= 1, got 0", id="batch"),
        pytest.param({"sequence_length": 1}, "--sequence-length must be >= 2", id="length"),
        pytest.param({"stride": 17}, "--stride must be at most the 16 tokens", id="stride"),
    ],
)
def test_eval_refuses_options(out: Path, changes: dict[str, Any], message: str) -> None:
    request = Request(**{"run_dir": out / "run", "texts": (out / "a.txt",), **changes})
    with pytest.raises(ConfigError, match=message):
        load_request(request, num_ranks=2)


def test_eval_refuses_texts_and_tokenizers(out: Path, tmp_path: Path) -> None:
    def refuse(message: str, *, text: Path, **changes: Any) -> None:
        request = Request(run_dir=out / "run", texts=(text,), **changes)
        config = load_request(request, num_ranks=1)
        with pytest.raises(ConfigError, match=message):
            _, _, tokens = read_texts(request, config)
            cut_windows(tokens, request.texts, config.data.sequence_length, 1)

    text = tmp_path / "text"
    refuse("TEXT: cannot read .*: No such file", text=text)
    refuse("TEXT: cannot read .*: Is a directory", text=tmp_path)
    text.write_bytes(b"ab\xff")
    refuse("must be UTF-8 text, got the byte 0xff at offset 2", text=text)
    text.write_bytes(b"one\r\ntwo\r\n" * 20)
    request = Request(run_dir=out / "run", texts=(text,))
    assert read_texts(request, load_request(request, num_ranks=1))[1] == [200]
    text.write_text("short")
    refuse(r"must have at least the 16 tokens of a window, got \d: add text, or", text=text)
    refuse("the tokenizer of .* must be in .*--cache", text=text, cache=tmp_path)
    key = find_checkpoint(out / "run" / "checkpoints", None).data_key
    shutil.copytree(out / "cache" / key, tmp_path / key)
    (tmp_path / key / "info.json").write_text('{"num_merged": 302}')
    refuse("must have at most the 301 ids of .*, got 302", text=text, cache=tmp_path)


def test_eval_finds_the_tokenizer_from_any_folder(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The run was started in another folder, with a relative data.cache, and has moved alone.
    run = tmp_path / "elsewhere" / "runs" / "run"
    shutil.copytree(out / "run", run)
    info = run / "checkpoints" / "step_00000012" / "run.json"
    saved = json.loads(info.read_text())
    assert saved["cache"] == str(out / "cache")
    saved["config"]["data"]["cache"] = "runs/.cache"
    info.write_text(json.dumps(saved))
    request = Request(run_dir=run, texts=(out / "a.txt",))
    config = load_request(request, num_ranks=1)
    tokens = read_texts(request, config)[2]
    expected = texts_of(out, find_checkpoint(out / "run" / "checkpoints", None))
    assert np.array_equal(tokens[0], expected[0])
    # The run has moved with its cache, and the folder where it was trained is gone.
    saved["cache"] = str(tmp_path / "gone")
    info.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=r"nor where the run was trained or is now: name the"):
        read_texts(request, config)
    shutil.copytree(out / "cache", run.parent / ".cache")
    for path in (run, run.relative_to(tmp_path)):
        moved = replace(request, run_dir=path)
        assert np.array_equal(read_texts(moved, load_request(moved, 1))[2][0], expected[0])


def test_eval_findings_that_cannot_be_written(out: Path, tmp_path: Path) -> None:
    (tmp_path / "found.json").symlink_to("/dev/full")
    command = ("eval", str(out / "run"), str(out / "a.txt"), "--json", str(tmp_path / "found.json"))
    code, output = run_forked(0, tmp_path / "full.out", *command)
    assert code == 1
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "--json cannot be written, got " in message and "No space left" in message
    assert "Traceback" not in output


def test_eval_refuses_weights_of_another_model(out: Path) -> None:
    shutil.copytree(out / "run", out / "other")
    change_config(out / "other", model={"dim": 24, "layers": LAYERS, "heads": HEADS})
    command = ("eval", str(out / "other"), str(out / "a.txt"))
    code, output = run_forked(0, out / "other.out", *command)
    assert code == 2
    assert "embedding of shape [301, 24], got [301, 16]" in output and "Traceback" not in output


def test_eval_says_an_error_once(out: Path, tmp_path: Path) -> None:
    command = ("eval", str(out / "run"), str(tmp_path / "none"))
    code, output = run_forked(2, tmp_path / "error.out", *command)
    assert code != 0
    assert output.count("error: ") == 1 and "TEXT: cannot read" in output
    assert "Traceback" not in output
