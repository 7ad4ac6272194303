"""`cce-dist bench ranks`, over gloo, started as its users start it."""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cce_dist import Filter, LinearCrossEntropy, VocabShard
from cce_dist.bench.golden import (
    GRADIENT_ERRORS,
    WORST_ERROR_RATIO,
    errors,
    golden_gradients,
    gradients,
)
from cce_dist.bench.inputs import Shape, make_inputs
from cce_dist.bench.methods import METHODS, choose_methods, describe_peers
from cce_dist.bench.rank_methods import Place, Setup, kept_share
from cce_dist.bench.ranks import uncovered
from cce_dist.bench.training import Meter, layout_of
from cce_dist.cli.main import app
from cce_dist.testing import shared_pool
from cce_dist.train.config.schema import TrainConfig
from tests.support.torchrun import bench


@pytest.mark.timeout(180)
def test_distillation_is_measured_beside_one_rank(tmp_path: Path) -> None:
    path = tmp_path / "ranks.csv"
    where = ("--device", "cpu", "--dtype", "float32", "--shape", "64x512x16", "--repeats", "3")
    options = ("--divergence", "jsd", "--csv", str(path))
    code, output = bench(tmp_path, "distill-ranks", *where, *options)
    assert code == 0, output
    with path.open() as file:
        rows = list(csv.DictReader(file))
    places = [(row["method"], row["ranks"], row["sequence_parallel"]) for row in rows]
    ours = [("filtered", "1", ""), ("filtered", "2", ""), ("filtered", "2", "yes")]
    assert places == [("one matmul", "1", ""), ("one matmul", "2", ""), *ours]
    for row in rows:
        assert float(row["median_ms"]) > 0 and not row["failed"]
    for row in rows[2:]:
        # Of terms such as q - p, whose digits cancel.
        assert max(float(row["grad_hidden_error"]), float(row["grad_weight_error"])) < 2e-5
        assert row["D_teacher"] == "32" and row["divergence"] == "jsd"
        assert float(row["mean_kl"]) > 0


@pytest.mark.timeout(180)
def test_ranks_are_measured_beside_one(tmp_path: Path) -> None:
    path = tmp_path / "ranks.csv"
    where = ("--device", "cpu", "--dtype", "float32", "--shape", "64x512x16", "--repeats", "3")
    methods = ("--method", "filtered", "--method", "dense", "--peers", "cce")
    code, output = bench(
        tmp_path, "ranks", "--inputs", "zipf-shuffled", *where, *methods, "--csv", str(path)
    )
    assert code == 0, output
    with path.open() as file:
        rows = list(csv.DictReader(file))
    measured = [row for row in rows if not row["failed"]]
    places = [(row["ranks"], row["sequence_parallel"]) for row in measured]
    of_product = [("1", ""), ("2", "")]
    assert places == [*of_product, *of_product, ("1", ""), ("2", ""), ("2", "yes")]
    product = {row["ranks"]: float(row["median_ms"]) for row in measured[:2]}
    for row in measured:
        assert float(row["median_ms"]) > 0 and float(row["times_faster"]) > 0
        of_matmul = float(row["median_ms"]) / product[row["ranks"]]
        assert float(row["of_matmul"]) == pytest.approx(of_matmul, rel=0.2, abs=0.01)
    for row in measured[2:]:
        assert max(float(row["grad_hidden_error"]), float(row["grad_weight_error"])) < 2e-6
        assert row["command"].startswith("torchrun --nproc-per-node 2 -m cce_dist bench ranks")
    # Not installed here: said, rather than left out.
    assert {row["method"]: row["failed"][:7] for row in rows if row["failed"]} == {"cce": "rank 0:"}
    assert output.count("zipf-shuffled, N 64") == 1


def test_exposed_communication_is_what_no_kernel_covers() -> None:
    assert uncovered(0, 10, []) == 10
    assert uncovered(0, 10, [(-5, 2), (1, 3), (8, 20), (20, 30)]) == 5
    assert uncovered(5, 10, [(0, 1), (6, 7)]) == 4
    assert uncovered(5, 10, [(0, 100), (6, 7)]) == 0


