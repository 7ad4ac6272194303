"""Policy losses against loops over tokens, in float64, of dense logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import TokenLogprobs, TokenSupport, rl, token_logprobs
from tests.support.graphs import AOT_CHECKED

BATCH, LENGTH, DIM, CLASSES = 4, 6, 5, 9
INF, NAN = math.inf, math.nan


class Rollout:
    """Tokens, their models' hidden states and weights, and what a loss takes besides."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.hidden = torch.randn(BATCH, LENGTH, DIM, dtype=dtype, requires_grad=True)
        self.weight = torch.randn(CLASSES, DIM, dtype=dtype, requires_grad=True)
        self.ids = torch.randint(CLASSES, (BATCH, LENGTH))
        self.mask = torch.rand(BATCH, LENGTH) < 0.7
        self.mask[:, 0], self.mask[2] = True, False
        logprobs = self.now().logprobs.detach()
        # Far enough that ratios are clipped on both sides.
        self.before = self.off_mask(logprobs + 0.4 * torch.randn_like(logprobs))
        self.reference = self.off_mask(logprobs + torch.randn_like(logprobs))
        self.advantages = torch.tensor([1.5, -0.7, NAN, 0.9], dtype=dtype)
        self.of_tokens = self.off_mask(torch.randn_like(logprobs))

    def off_mask(self, values: Tensor) -> Tensor:
        """Puts NaN and -inf at tokens that do not count."""
        values = values.masked_fill(~self.mask, NAN)
        values[2, 1:3] = -INF
        return values

    def now(self) -> TokenLogprobs:
        return token_logprobs(
            self.hidden,
            self.weight,
            self.ids,
            mask=self.mask,
            stats=("entropy", "correct"),
            gradient="exact",
        )

    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight]

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropy, and whether the target has the largest logit."""
        logits = self.hidden @ self.weight.T
        every = logits.log_softmax(-1)
        chosen = every.gather(-1, self.ids[..., None])[..., 0]
        return chosen, -(every.exp() * every).sum(-1), logits.argmax(-1) == self.ids

    def expected(
        self,
        advantages: Tensor,
        low: float,
        high: float,
        *,
        of_sequences: bool,
        kl: str | None = None,
        kl_weight: float = 0.0,
        entropy_weight: float = 0.0,
    ) -> tuple[Tensor, dict[str, float]]:
        logprobs, entropy, correct = self.dense()
        rows: list[list[Tensor]] = []
        logged: dict[str, list[float]] = {
            name: []
            for name in ("ratio", "clipped", "kl_before", "kl_reference", "entropy", "accuracy")
        }
        for b in range(BATCH):
            row = []
            for t in range(LENGTH):
                if not self.mask[b, t]:
                    continue
                a = advantages[b] if advantages.dim() == 1 else advantages[b, t]
                ratio = (logprobs[b, t] - self.before[b, t]).exp()
                token = -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)
                log_r = self.reference[b, t] - logprobs[b, t]
                kinds = {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}
                if kl is not None:
                    token = token + kl_weight * kinds[kl]
                row.append(token - entropy_weight * entropy[b, t])
                r, sign = ratio.item(), a.item()
                logged["ratio"].append(r)
                logged["clipped"].append(
                    float((r > 1 + high and sign > 0) or (r < 1 - low and sign < 0))
                )
                logged["kl_before"].append(r - 1 - math.log(r))
                logged["kl_reference"].append(kinds["k3"].item())
                logged["entropy"].append(entropy[b, t].item())
                logged["accuracy"].append(correct[b, t].item())
            if row:
                rows.append(row)
        if of_sequences:
            loss = torch.stack([torch.stack(row).mean() for row in rows]).mean()
        else:
            loss = torch.stack([token for row in rows for token in row]).mean()
        return loss, {name: sum(values) / len(values) for name, values in logged.items()}


@pytest.fixture
def rollout() -> Rollout:
    return Rollout()


def check(rollout: Rollout, result: rl.PolicyLoss, expected: tuple[Tensor, dict[str, float]]):
    loss, logged = expected
    torch.testing.assert_close(result.loss, loss, rtol=1e-9, atol=1e-12)
    ours, dense = (torch.autograd.grad(each, rollout.leaves()) for each in (result.loss, loss))
    for each, other in zip(ours, dense, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-8, atol=1e-10)
    assert not ours[0][~rollout.mask].any()
    for name, value in logged.items():
        field = getattr(result, name)
        if field is not None:
            assert not field.requires_grad
            assert field.item() == pytest.approx(value, rel=1e-8), name
    assert result.num_tokens.item() == rollout.mask.sum().item()
    assert result.outside.item() == 0


@pytest.mark.parametrize("per_token", [False, True], ids=["per sequence", "per token"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_grpo_loss_and_ppo_loss(rollout: Rollout, name: str, kl: Any, per_token: bool) -> None:
    loss = {"grpo": rl.grpo_loss, "ppo": rl.ppo_loss}[name]
    advantages = rollout.of_tokens if per_token else rollout.advantages
    weights: dict[str, Any] = {"kl": kl, "kl_weight": 0.3, "entropy_weight": 0.2}
    result = loss(
        rollout.now(),
        rollout.before,
        advantages,
        mask=rollout.mask,
        reference=rollout.reference,
        **weights,
    )
    of_sequences = name == "grpo"
    expected = rollout.expected(advantages, 0.2, 0.2, of_sequences=of_sequences, **weights)
    assert 0 < expected[1]["clipped"] < 1
    check(rollout, result, expected)


def test_dapo_loss(rollout: Rollout) -> None:
    result = rl.dapo_loss(rollout.now(), rollout.before, rollout.advantages, mask=rollout.mask)
    assert result.kl_reference is None
    check(rollout, result, rollout.expected(rollout.advantages, 0.2, 0.28, of_sequences=False))


def test_a_reference_without_weight_is_logged_alone(rollout: Rollout) -> None:
    result = rl.ppo_loss(
        rollout.now(),
        rollout.before,
        rollout.advantages,
        mask=rollout.mask,
        clip=(0.1, 0.5),
        reference=rollout.reference,
    )
    assert result.kl_reference is not None
    check(rollout, result, rollout.expected(rollout.advantages, 0.1, 0.5, of_sequences=False))


def test_statistics_that_now_lacks_are_none() -> None:
    zeros = torch.zeros(2, 3)
    now = TokenLogprobs(zeros.requires_grad_(), None)
    result = rl.dapo_loss(now, zeros.detach(), torch.ones(2), mask=zeros == 0)
    assert result.entropy is result.accuracy is result.kl_reference is None
    assert (result.loss.item(), result.ratio.item(), result.clipped.item()) == (-1, 1, 0)
    # What one mean is of two microbatches: each loss by its share of the tokens.
    assert result.num_tokens.item() == 6


@pytest.mark.parametrize("shape", [(2, 3, 4), (5,)], ids=["[A, B, T]", "[T]"])
def test_any_shape(shape: tuple[int, ...]) -> None:
    now = TokenLogprobs(-torch.rand(shape, requires_grad=True), None)
    before, advantages = -torch.rand(shape), torch.randn(shape[:-1])
    mask = torch.ones(shape, dtype=torch.bool)
    result = rl.grpo_loss(now, before, advantages, mask=mask)
    flat = rl.grpo_loss(
        TokenLogprobs(now.logprobs.view(-1, shape[-1]), None),
        before.view(-1, shape[-1]),
        advantages.reshape(-1),
        mask=mask.view(-1, shape[-1]),
    )
    torch.testing.assert_close(result.loss, flat.loss)


@pytest.mark.parametrize("shape", [(3, 4), (3, 0), (0, 4)], ids=["masked", "T = 0", "B = 0"])
@pytest.mark.parametrize("loss", [rl.grpo_loss, rl.dapo_loss, rl.ppo_loss])
def test_no_token(loss: Callable[..., rl.PolicyLoss], shape: tuple[int, int]) -> None:
    logprobs = torch.full(shape, -1.0, requires_grad=True)
    nans, entropy = torch.full(shape, NAN), torch.ones(shape)
    now = TokenLogprobs(logprobs, entropy, correct=entropy > 0)
    result = loss(now, nans, nans, mask=torch.zeros(shape, dtype=torch.bool))
    for value in result:
        assert value is None or value.item() == 0
    (grad,) = torch.autograd.grad(result.loss, logprobs)
    assert not grad.any()


@pytest.mark.parametrize("where", ["now", "before", "reference"])
def test_minus_infinity_is_left_out(rollout: Rollout, where: str) -> None:
    """As if the token's mask were False: [1, 0] always counts, and the loss may have no NaN."""
    now = rollout.now()
    assert now.entropy is not None
    entropy = rollout.off_mask(now.entropy.detach())
    logprobs = now.logprobs.detach().clone()
    tensors = {"now": logprobs, "before": rollout.before, "reference": rollout.reference}
    tensors[where][1, 0] = -INF
    results = []
    for mask in (rollout.mask, rollout.mask.clone()):
        if results:
            mask[1, 0] = False
        leaf = logprobs.clone().requires_grad_()
        result = rl.grpo_loss(
            now._replace(logprobs=leaf, entropy=entropy),
            rollout.before,
            rollout.advantages,
            mask=mask,
            reference=rollout.reference,
            kl_weight=0.1,
            entropy_weight=0.1,
        )
        (grad,) = torch.autograd.grad(result.loss, leaf)
        assert result.loss.isfinite()
        assert grad[1, 0] == 0 and grad.isfinite().all()
        results.append((grad, *result._replace(outside=torch.zeros(()))))
        assert result.outside.item() == (len(results) == 1)
    for left_out, masked in zip(*results, strict=True):
        torch.testing.assert_close(left_out, masked, rtol=0, atol=0)


