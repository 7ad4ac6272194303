"""`bench distill`: the inputs, the float64 gradients, the peers, the bound, and the command."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.distillation import contenders
from benchmarks.distillation.contenders import CONTENDERS, Built, Contender, products
from benchmarks.distillation.distill import (
    add_of_bound,
    compare,
    describe,
    golden_of,
    groups_by_entropy_and_frequency,
)
from benchmarks.distillation.inputs import Teacher, make_models
from benchmarks.fidelity.tenths import ALL
from cce_dist.bench.golden import errors, gradients
from cce_dist.bench.inputs import BenchInputs, Shape
from cce_dist.reference import divergence_reference
from tests.benchmarks.bench_cases import invoke, read_csv, refuse

TINY = ("--tokens", "64", "--vocab", "500", "--dim", "16", "--device", "cpu", "--repeats", "3")


DIVERGENCES = pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])


def tiny(
    temperature: float = 1.0, dtype: torch.dtype = torch.float64, divergence: Any = "forward_kl"
) -> tuple[Any, Teacher]:
    inputs, teacher = make_models(Shape(96, 300, 16), 24, temperature=temperature, dtype=dtype)
    return inputs, replace(teacher, divergence=divergence)


def expected_of(inputs: BenchInputs, teacher: Teacher) -> torch.Tensor:
    """Each token's divergence by the reference in float64, with a graph."""
    student = inputs.hidden.double() @ inputs.weight.double().T
    logits = teacher.hidden.double() @ teacher.weight.double().T
    T = teacher.temperature
    return divergence_reference(student / T, logits / T, teacher.divergence)


def test_the_models_know_the_same_text() -> None:
    inputs, teacher = make_models(Shape(512, 8192, 256), 512, dtype=torch.bfloat16)
    golden = golden_of(inputs, teacher)
    assert 0.3 < golden.divergence.mean() < 1 and 2 < golden.entropy.mean() < 4
    assert describe(inputs, teacher, golden)["mean_kl"] == f"{float(golden.divergence.mean()):.3f}"
    # The most frequent ids have the largest constant logit in both models.
    assert inputs.token_counts is not None and inputs.token_counts.min() > 0
    for hidden, weight in ((inputs.hidden, inputs.weight), (teacher.hidden, teacher.weight)):
        assert (hidden[:, 0] == hidden[0, 0]).all() and hidden.dtype == torch.bfloat16
        order = weight[:, 0].double()[inputs.token_counts.argsort()]
        assert order.diff().min() >= 0
    # The other channels agree up to a rotation: in the products of any two tokens, not in any one.
    student, rotated = inputs.hidden[:, 1:192].float(), teacher.hidden[:, 1:192].float()
    torch.testing.assert_close(rotated @ rotated.T, student @ student.T, rtol=0.02, atol=2.0)
    assert torch.nn.functional.cosine_similarity(student, rotated).abs().mean() < 0.3


@pytest.mark.parametrize("dims", [(3, 8), (8, 3)], ids=["student", "teacher"])
def test_models_refuse_what_they_cannot_make(dims: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="dim and teacher-dim must be >= 4"):
        make_models(Shape(16, 50, dims[0]), dims[1])
    with pytest.raises(ValueError, match="temperature must be > 0"):
        make_models(Shape(16, 50, 8), 8, temperature=0.0)


def save(path: Path, dim: int, **changes: torch.Tensor) -> str:
    """Writes what `bench capture` writes."""
    generator = torch.Generator().manual_seed(dim)
    stored = {
        "hidden": torch.randn(48, dim, generator=generator),
        "weight": torch.randn(200, dim, generator=generator),
        "targets": torch.arange(48),
        "token_counts": torch.arange(200, 0, -1),
    }
    torch.save({**stored, **changes}, path)
    return str(path)


def test_trained_models(tmp_path: Path) -> None:
    files = save(tmp_path / "student.pt", 8), save(tmp_path / "teacher.pt", 16)
    given = ("--inputs", files[0], "--teacher-inputs", files[1], "--device", "cpu")
    rows = tmp_path / "rows.csv"
    dense = ("--dtype", "float32", "--method", "exact", "--repeats", "3", "--csv", str(rows))
    invoke("distill", *given, *dense)
    row = read_csv(rows)[-1]
    assert [row[name] for name in ("inputs", "V", "D", "D_teacher")] == [
        "student",
        "200",
        "8",
        "16",
    ]
    assert float(row["grad_hidden_error"]) < 1e-5