def shares_kept(group: Any) -> list[float | None]:
    inputs = make_inputs("zipf", Shape(256, 2048, 32))
    place = Place(group, VocabShard.chunked(2048, group.rank(), group.size()))
    part = replace(inputs, weight=inputs.weight[place.rows])
    keywords = {"filter": Filter(keep=0.02), "group": group}
    filtered = LinearCrossEntropy(gradient="filtered", backend="triton", **keywords)
    exact = LinearCrossEntropy(gradient="exact", backend="triton", group=group)
    shares = [kept_share(filtered, part, exchanges=exchanges) for exchanges in (True, False)]
    return [*shares, kept_share(exact, part, exchanges=True)]


@pytest.mark.interpreter
def test_what_a_rank_keeps_with_and_without_the_exchange_of_bounds() -> None:
    frequent, rare = shared_pool().run(2, shares_kept)
    # The second rank's classes are rare: what it knows alone is little of any token's lse.
    assert 0 < rare[0] < 0.75 * rare[1] <= 0.75
    assert rare[0] < frequent[0] <= frequent[1] <= 1
    # `exact` has no filter, so there is nothing to count.
    assert frequent[2] is None and rare[2] is None


def errors_of_methods(group: Any) -> dict[str, dict[str, float]]:
    # Two shards of four segments each, as `invariant` needs.
    inputs = make_inputs("zipf", Shape(128, 520, 16), dtype=torch.bfloat16)
    golden = golden_gradients(inputs)
    place = Place(group, VocabShard.chunked(520, group.rank(), group.size()))
    part = replace(inputs, weight=inputs.weight[place.rows])
    mine = replace(golden, weight=golden.weight[place.rows])
    setup = Setup("torch", place=place)
    every = [x for x in METHODS.values() if x.ranks and x.on_cpu and x.origin != "peer"]
    # Only the Triton backend keeps logits.
    return {
        x.name: errors(gradients(x.build(setup), part), mine)
        for x in every
        if x.name != "exact-kept"
    }


def test_our_methods_are_right_where_ranks_share_the_vocabulary() -> None:
    for found in shared_pool().run(2, errors_of_methods):
        dense = found.pop("dense")
        assert {"exact", "screened", "screened-in-forward"} < set(found)
        for name, error in found.items():
            for key in GRADIENT_ERRORS:
                assert error[key] <= WORST_ERROR_RATIO * dense[key], (name, key)


def test_dealt_ids_are_the_same_tokens() -> None:
    shape = Shape(64, 514, 16)
    plain, dealt = make_inputs("zipf", shape), make_inputs("zipf-dealt-4", shape)
    # Ranks have 129, 129, 129 and 127 rows: when the last is full, the others go on.
    old = [*range(0, 508, 4), 508, 511, *range(1, 508, 4), 509, 512]
    old += [*range(2, 508, 4), 510, 513, *range(3, 508, 4)]
    assert torch.equal(dealt.weight, plain.weight[old])
    assert torch.equal(dealt.weight[dealt.targets], plain.weight[plain.targets])
    assert torch.equal(dealt.hidden, plain.hidden)


TINY = f"""data: {{paths: [{argparse.__file__}], vocab_size: 2001, sequence_length: 32}}
model: {{dim: 32, layers: 2, heads: 2, tied: false}}
parallel: {{tp: 2, sequence_parallel: true}}
batch: 4
"""


@pytest.mark.timeout(180)
def test_training_steps_are_measured_with_either_loss(tmp_path: Path) -> None:
    config, path = tmp_path / "tiny.yaml", tmp_path / "train.csv"
    config.write_text(TINY)
    files = ("--out", str(tmp_path), "--csv", str(path), "--data.cache", str(tmp_path / "cache"))
    code, output = bench(
        tmp_path, "train", str(config), "--warmup-steps", "2", "--timed-steps", "2", *files
    )
    assert code == 0, output
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == ["filtered", "dense"]
    # The same model, text and seed; dense here is the recipe over ranks.
    assert rows[0]["last_loss"] == rows[1]["last_loss"]
    for row in rows:
        assert (row["dp"], row["tp"], row["tokens_a_step"]) == ("1", "2", "128")
        assert float(row["tokens_per_s"]) > 0 and float(row["peak_gib"]) > 0


