"""--part, the ledger and `python -m tests.gpu_runs`, on tests that only claim to need a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_runs.__main__ import main
from tests.gpu_runs.kernels import kernels_in, launched_kernels
from tests.gpu_runs.ledger import commit_of, read_records
from tests.gpu_runs.parts import cut, read_seconds

pytest_plugins = "pytester"

CONFTEST = """
pytest_plugins = ["tests.gpu_runs.plugin"]
"""
INI = """
[pytest]
addopts = --strict-markers -p no:cacheprovider
markers =
    gpu: one
    multigpu: two
"""
TESTS = """
import os
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("x", range(4))
def test_passes(x):
    pass

def test_fails():
    assert os.environ.get("CCE_DIST_TEST_PASSES"), "no"

def test_skips():
    pytest.skip("no logits are kept")

@pytest.mark.multigpu
def test_of_ranks():
    pytest.skip("needs 4 GPUs")

@pytest.mark.skip(reason="needs a Hopper GPU")
def test_of_hopper():
    pass

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_torn_down_badly(broken):
    pass
"""
ON_CPU = "def test_on_a_cpu(): pass"
PASSED = [f"test_gpu.py::test_passes[{x}]" for x in range(4)]


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makefile(".ini", pytest=INI)
    pytester.makepyfile(test_gpu=TESTS, test_cpu=ON_CPU)
    return pytester


def run(project: pytest.Pytester, *arguments: str, commit: str = "abc") -> Any:
    return project.runpytest_inprocess("--commit", commit, *arguments)


def outcomes(path: Path) -> dict[str, str]:
    return {record["test"]: record["outcome"] for record in read_records([path])}


EXPECTED = {
    **dict.fromkeys(PASSED, "passed"),
    "test_gpu.py::test_fails": "failed",
    "test_gpu.py::test_skips": "skipped",
    "test_gpu.py::test_torn_down_badly": "failed",
}


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["one", "xdist"])
def test_ledger_has_every_gpu_test(project: pytest.Pytester, processes: tuple[str, ...]) -> None:
    run(project, *processes)
    path = project.path / "runs/gpu_ledger.jsonl"
    assert outcomes(path) == EXPECTED
    records = read_records([path])
    assert {record["commit"] for record in records} == {"abc"}
    assert all(record["seconds"] >= 0 for record in records)


def test_ledger_elsewhere(project: pytest.Pytester) -> None:
    run(project, "--ledger", "there/first.jsonl", "-k", "fails or torn")
    run(project, "--ledger", "there/first.jsonl", "-k", "skips")
    assert len(outcomes(project.path / "there/first.jsonl")) == 3
    assert not (project.path / "runs").exists()


def test_what_has_not_been_run(
    project: pytest.Pytester, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(project, "--ledger", "a.jsonl", "-k", "passes")
    run(project, "--ledger", "b.jsonl", "-k", "skips or fails or of_ranks")
    run(project, "--ledger", "b.jsonl", "-k", "torn", commit="another")
    capsys.readouterr()
    check = ["a.jsonl", "b.jsonl", "--commit", "abc"]
    assert main(check) == 1
    output = capsys.readouterr()
    not_run = ("of_ranks", "of_hopper", "torn_down_badly")
    assert output.out.split() == [f"test_gpu.py::test_{name}" for name in not_run]
    assert "abc: 4 passed, 1 failed, 1 skipped, 3 not run" in output.err
    assert "failed: test_gpu.py::test_fails\n" in output.err
    assert "skipped 1: no logits are kept\n" in output.err
    assert f"no test launched: {', '.join(sorted(kernels_in()))}\n" in output.err
    # pytest takes the ids that were printed.
    assert main([*check, "-m", "gpu and not multigpu"]) == 1
    missing = project.path / "missing.txt"
    missing.write_text(capsys.readouterr().out)
    run(project, "--ledger", "b.jsonl", f"@{missing}")
    monkeypatch.setenv("CCE_DIST_TEST_PASSES", "1")
    run(project, "--ledger", "c.jsonl", "-k", "fails")
    capsys.readouterr()
    assert main([*check, "c.jsonl"]) == 1
    output = capsys.readouterr()
    assert "abc: 5 passed, 1 failed, 1 skipped, 2 not run" in output.err
    assert "failed at first: test_gpu.py::test_fails\n" in output.err


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_have_each_test_once(project: pytest.Pytester, count: int) -> None:
    seen: list[str] = []
    for number in range(1, count + 1):
        path = project.path / f"{count}.{number}.jsonl"
        run(project, "--part", f"{number}/{count}", "--ledger", str(path), "-m", "gpu")
        seen += outcomes(path) if path.exists() else []
    assert sorted(seen) == sorted(EXPECTED)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0", "1/2/3"])
def test_a_part_that_is_none_is_refused(project: pytest.Pytester, part: str) -> None:
    result = project.runpytest_inprocess("--part", part)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"--part must be K/N with 1 <= K <= N, such as 1/4, got '{part}'" in str(result.stderr)


def test_parts_take_about_equally_long() -> None:
    files = {"long": 40 * [5.0], "mean": 20 * [2.0], "short": 9 * [0.5], "other": [30.0, 1.0]}
    tests = [(f"{name}.py::{x}", y) for name, each in files.items() for x, y in enumerate(each)]
    parts = [cut(tests, number, 3) for number in (1, 2, 3)]
    assert sorted(index for part in parts for index in part) == list(range(len(tests)))
    lengths = [sum(tests[index][1] for index in part) for part in parts]
    assert max(lengths) < 1.25 * sum(lengths) / 3
    for name in ("short", "other"):
        indices = {x for x, (test, _) in enumerate(tests) if test.startswith(name)}
        assert sum(bool(part & indices) for part in parts) == 1, name


def test_parts_of_nothing() -> None:
    assert cut([], 2, 3) == set()


def test_seconds_of_each_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "ledger.jsonl"
    kinds = [("f[1]", "passed", 2.0), ("f[2]", "passed", 3.0), ("g", "failed", 9.0)]
    lines = [
        json.dumps({"test": test, "outcome": outcome, "seconds": seconds, "time": 1})
        for test, outcome, seconds in kinds
    ]
    ledger.write_text("\n".join(lines))
    monkeypatch.setattr("tests.gpu_runs.parts.SECONDS", tmp_path / "seconds.json")
    assert read_seconds() == {}
    assert main([str(ledger), "--write-seconds"]) == 0
    assert read_seconds() == {"f": 2.5}


def test_a_ledger_that_is_not_there(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere.jsonl"])
    assert "a file that a run of GPU tests wrote, got ['nowhere.jsonl']" in capsys.readouterr().err


def test_commit_of_a_folder_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) == "unknown"


@pytest.mark.interpreter
def test_launched_kernels() -> None:
    import torch

    from cce_dist import linear_cross_entropy

    with launched_kernels() as names:
        targets = torch.zeros(2, dtype=torch.int64)
        linear_cross_entropy(torch.ones(2, 8), torch.ones(9, 8), targets, backend="triton")
    assert "forward_kernel" in names <= kernels_in()
    assert json.dumps(sorted(names))
