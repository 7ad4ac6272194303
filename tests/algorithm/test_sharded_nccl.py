"""linear_cross_entropy over NCCL, a rank a GPU, against the golden of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import Filter, VocabShard, linear_cross_entropy, token_logprobs
from cce_dist.testing import (
    DTYPES,
    TRITON_CUDA,
    Case,
    check_outputs,
    gaussian_inputs,
    join_ranks,
    nccl_pool,
    run_case,
    zipf_inputs,
)
from tests.backends.screened_cases import WITH_STATS, check_stats, with_hits
from tests.support.loss_cases import generator

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.timeout(280)]
MODES = ("filtered", "exact", "in_forward")
WORLD_SIZES = (2, 4)
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2")


def run_ranks(case: Case, world_size: int) -> dict[str, Tensor]:
    return join_ranks(case, nccl_pool().run(world_size, run_case, case))


OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": ((), {"stats": ("lse",)}),
    "softcap": (("bias",), {"softcap": 1.5, "logit_scale": 0.7}),
    "none": ((), {"reduction": "none"}),
    "everything": (
        ("bias", "token_weight", "class_weight"),
        {"label_smoothing": 0.1, "z_loss": 0.01, "shift": 1, "stats": EVERY_STAT},
    ),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("gradient", MODES)
def test_each_option_over_nccl(gradient: str, option: str, world_size: int) -> None:
    tensors, options = OPTIONS[option]
    if gradient == "in_forward" and option == "none":
        pytest.skip("refused: the upstream gradient is not known in the forward")
    inputs = gaussian_inputs((4, 70), 1200, 64, generator=generator(), dtype=torch.float32)
    inputs = inputs.with_options(generator(), *tensors).ignoring(generator(), 0.3, -100)
    case = Case(inputs, {**options, "gradient": gradient}).at(TRITON_CUDA)
    check_outputs(case, run_ranks(case, world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("parallel", [False, True], ids=["replicated", "sequence_parallel"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("gradient", MODES)
def test_each_dtype_over_nccl(gradient: str, dtype: str, parallel: bool, world_size: int) -> None:
    inputs = zipf_inputs(512, 16384, 128, generator=generator(), dtype=DTYPES[dtype])
    options = {"gradient": gradient, "stats": ("lse",), "sequence_parallel": parallel}
    if gradient != "exact":  # the default's own error is test_loss_filter's matter
        options["filter"] = Filter(keep=1e-7)
    case = Case(inputs, options).at(TRITON_CUDA)
    outputs = run_ranks(case, world_size)
    check_outputs(case, outputs)
    again = run_ranks(case, world_size)
    for name, value in outputs.items():
        assert torch.equal(value, again[name]), f"{name} differs from run to run"


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("cut", [0, 7, 1199], ids=str)
def test_uneven_shards_over_nccl(cut: int, gradient: str) -> None:
    inputs = gaussian_inputs(140, 1200, 64, generator=generator(), dtype=torch.float32)
    options = {"gradient": gradient, "stats": ("lse", "tail_mass")}
    case = Case(inputs, options, bounds=((0, cut), (cut, 1200))).at(TRITON_CUDA)
    check_outputs(case, run_ranks(case, 2))


@pytest.mark.parametrize("gradient", MODES)
def test_main_grad_over_nccl(gradient: str) -> None:
    inputs = gaussian_inputs(140, 1200, 64, generator=generator(), dtype=torch.float32)
    # Rows of padding on the last rank.
    case = Case(inputs, {"gradient": gradient}, main_grad=True, vocab_size=1197).at(TRITON_CUDA)
    case = replace(case, inputs=replace(inputs, targets=inputs.targets % 1197))
    check_outputs(case, run_ranks(case, 2))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_screened_statistics_over_nccl(world_size: int) -> None:
    inputs = with_hits(zipf_inputs(512, 16384, 128, generator=generator(), dtype=torch.bfloat16))
    case = Case(inputs, WITH_STATS).at(TRITON_CUDA)
    check_stats(case, run_ranks(case, world_size))


def called_differently(group: dist.ProcessGroup) -> str:
    rank = dist.get_rank(group)
    hidden, weight = torch.ones(12, 8, device="cuda"), torch.ones(10, 8, device="cuda")
    targets = torch.arange(12, device="cuda")
    try:
        linear_cross_entropy(
            hidden,
            weight,
            targets,
            group=group,
            softcap=30.0 if rank else None,
            check_ranks=True,
        )
    except ValueError as error:
        return str(error)
    return "passed"


def test_check_ranks_over_nccl() -> None:
    for rank, message in enumerate(nccl_pool().run(2, called_differently)):
        assert "softcap by rank: [0] | [1]" in message, message
        assert f"This is rank {rank}" in message, message


def logprobs_on_a_rank(
    group: dist.ProcessGroup,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor | float,
):
    rank, rows = dist.get_rank(group), len(weight) // dist.get_world_size(group)
    mine = weight[rank * rows : (rank + 1) * rows].cuda().requires_grad_()
    leaf = hidden.cuda().requires_grad_()
    found = token_logprobs(
        leaf,
        mine,
        targets.cuda(),
        temperature=temperature.cuda() if isinstance(temperature, Tensor) else temperature,
        entropy=True,
        group=group,
        vocab_shard=VocabShard(rank * rows, (rank + 1) * rows, len(weight)),
    )
    assert found.entropy is not None
    (found.logprobs.sum() - 0.1 * found.entropy.sum()).backward()
    assert leaf.grad is not None and mine.grad is not None
    tensors = (found.logprobs.detach(), found.entropy.detach(), leaf.grad, mine.grad)
    return [tensor.cpu() for tensor in tensors]


TEMPERATURES = {"number": 0.7, "of_each": torch.linspace(0.3, 3, 140)}


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_token_logprobs_over_nccl(world_size: int, temperature: Tensor | float) -> None:
    inputs = gaussian_inputs(140, 1200, 64, generator=generator(), dtype=torch.float32)
    hidden, weight = inputs.hidden.double(), inputs.weight.double()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    divisor = torch.as_tensor(temperature).double().view(-1, 1)
    scores = (leaves[0] @ leaves[1].T / divisor).log_softmax(-1)
    logprobs = scores.gather(-1, inputs.targets[:, None])[:, 0]
    entropy = -(scores.exp() * scores).sum(-1)
    grads = torch.autograd.grad(logprobs.sum() - 0.1 * entropy.sum(), leaves)
    ranks = nccl_pool().run(
        world_size, logprobs_on_a_rank, inputs.hidden, inputs.weight, inputs.targets, temperature
    )
    for found in ranks:
        for name, value, first in zip(("logprobs", "entropy", "dE"), found, ranks[0], strict=False):
            assert torch.equal(value, first), f"{name} differs between ranks"
    joined = [*ranks[0][:3], torch.cat([found[3] for found in ranks])]
    for value, expected in zip(joined, (logprobs, entropy, *grads), strict=True):
        torch.testing.assert_close(value.double(), expected.detach(), rtol=2e-5, atol=2e-5)