def test_models_of_two_texts_are_refused(tmp_path: Path) -> None:
    files = save(tmp_path / "a.pt", 8), save(tmp_path / "b.pt", 8, targets=torch.zeros(48).long())
    on_cpu = ("--device", "cpu", "--dtype", "float32")
    both = ("--inputs", files[0], "--teacher-inputs")
    assert "must be given together" in refuse("distill", *both[:2], *on_cpu)
    assert "must have the ids and targets" in refuse("distill", *both, files[1], *on_cpu)
    assert "a file of `cce-dist bench capture`" in refuse("distill", *both, "none.pt", *on_cpu)


@DIVERGENCES
@pytest.mark.parametrize("temperature", [1.0, 2.5], ids=["T1", "T2.5"])
def test_the_golden_is_that_of_autograd(temperature: float, divergence: str) -> None:
    inputs, teacher = tiny(temperature, divergence=divergence)
    golden = golden_of(inputs, teacher)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return expected_of(BenchInputs("", hidden, weight, targets), teacher).mean()

    expected = gradients(loss, inputs)
    torch.testing.assert_close(golden.divergence, expected_of(inputs, teacher))
    torch.testing.assert_close(golden.gradients.loss, expected.loss)
    torch.testing.assert_close(golden.gradients.hidden, expected.hidden)
    torch.testing.assert_close(golden.gradients.weight, expected.weight)
    log_p = (teacher.hidden @ teacher.weight.T / temperature).log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    torch.testing.assert_close(golden.entropy, entropy)


# Each contender that can run on a CPU, and the package that it needs.
ON_CPU = {"filtered": "", "exact": "", "dense": "", "trl": "trl", "liger-chunked": "liger_kernel"}


@DIVERGENCES
@pytest.mark.parametrize("temperature", [1.0, 2.5], ids=["T1", "T2.5"])
@pytest.mark.parametrize("name", ON_CPU)
def test_contenders_compute_the_mean_divergence(
    name: str, temperature: float, divergence: str
) -> None:
    if package := ON_CPU[name]:
        pytest.importorskip(package)
    inputs, teacher = tiny(temperature, torch.float32, divergence)
    golden = golden_of(inputs, teacher)
    built = CONTENDERS[name].build(teacher)
    off = errors(gradients(built.loss, inputs), golden.gradients)
    assert all(error < 2e-5 for error in off.values()), off
    assert (built.tokens is None) == (name == "liger-chunked")
    if built.tokens is not None:
        values = built.tokens(inputs.hidden, inputs.weight)
        torch.testing.assert_close(values.double(), golden.divergence, rtol=1e-4, atol=1e-5)


@DIVERGENCES
def test_chunks_compute_the_same(monkeypatch: pytest.MonkeyPatch, divergence: str) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(contenders, "CHUNK", 40)
    inputs, teacher = tiny(divergence=divergence)
    golden = golden_of(inputs, teacher)
    for name in ("torch-compile", "torch-compile-chunked"):
        built = CONTENDERS[name].build(teacher)
        off = errors(gradients(built.loss, inputs), golden.gradients)
        assert all(error < 1e-10 for error in off.values()), (name, off)


def test_trl_needs_no_packages_of_its_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    others = {name: each for name, each in sys.modules.items() if name.partition(".")[0] != "trl"}
    monkeypatch.setattr(sys, "modules", {**others, "datasets": None})
    inputs, teacher = tiny(2.0, torch.float32)
    built = CONTENDERS["trl"].build(teacher)
    assert built.tokens is not None
    values = built.tokens(inputs.hidden, inputs.weight)
    torch.testing.assert_close(
        values.double(), golden_of(inputs, teacher).divergence, rtol=1e-4, atol=1e-5
    )


def test_products_are_four_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "PRODUCT_CHUNK", 40)
    inputs, teacher = tiny()
    loss = products(teacher)
    with torch.no_grad():
        assert loss(inputs.hidden, inputs.weight, inputs.targets) == 0
    logits = inputs.hidden @ inputs.weight.T
    grads = gradients(loss, inputs)
    torch.testing.assert_close(grads.hidden, logits @ inputs.weight)
    torch.testing.assert_close(grads.weight, logits.T @ inputs.hidden)