def test_a_target_outside_its_support() -> None:
    hidden = torch.randn(1, 2, DIM, requires_grad=True)
    ids = torch.tensor([[3, 4]])
    support = TokenSupport(torch.tensor([0, 2, 4]), torch.tensor([3, 5, 6, 7]))
    now = token_logprobs(hidden, torch.randn(CLASSES, DIM), ids, support=support)
    before, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    result = rl.grpo_loss(now, before, torch.ones(1), mask=mask)
    (grad,) = torch.autograd.grad(result.loss, hidden)
    assert now.logprobs[0, 1] == -INF
    assert (result.outside.item(), result.num_tokens.item()) == (1, 1)
    assert grad.isfinite().all() and not grad[0, 1].any() and result.loss.isfinite()


def test_an_infinite_ratio_without_gradient_makes_no_nan() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    before = torch.full((3,), -200.0)
    before[2] = 0
    advantages = torch.tensor([1.0, 0.0, -1.0])  # clipped; no advantage; ratio 1
    now, mask = TokenLogprobs(logprobs, None), torch.ones(3, dtype=torch.bool)
    result = rl.ppo_loss(now, before, advantages, mask=mask)
    (grad,) = torch.autograd.grad(result.loss, logprobs)
    assert result.loss.item() == pytest.approx((-1.2 + 1) / 3)
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, 1 / 3]))


