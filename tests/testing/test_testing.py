"""The helpers that judge the library must themselves reject what is wrong."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cce_dist.testing import (
    TRITON_CPU,
    Case,
    Inputs,
    band,
    check_close64,
    check_gate,
    check_outputs,
    check_promise,
    gaussian_inputs,
    golden_outputs,
    large_logit_inputs,
    run_case,
    speed_up_interpreter,
    zipf_inputs,
)
from tests.support.loss_cases import generator

FAMILIES = {
    "gaussian": gaussian_inputs,
    "zipf": zipf_inputs,
    "large_logits": lambda *args, **more: large_logit_inputs(*args, largest=100.0, **more),
}
BUGS = (
    "no_merge",
    "shard_off_by_one",
    "missing_target_term",
    "no_grad_all_reduce",
    "bf16_accumulation",
)
WORLD_SIZE = 4


def sharded_emulation(inputs: Inputs, bug: str | None) -> dict[str, Tensor]:
    """Mean loss, lse and gradients as a sharded library makes them: fp32 sums, one rounding."""
    hidden, weight, targets = inputs.hidden.float(), inputs.weight.float(), inputs.targets
    size = len(weight) // WORLD_SIZE
    bounds = [(rank * size, (rank + 1) * size) for rank in range(WORLD_SIZE)]
    off = 1 if bug == "shard_off_by_one" else 0  # where a rank believes its first id to be
    accumulator = torch.bfloat16 if bug == "bf16_accumulation" else torch.float32

    logits = [hidden @ weight[start:stop].T for start, stop in bounds]
    local_lse = torch.stack([part.logsumexp(-1) for part in logits])
    lse = local_lse[0] if bug == "no_merge" else local_lse.logsumexp(0)
    nll = lse.clone()
    grad_hidden = torch.zeros_like(hidden, dtype=accumulator)
    grad_weight = torch.zeros_like(weight)
    for rank, (start, stop) in enumerate(bounds):
        d_logits = (logits[rank] - lse[:, None]).exp()
        mine = ((targets >= start + off) & (targets < stop + off)).nonzero()[:, 0]
        local = targets[mine] - start - off
        nll[mine] -= logits[rank][mine, local]
        if bug != "missing_target_term":
            d_logits[mine, local] -= 1
        d_logits = (d_logits / len(targets)).bfloat16().float()
        rows = slice(start, stop)
        if bug != "no_grad_all_reduce" or rank == 0:
            for columns in range(0, stop - start, 32):
                tile = slice(columns, columns + 32)
                part = d_logits[:, tile] @ weight[rows][tile]
                grad_hidden += part.to(accumulator)
        total = torch.zeros(d_logits.shape[1], hidden.shape[1], dtype=accumulator)
        for tokens in range(0, len(targets), 8):
            block = slice(tokens, tokens + 8)
            total += (d_logits[block].T @ hidden[block]).to(accumulator)
        grad_weight[rows] = total.float()[: len(grad_weight[rows])]
    return {
        "loss": nll.to(accumulator).float().mean(),
        "lse": lse.to(accumulator).float(),
        "grad_hidden": grad_hidden.to(torch.bfloat16),
        "grad_weight": grad_weight.to(torch.bfloat16),
    }


def control_case(family: str) -> Case:
    # 160 tokens in 20 blocks of 8 and 512 columns in 16 tiles of 32: sums long enough to go wrong.
    inputs = FAMILIES[family](160, 512, 64, generator=generator(), dtype=torch.bfloat16)
    return Case(inputs, {"stats": ("lse",)})


@pytest.mark.parametrize("family", FAMILIES)
def test_check_outputs_accepts_correct(family: str) -> None:
    case = control_case(family)
    check_outputs(case, sharded_emulation(case.inputs, None))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bug", BUGS)
def test_check_outputs_rejects_planted_bug(bug: str, family: str) -> None:
    case = control_case(family)
    outputs = sharded_emulation(case.inputs, bug)
    with pytest.raises(AssertionError, match=r"promise|gate"):
        check_outputs(case, outputs)


@pytest.mark.parametrize(
    ("output", "bugs"),
    [
        pytest.param("grad_hidden", ("no_grad_all_reduce", "bf16_accumulation"), id="grad_hidden"),
        pytest.param(
            "grad_weight",
            ("no_merge", "shard_off_by_one", "missing_target_term", "bf16_accumulation"),
            id="grad_weight",
        ),
        pytest.param("lse", ("no_merge", "bf16_accumulation"), id="lse"),
        pytest.param("loss", ("no_merge", "shard_off_by_one", "bf16_accumulation"), id="loss"),
    ],
)
def test_check_outputs_rejects_by_the_output_that_is_wrong(
    output: str, bugs: tuple[str, ...]
) -> None:
    # Each rule alone must see the bug, or another output hides that it is blind.
    case = control_case("gaussian")
    good = sharded_emulation(case.inputs, None)
    for bug in bugs:
        bad = sharded_emulation(case.inputs, bug)[output]
        with pytest.raises(AssertionError, match=output):
            check_outputs(case, {**good, output: bad})


def test_check_promise_reports_what_is_wrong() -> None:
    golden = torch.ones(3, 4, dtype=torch.float64)
    wrong = torch.ones(3, 4)
    wrong[1, 2] = 1.5
    with pytest.raises(AssertionError, match=r"probe: promise, max err.*\[1, 2\]"):
        check_promise("probe", wrong, golden, torch.ones(3, 4), torch.float32)
    wrong[1, 2] = float("nan")
    with pytest.raises(AssertionError, match=r"probe: 1 of 12 values are not finite.*\[1, 2\]"):
        check_promise("probe", wrong, golden, torch.ones(3, 4), torch.float32)
    with pytest.raises(AssertionError, match="probe: shape"):
        check_promise("probe", wrong[0], golden, torch.ones(3, 4), torch.float32)


def test_check_promise_constants() -> None:
    golden = torch.full((1000,), 1.0, dtype=torch.float64)
    baseline = golden + 1e-3
    check_promise("x", golden + 1.4e-3, golden, baseline, torch.float32)
    with pytest.raises(AssertionError, match="rms"):
        check_promise("x", golden + 1.6e-3, golden, baseline, torch.float32)
    one = golden.clone()
    one[0] += 2.1e-3
    with pytest.raises(AssertionError, match="max"):
        check_promise("x", one, golden, baseline, torch.float32)
    check_promise("x", one, golden, baseline, torch.bfloat16)
    assert band(2 * golden, torch.bfloat16) == 2 * 2**-7


def test_check_gate_constants() -> None:
    golden = torch.full((1000,), 8.0, dtype=torch.float64)
    check_gate("x", golden + 3.9 * 8 * 2**-24, golden, golden)
    with pytest.raises(AssertionError, match="gate"):
        check_gate("x", golden + 4.1 * 8 * 2**-24, golden, golden)
    check_gate("x", golden + 3.9e-3, golden, golden + 1e-3)


def test_check_close64_constants() -> None:
    golden = torch.full((10,), 8.0, dtype=torch.float64)
    check_close64("x", golden + 7e-11, golden)
    with pytest.raises(AssertionError, match="float64"):
        check_close64("x", golden + 9e-11, golden)


def test_check_accepts_equal_infinities() -> None:
    golden = torch.tensor([-torch.inf, 1.0], dtype=torch.float64)
    check_gate("x", golden.float(), golden, golden.float())
    with pytest.raises(AssertionError, match="not finite"):
        check_gate("x", -golden.float(), golden, golden.float())


def test_golden_outputs_zero_for_padding() -> None:
    inputs = gaussian_inputs(6, 10, 4, generator=generator())
    inputs = replace(inputs, targets=inputs.targets % 8)
    golden = golden_outputs(Case(inputs, vocab_size=8))
    assert golden["grad_weight"].shape == (10, 4)
    assert not golden["grad_weight"][8:].any()
    assert golden["grad_weight"].dtype == torch.float64


def test_run_case_agrees_with_golden_on_the_plainest_case() -> None:
    case = Case(gaussian_inputs(7, 30, 8, generator=generator(), dtype=torch.float64))
    check_outputs(case, run_case(None, case))


@pytest.mark.interpreter
def test_speed_up_interpreter_is_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    # It changes private names of Triton, and by results no test would tell that they have moved.
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_builder

    assert interpreter_builder.options.sanitize_overflow == interpreter_builder.options.debug
    case = Case(gaussian_inputs(7, 30, 8, generator=generator())).at(TRITON_CPU)
    before = run_case(None, case)
    folder = speed_up_interpreter.__module__.rpartition(".")[0]
    assert tl.load.__module__.startswith(f"{folder}.")
    monkeypatch.setattr(inspect, "getmembers", pytest.fail)
    after = run_case(None, case)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_interpreted_products_do_not_depend_on_their_place(dtype: torch.dtype) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def product_kernel(left_ptr, right_ptr, out_ptr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        product = tl.dot(tl.load(left_ptr + at), tl.load(right_ptr + at), input_precision="ieee")
        tl.store(out_ptr + at, product)

    generator = torch.Generator().manual_seed(0)
    row, column = torch.randn(2, 64, generator=generator).to(dtype)
    rows, columns = row.expand(64, 64).contiguous(), column[:, None].expand(64, 64).contiguous()
    out = torch.empty(64, 64)
    product_kernel[(1,)](rows, columns, out, BLOCK=64)  # pyright: ignore[reportIndexIssue]
    assert (out == out[0, 0]).all()
    expected = (row.double() * column.double()).sum()
    torch.testing.assert_close(out[0, 0].double(), expected, rtol=1e-5, atol=1e-6)
    # What is no number is so in its row alone, and no warning.
    rows[3] = torch.nan
    product_kernel[(1,)](rows, columns, out, BLOCK=64)  # pyright: ignore[reportIndexIssue]
    assert out.isnan().sum(1).tolist() == [0] * 3 + [64] + [0] * 60


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_golden_outputs_do_not_round_gradients(dtype: torch.dtype) -> None:
    # 2**-40 times a gradient is no fp16 number, but the golden's gradients are in float64.
    inputs = gaussian_inputs(9, 30, 8, generator=generator(), dtype=dtype)
    one = golden_outputs(Case(inputs))
    tiny = golden_outputs(Case(inputs, upstream={"loss": 2.0**-40}))
    for name in ("grad_hidden", "grad_weight"):
        assert one[name].dtype == torch.float64
        assert torch.equal(tiny[name] * 2.0**40, one[name])
