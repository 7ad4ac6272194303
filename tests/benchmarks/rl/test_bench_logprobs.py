"""`bench logprobs`: the float64 gradients, the peers that cannot be imported, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.fidelity.tenths import ALL
from benchmarks.rl import contenders
from benchmarks.rl.contenders import CONTENDERS, LogprobContender, Policy, dense, draw_policy
from benchmarks.rl.logprobs import golden_of, tenths_by_probability
from cce_dist.bench.golden import gradients
from cce_dist.bench.inputs import Shape, make_inputs
from tests.benchmarks.bench_cases import invoke, read_csv, refuse

TINY = ("--tokens", "64", "--vocab", "500", "--dim", "16", "--device", "cpu", "--repeats", "3")


def test_the_golden_is_that_of_autograd() -> None:
    inputs = make_inputs("zipf", Shape(96, 300, 16), dtype=torch.float64)
    policy = draw_policy(96, inputs.hidden.device, entropy_weight=0.3)
    result, golden = golden_of(inputs, policy)
    expected = gradients(policy.loss_of(dense), inputs)
    torch.testing.assert_close(golden.loss, expected.loss)
    torch.testing.assert_close(golden.hidden, expected.hidden)
    torch.testing.assert_close(golden.weight, expected.weight)
    log_p = (inputs.hidden @ inputs.weight.T).log_softmax(-1)
    torch.testing.assert_close(result.logprobs, log_p[range(96), inputs.targets])
    assert policy.advantages.min() < 0 < policy.advantages.max()


def test_tenths_are_ranked_by_probability() -> None:
    inputs = make_inputs("zipf", Shape(40, 300, 16))
    logprobs = torch.rand(40)
    groups = {group.name: group for group in tenths_by_probability(logprobs, inputs)}
    assert list(groups) == [ALL, *map(str, range(1, 11))]
    assert groups["1"].tokens[logprobs.argmax()] and groups["10"].tokens[logprobs.argmin()]
    assert [int(group.tokens.sum()) for group in groups.values()] == [40] + 10 * [4]
    assert groups["3"].ids.nonzero()[:, 0].equal(inputs.targets[groups["3"].tokens].unique())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(policy: Policy) -> contenders.Built:
        raise ImportError("not installed")

    monkeypatch.setitem(CONTENDERS, "verl", LogprobContender("peer", fail))
    monkeypatch.setitem(CONTENDERS, "trl", LogprobContender("peer", CONTENDERS["dense"].build))
    names = ["filtered", "exact-plain", "dense", "trl", "verl"]
    path = tmp_path / "rows.csv"
    chosen = [word for name in names for word in ("--method", name)]
    output = invoke("logprobs", *TINY, *chosen, "--csv", str(path))
    assert "verl failed: ImportError: not installed" in output
    rows = [row for row in read_csv(path) if row["tenth"] == ALL and not row["failed"]]
    parts = {(row["method"], row["part"]): row for row in rows if row["logprob_error"]}
    assert list(parts) == [(name, part) for name in names[:4] for part in ("loss", "loss+grad")]
    for (name, _), row in parts.items():
        assert float(row["logprob_error"]) < 0.02 and float(row["grad_weight_error"]) < 0.02
        assert float(row["of_fastest_peer"]) == 1 or name != "trl"
        assert bool(row["entropy_error"]) == bool(row["correct_off"]) == (name != "exact-plain")
    tenths = [row for row in read_csv(path) if row["method"] == "filtered" and not row["part"]]
    assert [row["tenth"] for row in tenths] == [str(number) for number in range(1, 11)]
    assert float(tenths[0]["least_p"]) >= float(tenths[-1]["most_p"])
    assert "method must be among" in refuse("logprobs", *TINY, "--method", "torch-compile")