def test_nothing_else_gets_a_gradient() -> None:
    others = [torch.rand(2, 3, requires_grad=True) for _ in range(3)]
    before, reference, advantages = others
    now = TokenLogprobs(torch.rand(2, 3, requires_grad=True), None)
    mask = torch.ones(2, 3, dtype=torch.bool)
    result = rl.grpo_loss(now, before, advantages, mask=mask, reference=reference, kl_weight=1)
    result.loss.backward()
    assert all(each.grad is None for each in others)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_gradients_of_the_estimators(kl: Any) -> None:
    """Averaged over all tokens by the policy's probabilities, as the docstring has them."""
    logits = torch.randn(CLASSES, dtype=torch.float64, requires_grad=True)
    other = torch.randn(CLASSES, dtype=torch.float64).log_softmax(0)
    p = logits.log_softmax(0)
    now = TokenLogprobs(p[:, None], None)
    average = torch.zeros(CLASSES, dtype=torch.float64)
    for token, weight in enumerate(p.detach().exp()):
        mask = (torch.arange(CLASSES) == token)[:, None]
        zeros = torch.zeros(CLASSES, dtype=torch.float64)
        result = rl.ppo_loss(
            now, p.detach()[:, None], zeros, mask=mask, reference=other[:, None], kl_weight=1, kl=kl
        )
        average += weight * torch.autograd.grad(result.loss, logits, retain_graph=True)[0]
    to_reference = (p.exp() * (p - other)).sum()
    from_reference = (other.exp() * (other - p)).sum()
    wanted = {"k1": 0 * to_reference, "k2": to_reference, "k3": from_reference}[kl]
    torch.testing.assert_close(average, torch.autograd.grad(wanted, logits)[0])


def test_grpo_loss_compiled() -> None:
    rollout = Rollout(torch.float32)

    def step(logprobs: Tensor, entropy: Tensor) -> rl.PolicyLoss:
        return rl.grpo_loss(
            TokenLogprobs(logprobs, entropy),
            rollout.before,
            rollout.advantages,
            mask=rollout.mask,
            reference=rollout.reference,
            kl_weight=0.1,
            entropy_weight=0.1,
        )

    now = rollout.now()
    assert now.entropy is not None
    leaves = [each.detach().requires_grad_() for each in (now.logprobs, now.entropy)]
    compiled = torch.compile(step, backend=AOT_CHECKED, fullgraph=True)(*leaves)
    eager = step(*leaves)
    torch.testing.assert_close(tuple(compiled), tuple(eager))
    grads = [torch.autograd.grad(each.loss, leaves) for each in (compiled, eager)]
    torch.testing.assert_close(*grads)