def test_groups_are_tenths_by_entropy_and_by_frequency() -> None:
    inputs, teacher = tiny()
    golden = golden_of(inputs, teacher)
    groups = groups_by_entropy_and_frequency(golden.entropy, inputs)
    by_name = {group.name: group for group in groups}
    assert by_name[ALL].tokens.all()
    entropies = [golden.entropy[by_name[f"entropy {n}"].tokens] for n in range(1, 11)]
    assert sum(map(len, entropies)) == 96
    assert all(a.max() <= b.min() for a, b in itertools.pairwise(entropies))
    assert inputs.token_counts is not None
    frequent, rare = (inputs.token_counts[by_name[f"ids {n}"].ids] for n in (1, 10))
    assert len(frequent) == len(rare) == 30 and frequent.min() > rare.max()
    cells = compare(CONTENDERS["exact"].build(teacher), inputs, golden, groups)
    assert float(cells["entropy 1"]["entropy"]) < float(cells["entropy 10"]["entropy"])
    assert list(cells) == list(by_name)
    for name, row in cells.items():
        assert row.get("kl_error", 0) < 1e-10
        assert ("kl" in row) == bool(by_name[name].tokens.any())


def test_the_bound_is_two_products_and_a_backward() -> None:
    times = {
        ("products", "loss"): 3.0,
        ("cross-entropy", "loss"): 2.0,
        ("cross-entropy", "loss+grad"): 6.0,
        ("filtered", "loss"): 6.0,
        ("filtered", "loss+grad"): 14.0,
    }

    def rows(failed: str) -> list[dict[str, Any]]:
        return [
            {"method": name, "part": part, "median_ms": ms, "failed": failed, "of_bound": None}
            for (name, part), ms in times.items()
        ]

    measured = rows("")
    add_of_bound(measured)
    assert [row["of_bound"] for row in measured] == [1, 2 / 3, 6 / 7, 2, 2]
    broken = rows("")
    broken[2]["failed"] = "out of memory"
    add_of_bound(broken)
    assert [row["of_bound"] for row in broken] == [1, 2 / 3, None, 2, None]


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_fla_has_forward_kl_alone(divergence: str) -> None:
    with pytest.raises(ValueError, match=f"FLA has forward_kl alone, got '{divergence}'"):
        CONTENDERS["fla"].build(tiny(divergence=divergence)[1])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(teacher: Teacher) -> Built:
        raise ImportError("not installed")

    monkeypatch.setitem(CONTENDERS, "fla", Contender("peer", fail))
    monkeypatch.setitem(CONTENDERS, "trl", Contender("peer", contenders.dense))
    names = ["filtered", "exact", "dense", "trl", "fla"]
    path = tmp_path / "rows.csv"
    chosen = [word for name in names for word in ("--method", name)]
    options = (
        "--teacher-dim",
        "24",
        "--temperature",
        "1.5",
        "--csv",
        str(path),
        "--divergence",
        "jsd",
    )
    output = invoke("distill", *TINY, *chosen, *options)
    assert "fla failed: ImportError: not installed" in output
    assert "D_teacher 24, divergence jsd, temperature 1.5, mean_kl" in " ".join(output.split())
    rows = [row for row in read_csv(path) if row["group"] == ALL and not row["failed"]]
    parts = {(row["method"], row["part"]): row for row in rows}
    every = ["products", "cross-entropy", *names[:4]]
    assert list(parts) == [(name, part) for name in every for part in ("loss", "loss+grad")]
    for (name, _), row in parts.items():
        # The bound has a difference of times, which may be below 0 at this size.
        assert math.isfinite(float(row["of_bound"])) and float(row["peak_extra_mib"]) >= 0
        assert float(row["of_fastest_peer"]) == 1 or name != "trl"
        if name in names:
            # 16-bit logits err by their own size.
            assert float(row["kl_error"]) < 0.05
            assert float(row["grad_weight_error"]) < (0.02 if name in names[:2] else 0.5)
        else:
            assert row["note"] and not row["grad_weight_error"] and not row["loss_error"]
    tenths = [row for row in read_csv(path) if row["method"] == "filtered" and not row["part"]]
    assert {"1", "ids 10", "entropy 1", "entropy 10"} <= {row["group"] for row in tenths}
    assert "method must be among" in refuse("distill", *TINY, "--method", "torch-compile")
    assert "temperature must be > 0" in refuse("distill", *TINY, "--temperature", "0")