@pytest.mark.parametrize(
    ("name", "loss", "expected"),
    [
        ("cce", {}, "filtered"),
        ("cce", {"gradient": "exact"}, "exact"),
        ("cce", {"logits": "screened"}, "screened"),
        ("dense", {"logits": "screened"}, "dense"),
        ("apple-cce", {"logits": "screened"}, "cce"),
    ],
)
def test_rows_of_training_steps_name_the_loss(name: str, loss: dict, expected: str) -> None:
    ranks: Any = SimpleNamespace(dp=1, tp=1)
    config = TrainConfig.model_validate({"dtype": "bfloat16", "loss": loss})
    assert layout_of(config, ranks, name)["loss"] == expected


def test_peers_are_named_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"liger-kernel": "0.8.5", "cut-cross-entropy": "25.1", "flash-attn": "2.8"}

    def version(package: str) -> str:
        if package in versions:
            return versions[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert describe_peers(["dense", "filtered", "exact-kept", "torch-compile", "screened"]) == {}
    methods = ["liger-8", "cce", "liger-sm90", "cce-exact", "flash-attn", "fla-16bit", "dense"]
    expected = "cut-cross-entropy 25.1, flash-attn 2.8, flash-linear-attention unknown, "
    assert describe_peers(methods) == {"peers": f"{expected}liger-kernel 0.8.5"}


def test_the_largest_batch_is_a_smaller_one_where_the_predicted_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    class OfALine(Meter):
        """2 GiB and 1 GiB a sequence, of which no more than 60 fit."""

        def measure(self, batch: int, warmup: int, steps: int) -> dict[str, Any]:
            tried.append(batch)
            if batch > 60:
                raise torch.OutOfMemoryError
            return {"batch": batch, "peak_gib": 2.0 + batch}

    job: Any = SimpleNamespace(
        config=TrainConfig.model_validate({"batch": 8}), ranks=SimpleNamespace(device="cuda")
    )
    memory = SimpleNamespace(total_memory=100 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    rows = list(OfALine(job, None, "cce", None).rows(2, 3, largest=True))  # pyright: ignore[reportArgumentType]
    assert tried == [8, 16, 86, 79, 72, 66, 61, 56]
    assert [row["batch"] for row in rows] == [8, 16, 56]
    # The other ranks of a job would wait for this one.
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(torch.OutOfMemoryError):
        list(OfALine(job, None, "cce", None).rows(2, 3, largest=True))  # pyright: ignore[reportArgumentType]
    # So half of the batch says first whether twice as much fits.
    for gib, expected in ((20, [8, 15]), (11, [8])):
        tried.clear()
        memory.total_memory = gib * 2**30
        rows = OfALine(job, None, "cce", None).rows(2, 3, largest=True)  # pyright: ignore[reportArgumentType]
        assert [row["batch"] for row in rows] == expected
        assert tried == [8, 4, *expected[1:]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "2", "--shape", "8x32x4"), "size must divide the number of ranks, 1"),
        (("--method", "fast"), "methods and peers must be among"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "ranks", "--device", "cpu", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_training_steps_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY)
    done = CliRunner().invoke(app, ["bench", "train", str(config), "--parallel.pp", "2"])
    assert done.exit_code == 2
    assert "parallel.pp must be 1 in this benchmark, got 2" in " ".join(done.output.split())


def test_rank_methods_by_name() -> None:
    def names(*arguments: Any) -> list[str]:
        return [method.name for method in choose_methods(*arguments, ranks=True)]

    default = ["dense", "filtered", "exact", "in_forward"]
    assert names() == names((), "none") == default
    assert names((), "cce,verl") == [*default, "cce", "verl"]
    assert names(["screened", "exact"], "none") == ["exact", "screened"]
    with pytest.raises(ValueError, match=r"must be among .*'liger-tp'.*, got \['fla'\]"):
        names((), "fla")