REFUSED = {
    "no TokenLogprobs": ({"now": torch.zeros(2, 3)}, "now must be a TokenLogprobs"),
    "no dim": ({"now": TokenLogprobs(torch.zeros(()), None)}, r"now.logprobs must have shape"),
    "no logprobs": (
        {"now": TokenLogprobs(None, None)},  # pyright: ignore[reportArgumentType]
        "now.logprobs must be a torch.Tensor, got <class 'NoneType'>",
    ),
    "logprobs' dtype": (
        {"now": TokenLogprobs(torch.zeros(2, 3, dtype=torch.int64), None)},
        "now.logprobs must have a float dtype, got torch.int64",
    ),
    # It would be broadcast.
    "entropy's shape": (
        {"now": TokenLogprobs(torch.zeros(2, 3), torch.zeros(2, 1))},
        r"now.entropy must have shape \[2, 3\] \(from now.logprobs\), got \[2, 1\]",
    ),
    "correct's shape": (
        {"now": TokenLogprobs(torch.zeros(2, 3), None, correct=torch.zeros(3) > 0)},
        r"now.correct must have shape \[2, 3\] .*got \[3\]",
    ),
    "correct's dtype": (
        {"now": TokenLogprobs(torch.zeros(2, 3), None, correct=torch.zeros(2, 3))},
        "now.correct must be a bool tensor, got torch.float32",
    ),
    "before's shape": (
        {"before": torch.zeros(2, 2)},
        r"before must have shape \[2, 3\] .*\[2, 2\]",
    ),
    "before's dtype": (
        {"before": torch.zeros(2, 3, dtype=torch.int64)},
        "before must have a float dtype, got torch.int64",
    ),
    "no tensor": ({"before": [0.0]}, "before must be a torch.Tensor"),
    "advantages' shape": (
        {"advantages": torch.zeros(3)},
        r"advantages must have shape \[2, 3\] or \[2\] .*got \[3\]",
    ),
    "advantages' dtype": (
        {"advantages": torch.zeros(2, dtype=torch.int64)},
        "advantages must have a float dtype",
    ),
    "mask's dtype": ({"mask": torch.ones(2, 3)}, "mask must be a bool tensor, got torch.float32"),
    "mask's shape": ({"mask": torch.ones(2, dtype=torch.bool)}, "mask must have shape"),
    "reference's shape": ({"reference": torch.zeros(2)}, "reference must have shape"),
    "device": ({"reference": torch.zeros(2, 3, device="meta")}, "reference must be on now's"),
    "clip": ({"clip": (0.1, 0.2, 0.3)}, r"clip must be a number or a pair \(low, high\)"),
    "clip's low": ({"clip": 1.5}, r"clip's low must be <= 1, .*got 1.5"),
    "clip below 0": ({"clip": (0.2, -0.1)}, "clip's high must be >= 0, got -0.1"),
    "clip's type": ({"clip": "0.2"}, "clip's low must be a finite number, got '0.2'"),
    "kl": ({"kl": "k4"}, "kl must be one of 'k1', 'k2', 'k3', got 'k4'"),
    "kl_weight": ({"kl_weight": -1.0}, "kl_weight must be >= 0, got -1.0"),
    "no reference": ({"kl_weight": 0.1}, "kl_weight must be 0 without a reference, got 0.1"),
    "entropy_weight": ({"entropy_weight": NAN}, "entropy_weight must be a finite number"),
    "no entropy": ({"entropy_weight": 0.1}, "entropy_weight must be 0 where now has no entropy"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("loss", [rl.grpo_loss, rl.ppo_loss])
def test_losses_refuse(loss: Callable[..., Any], changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "now": TokenLogprobs(torch.zeros(2, 3), None),
        "before": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        loss(**{**arguments, **changed})


def test_losses_of_16_bits_are_summed_wide() -> None:
    tokens = 80_000
    now = TokenLogprobs(torch.full((2, tokens), -1.0, dtype=torch.float16).requires_grad_(), None)
    before = torch.full((2, tokens), -1.003)
    mask = torch.ones(2, tokens, dtype=torch.bool)
    for loss in (rl.dapo_loss, rl.grpo_loss):
        result = loss(now, before, torch.ones(2), mask=mask, clip=[0.2, 0.28])  # pyright: ignore
        assert result.loss.dtype == torch.float32
        torch.testing.assert_close(result.loss, torch.tensor(-math.exp(0.003)), atol=1e-4, rtol=0)
        torch.testing.assert_close(result.ratio, -result.loss.detach(), atol=1e-6, rtol=0)
