"""The helpers that judge the library must themselves reject what is wrong."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.testing import (
    DTYPES,
    PLACES,
    TORCH_CPU,
    TORCH_CUDA,
    TRITON_CPU,
    TRITON_CUDA,
    Case,
    CollectiveCounter,
    Inputs,
    RankError,
    RankPool,
    band,
    check_close64,
    check_gate,
    check_outputs,
    check_promise,
    each_choice,
    gaussian_inputs,
    golden_outputs,
    grid,
    large_logit_inputs,
    pairwise,
    run_case,
    sample_targets,
    shared_pool,
    speed_up_interpreter,
    zipf_inputs,
)
from cce_dist.testing.forks import start_fork_server

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


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_seeded_and_shaped(family: str) -> None:
    made = [
        FAMILIES[family]((3, 5), 70, 20, generator=generator(), dtype=torch.float16)
        for _ in range(2)
    ]
    assert made[0].hidden.shape == (3, 5, 20) and made[0].weight.shape == (70, 20)
    assert made[0].targets.shape == (3, 5) and made[0].targets.dtype == torch.int64
    assert made[0].hidden.dtype == made[0].weight.dtype == torch.float16
    for name in ("hidden", "weight", "targets"):
        assert torch.equal(getattr(made[0], name), getattr(made[1], name))
    empty = FAMILIES[family](0, 70, 20, generator=generator())
    assert empty.hidden.shape == (0, 20) and empty.targets.shape == (0,)


def test_zipf_inputs_are_skewed() -> None:
    # The filter's own measure: columns whose mass in a block of 128 tokens reaches twice uniform.
    inputs = zipf_inputs(256, 8192, 64, generator=generator())
    p = (inputs.hidden.double() @ inputs.weight.double().T).softmax(-1)
    mass = p.reshape(2, 128, -1).sum(1)
    kept = mass >= 2 * 128 / 8192
    assert kept.double().mean() < 0.15
    dropped = float(torch.where(kept, 0, mass).sum()) / 256
    assert 0.02 < dropped < 0.4, dropped
    gaussian = gaussian_inputs(256, 8192, 64, generator=generator())
    q = (gaussian.hidden.double() @ gaussian.weight.double().T).softmax(-1)
    assert q.max() < 0.05 < p.max()


def test_large_logit_inputs_reach_both_signs() -> None:
    inputs = large_logit_inputs(33, 101, 20, generator=generator(), dtype=torch.float64)
    logits = inputs.hidden @ inputs.weight.T
    assert 0.99e4 < float(logits.abs().max()) < 1.01e4
    assert bool(((logits.amax(-1) > 100) & (logits.amin(-1) < -100)).all())


def test_sample_targets_follow_softmax() -> None:
    hidden = torch.ones(20_000, 1)
    weight = torch.tensor([[0.0], [1.0], [2.0]])
    counts = torch.bincount(sample_targets(hidden, weight, generator()), minlength=3)
    expected = weight[:, 0].softmax(0) * 20_000
    assert (counts - expected).abs().max() < 4 * 20_000**0.5 / 2


def test_with_options_and_ignoring() -> None:
    inputs = gaussian_inputs((4, 50), 30, 8, generator=generator(), dtype=torch.bfloat16)
    made = inputs.with_options(generator(), "bias", "token_weight", "class_weight")
    assert made.bias.shape == (30,) and made.bias.dtype == torch.bfloat16
    assert made.token_weight.shape == (4, 50) and made.class_weight.shape == (30,)
    ignored = inputs.ignoring(generator(), 0.3, -1).targets == -1
    assert 0.2 < ignored.double().mean() < 0.4


def test_pairwise_covers_every_allowed_pair() -> None:
    factors = {"a": [0, 1, 2], "b": ["x", "y"], "c": [True, False]}
    rows = pairwise(factors, lambda row: not (row["a"] == 0 and row["c"]))
    assert all(not (row["a"] == 0 and row["c"]) for row in rows)
    assert {(row["a"], row["b"]) for row in rows} == {(a, b) for a in range(3) for b in "xy"}
    assert {(row["a"], row["c"]) for row in rows} == {
        (0, False),
        (1, True),
        (1, False),
        (2, True),
        (2, False),
    }
    assert len(rows) < 10


def test_each_choice_covers_every_allowed_value_in_few_rows() -> None:
    factors = {"a": [0, 1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [5, 6, 7]}
    allowed = lambda row: row["a"] != 0 or row["d"] == 7  # noqa: E731
    rows = each_choice(factors, allowed)
    assert all(allowed(row) for row in rows)
    for name, values in factors.items():
        assert {row[name] for row in rows} == set(values), name
    # Four of them, or one more: rows are chosen one by one.
    assert 4 <= len(rows) <= 5
    assert rows == each_choice(factors, allowed)
    assert len(each_choice(factors)) == 4
    # Where there is a choice, rows are as different as they can be.
    assert len({(row["b"], row["c"]) for row in each_choice(factors)}) == 4
    some = each_choice(factors, lambda row: row["b"] == "x")
    assert len(some) == 4 and {row["b"] for row in some} == {"x"}


def test_golden_outputs_zero_for_padding() -> None:
    inputs = gaussian_inputs(6, 10, 4, generator=generator())
    inputs = replace(inputs, targets=inputs.targets % 8)
    golden = golden_outputs(Case(inputs, vocab_size=8))
    assert golden["grad_weight"].shape == (10, 4)
    assert not golden["grad_weight"][8:].any()
    assert golden["grad_weight"].dtype == torch.float64


# -- ranks --------------------------------------------------------------------------------------


def report_place(group: dist.ProcessGroup, offset: int) -> tuple[int, int, int, int]:
    total = torch.tensor([dist.get_rank(group) + offset])
    dist.all_reduce(total, group=group)
    return (
        dist.get_rank(group),
        dist.get_world_size(group),
        int(total),
        torch.get_num_threads(),
    )


def echo(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    return tensor


def process_id(group: dist.ProcessGroup) -> int:
    return os.getpid()


def fail_on(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> int:
    rank = dist.get_rank(group)
    if rank in ranks:
        raise ValueError(f"planted at {rank}")
    return rank


def hang_on(group: dist.ProcessGroup, rank: int) -> None:
    if dist.get_rank(group) == rank:
        time.sleep(600)


def die_on(group: dist.ProcessGroup, rank: int) -> None:
    if dist.get_rank(group) == rank:
        os._exit(3)


def warn(group: dist.ProcessGroup) -> None:
    warnings.warn("planted", stacklevel=1)


def count_collectives(group: dist.ProcessGroup) -> list[tuple[str, int]]:
    with CollectiveCounter() as counter:
        dist.all_reduce(torch.ones(5), group=group)
        parts = [torch.empty(3) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, torch.ones(3), group=group)
    assert counter.count("allreduce") == 1 and counter.count("allgather") == 1
    return counter.calls


@pytest.mark.parametrize(
    ("world_size", "first_rank"),
    [(1, 0), (2, 0), (3, 0), (4, 0), (2, 2), (3, 1)],
    ids=["1", "2", "3", "4", "2_from_2", "3_from_1"],
)
def test_rank_pool_runs_on_part_of_the_ranks(world_size: int, first_rank: int) -> None:
    results = shared_pool().run(world_size, report_place, 10, first_rank=first_rank)
    total = sum(range(world_size)) + 10 * world_size
    assert results == [(rank, world_size, total, 1) for rank in range(world_size)]


def test_start_fork_server_is_no_part_of_a_tests_time() -> None:
    """10 s of a core are more on a busy one, and a test has 60."""
    assert start_fork_server.cache_info().currsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool], ids=str)
def test_rank_pool_carries_tensors(dtype: torch.dtype) -> None:
    sent = torch.arange(6).reshape(2, 3).to(dtype)
    for got in shared_pool().run(2, echo, sent):
        assert got.dtype == dtype and torch.equal(got, sent)


def test_rank_pool_keeps_its_processes_after_an_exception() -> None:
    pool = shared_pool()
    before = pool.run(4, process_id)
    with pytest.raises(RankError, match="planted at 1") as caught:
        pool.run(3, fail_on, (1,))
    assert set(caught.value.failures) == {1}
    what, trace = caught.value.failures[1]
    assert what == "ValueError: planted at 1" and "fail_on" in trace
    with pytest.raises(RankError) as caught:
        pool.run(4, fail_on, (0, 3))
    assert set(caught.value.failures) == {0, 3}
    assert pool.run(4, process_id) == before


def test_rank_pool_makes_warnings_errors() -> None:
    with pytest.raises(RankError, match="UserWarning: planted"):
        shared_pool().run(1, warn)


def test_rank_pool_counts_collectives() -> None:
    for calls in shared_pool().run(3, count_collectives):
        assert [size for _, size in calls] == [5, 3]


def test_rank_pool_restarts_after_a_timeout_and_after_a_death() -> None:
    pool = RankPool(2)
    try:
        before = pool.run(2, process_id)
        with pytest.raises(RankError, match="no answer in 1 s") as caught:
            pool.run(2, hang_on, 1, timeout=1)
        assert set(caught.value.failures) == {1}
        after = pool.run(2, process_id)
        assert not set(before) & set(after)
        with pytest.raises(RankError, match="process died") as caught:
            pool.run(2, die_on, 0)
        assert set(caught.value.failures) == {0}
        assert [rank for rank, *_ in pool.run(2, report_place, 0)] == [0, 1]
    finally:
        pool.close()


def test_rank_pool_refuses_a_world_that_it_has_not() -> None:
    with pytest.raises(ValueError, match="world_size must lie in"):
        shared_pool().run(3, process_id, first_rank=2)


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


def test_grid_is_whole_for_torch_and_covers_pairs_in_the_interpreter() -> None:
    made = grid(places=(TORCH_CPU, TRITON_CPU), size=(1, 2, 3), flag={"no": False, "yes": True},
                dtype=("fp32", "bf16", "float64"))  # fmt: skip
    assert made["argnames"] == ("place", "size", "flag", "dtype")
    rows = {place: [row[1:] for row in made["argvalues"] if row[0] is place] for place in PLACES}
    assert len(set(rows[TORCH_CPU])) == len(rows[TORCH_CPU]) == 3 * 2 * 3
    # Of these dtypes the interpreter takes one.
    assert {dtype for _, _, dtype in rows[TRITON_CPU]} == {"fp32"}
    assert {row[:2] for row in rows[TRITON_CPU]} == {
        (n, flag) for n in (1, 2, 3) for flag in (0, 1)
    }
    assert made["ids"][0] == "torch_cpu-1-no-fp32" and len(set(made["ids"])) == len(made["ids"])


def test_grid_takes_each_value_where_kernels_are_compiled() -> None:
    factors = {"size": (1, 2, 3), "flag": {"no": False, "yes": True}, "dtype": tuple(DTYPES)}
    made = grid(places=(TORCH_CUDA, TRITON_CUDA), **factors)
    rows = {place: [row[1:] for row in made["argvalues"] if row[0] is place] for place in PLACES}
    assert len(rows[TORCH_CUDA]) == 3 * 2 * 4 and len(rows[TRITON_CUDA]) == 3
    for place, values in enumerate(((1, 2, 3), (False, True), TRITON_CUDA.dtypes)):
        assert {row[place] for row in rows[TRITON_CUDA]} == set(values)
    assert grid(places=(TRITON_CUDA,))["argvalues"] == [(TRITON_CUDA,)]
    assert len(grid(places=(TRITON_CUDA,), size=(1, 2, 3), flag=(0, 1))["argvalues"]) == 3
    # A value stands in a row that is allowed, or in none.
    made = grid(
        places=(TRITON_CUDA,),
        allowed=lambda row: row["size"] == "3" or row["flag"] == "0",
        size=(1, 2, 3),
        flag=(0, 1),
    )
    rows = {row[1:] for row in made["argvalues"]}
    assert {(1, 0), (2, 0), (3, 1)} <= rows <= {(1, 0), (2, 0), (3, 0), (3, 1)}


def test_grid_leaves_out_what_is_not_allowed() -> None:
    allowed = lambda row: row["size"] != "2" or row["flag"] == "yes"  # noqa: E731
    made = grid(places=(TORCH_CPU,), allowed=allowed, size=(1, 2), flag={"no": 0, "yes": 1})
    assert [row[1:] for row in made["argvalues"]] == [(1, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_golden_outputs_do_not_round_gradients(dtype: torch.dtype) -> None:
    # 2**-40 times a gradient is no fp16 number, but the golden's gradients are in float64.
    inputs = gaussian_inputs(9, 30, 8, generator=generator(), dtype=dtype)
    one = golden_outputs(Case(inputs))
    tiny = golden_outputs(Case(inputs, upstream={"loss": 2.0**-40}))
    for name in ("grad_hidden", "grad_weight"):
        assert one[name].dtype == torch.float64
        assert torch.equal(tiny[name] * 2.0**40, one[name])
