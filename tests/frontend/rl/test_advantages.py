"""Advantages of groups of answers, and log-probabilities of a policy and its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from cce_dist import TokenLogprobs, rl

DIM, CLASSES = 5, 9


@pytest.mark.parametrize("divide_by_std", [True, False], ids=["GRPO", "Dr. GRPO"])
def test_group_advantages(divide_by_std: bool) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5, 1e3 + 0.1, 1e3 + 0.1, 1e3 + 0.1], requires_grad=True)
    advantages = rl.group_advantages(rewards, 3, divide_by_std=divide_by_std)
    expected = torch.tensor([0.5, -0.5, 0.0]) / (0.5 + 1e-4 if divide_by_std else 1)
    torch.testing.assert_close(advantages[:3], expected)
    # fp32's mean of three equal rewards is not the reward.
    assert not advantages[3:].any()
    assert not advantages.requires_grad
    assert rl.group_advantages(torch.zeros(0), 2).shape == (0,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"rewards": torch.zeros(2, 2)}, r"rewards must have shape", id="shape"),
        pytest.param({"rewards": torch.zeros(4).int()}, r"rewards must have .*int32", id="dtype"),
        pytest.param({"rewards": [1.0]}, r"rewards must be a torch.Tensor", id="no tensor"),
        pytest.param({"group_size": 3}, r"group_size must .* rewards, 4, got 3", id="no divisor"),
        pytest.param({"group_size": 1}, r"group_size must be an int >= 2", id="of one"),
        pytest.param({"eps": 0.0}, r"eps must be > 0, got 0.0", id="eps"),
        pytest.param({"divide_by_std": 1}, r"divide_by_std must be True or False", id="bool"),
    ],
)
def test_group_advantages_refuse(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rl.group_advantages(**{"rewards": torch.zeros(4), "group_size": 2, **changed})


@pytest.mark.parametrize(
    "rewards", [[0.0, 600.0, 0.0, 600.0], [3e4, -4e4, 1.0, 2.0], [0.0, 2e-4, 0.0, 2e-4]]
)
def test_group_advantages_of_16_bits(rewards: list[float]) -> None:
    half = torch.tensor(rewards, dtype=torch.float16)
    advantages = rl.group_advantages(half, 4)
    assert advantages.dtype == torch.float16
    assert torch.equal(advantages, rl.group_advantages(half.double(), 4).half())


def test_two_model_logprobs() -> None:
    """A reference of another hidden size, number of rows, dtype, bias and softcap."""
    ids, mask = torch.randint(CLASSES, (2, 5)), torch.rand(2, 5) < 0.7
    policy = {
        "hidden": torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True),
        "weight": torch.randn(CLASSES, DIM, dtype=torch.float64),
        "entropy": True,
    }
    other = {
        "hidden": torch.randn(2, 5, DIM + 3, requires_grad=True),
        "weight": torch.randn(CLASSES + 2, DIM + 3),
        "bias": torch.randn(CLASSES + 2),
        "softcap": 2.0,
    }
    now, reference = rl.two_model_logprobs(policy, other, ids, mask=mask, shift=1, temperature=0.7)
    assert now.logprobs.requires_grad and now.entropy is not None
    assert not reference.requires_grad
    capped = 2 * torch.tanh((other["hidden"] @ other["weight"].T + other["bias"]) / 2)
    for ours, logits in (
        (now.logprobs, policy["hidden"] @ policy["weight"].T),
        (reference, capped),
    ):
        dense = (logits[:, :-1] / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(ours, torch.where(mask[:, 1:], dense, 0))
    result = rl.ppo_loss(
        now, now.logprobs.detach(), torch.ones(2), mask=mask[:, 1:], reference=reference
    )
    assert result.loss.isfinite()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param(
            {"policy": {"hidden": 0}}, "policy must be a mapping with hidden", id="weight"
        ),
        pytest.param({"reference": 0}, "reference must be a mapping .*int", id="no mapping"),
        pytest.param(
            {"reference": {"hidden": 0, "weight": 0, "shift": 1}},
            r"reference must not have what the models share, got \['shift'\]",
            id="shared",
        ),
    ],
)
def test_two_model_logprobs_refuse(changed: dict[str, Any], message: str) -> None:
    model = {"hidden": torch.zeros(1, 1, 2), "weight": torch.zeros(3, 2)}
    ids = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        rl.two_model_logprobs(**{"policy": model, "reference": model, "ids": ids, **changed})


def test_refuses_dtensors(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        zeros = torch.zeros(2, 2)
        there = DTensor.from_local(zeros, mesh, [Replicate()])
        plain = {"now": TokenLogprobs(zeros, None), "mask": zeros == 0, "reference": zeros}
        plain |= {"before": zeros, "advantages": zeros}
        for name in plain:
            value = TokenLogprobs(there, None) if name == "now" else there
            with pytest.raises(ValueError, match=rf"{name}.* must be a plain tensor.*to_local"):
                rl.grpo_loss(**{**plain, name: value})
        with pytest.raises(ValueError, match="rewards must be a plain tensor"):
            rl.group_advantages(there, 2)
    finally:
        dist.destroy_process_group()
