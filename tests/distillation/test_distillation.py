"""linear_distillation against dense softmaxes in float64: values, gradients, ranks, refusals."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import DistillationOutput, VocabShard, linear_distillation
from cce_dist.core.allocations import track_allocations
from cce_dist.reference import divergence_reference, reference_logits
from cce_dist.testing import DTYPES, RankError, shared_pool
from tests.support.head_cases import check_reduction, on_rank

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
TOKENS, CLASSES, PADDED, DIM, TEACHER_DIM = (4, 35), 700, 706, 24, 40
BETA = 0.3  # of "jsd"
OPTIONS: dict[str, Any] = {
    "temperature": 1.7,
    "alpha": 0.25,
    "softcap": 6.0,
    "teacher_logit_scale": 0.7,
    "shift": 1,
}
# Relative, in the Frobenius norm: float64, fp32, 16-bit operands whose d_logits are not rounded.
ERRORS = {"float64": 1e-13, "fp32": 2e-6, "bf16": 4e-3, "fp16": 1e-3}


@dataclass(frozen=True)
class Both:
    """A student's and a teacher's tensors."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor
    targets: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype, device: str = "cpu") -> Both:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        targets = torch.randint(CLASSES, TOKENS, generator=generator)
        targets[0, 3], targets[2, -1] = -100, -100
        return cls(
            randn(*TOKENS, DIM),
            randn(CLASSES, DIM),
            randn(CLASSES),
            randn(*TOKENS, TEACHER_DIM),
            0.5 * randn(PADDED, TEACHER_DIM),
            randn(PADDED),
            targets.to(device),
        )

    def few(self) -> Both:
        """The first tokens of each sequence, 24 in all, where their number is not what is tested: a
        kernel of tiles has a program for each, which Triton's interpreter runs after each other."""
        tokens = ("hidden", "teacher_hidden", "targets")
        return replace(self, **{name: getattr(self, name)[:, :6].contiguous() for name in tokens})

    def with_teacher_on(self, group: Any, rows: slice, split: bool) -> Both:
        """With a rank's rows of the teacher's head, and with `split` its part of the tokens."""
        hidden = self.teacher_hidden
        return replace(
            self,
            teacher_weight=self.teacher_weight[rows],
            teacher_bias=self.teacher_bias[rows],
            teacher_hidden=hidden.chunk(group.size())[group.rank()] if split else hidden,
        )

    def leaves(self) -> dict[str, Tensor]:
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}

    def run(self, leaves: dict[str, Tensor], **options: Any) -> Any:
        """Returns a DistillationOutput, or the loss alone with stats=()."""
        beta = {"beta": BETA} if options.get("divergence") == "jsd" else {}
        return linear_distillation(
            **leaves,
            teacher_hidden=self.teacher_hidden,
            teacher_weight=self.teacher_weight,
            teacher_bias=self.teacher_bias,
            targets=self.targets,
            **{**OPTIONS, **beta, "reduction": "none", "stats": ("divergence", "nll"), **options},
        )

    def dense(
        self, leaves: dict[str, Tensor], divergence: str, changes: dict[str, Any] | None = None
    ) -> DistillationOutput:
        """In float64, by the reference, with `changes` to the options."""
        options = {"teacher_softcap": None, **OPTIONS, **(changes or {})}
        shift = slice(None, self.hidden.shape[-2] - 1) if options["shift"] else slice(None)
        wide = {name: x.double() for name, x in leaves.items()}
        tensors = (wide["hidden"], wide["weight"], wide["bias"])
        z = reference_logits(*tensors, softcap=options["softcap"])[..., shift, :]
        y = reference_logits(
            self.teacher_hidden.double(),
            self.teacher_weight[: len(self.weight)].double(),
            self.teacher_bias[: len(self.weight)].double(),
            softcap=options["teacher_softcap"],
            logit_scale=options["teacher_logit_scale"],
        )[..., shift, :]
        targets = self.targets[..., options["shift"] :]
        counts, index = targets >= 0, targets.clamp_min(0)[..., None]
        nll = torch.where(counts, -z.log_softmax(-1).gather(-1, index)[..., 0], 0)
        T, alpha = options["temperature"], options["alpha"]
        value = divergence_reference(z / T, y / T, divergence, BETA)
        value = torch.where(counts, value, 0)
        return DistillationOutput((1 - alpha) * value + alpha * nll, value, nll)


def upstream_of(loss: Tensor) -> Tensor:
    return torch.linspace(-1, 2, loss.numel()).view(loss.shape).to(loss)


def error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name in ERRORS])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_values_and_gradients_are_those_of_dense_logits(divergence: str, dtype: str) -> None:
    both = Both.make(DTYPES[dtype])
    leaves, wide = both.leaves(), {n: x.double() for n, x in both.leaves().items()}
    wide = {name: x.detach().requires_grad_() for name, x in wide.items()}
    found, expected = both.run(leaves, divergence=divergence), both.dense(wide, divergence)
    for name in found._fields[:3]:
        # Logits of 16-bit operands are not rounded.
        assert error(getattr(found, name), getattr(expected, name)) < min(ERRORS[dtype], 2e-6), name
    (found.loss * upstream_of(found.loss)).sum().backward()
    (expected.loss * upstream_of(expected.loss)).sum().backward()
    for name, leaf in leaves.items():
        right = wide[name].grad
        assert leaf.grad is not None and right is not None
        assert error(leaf.grad, right) < ERRORS[dtype], name


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equal_softmaxes(divergence: str) -> None:
    """A shift of all logits changes nothing."""
    both = Both.make(torch.float64)
    hidden = both.hidden.clone().requires_grad_()
    given = (hidden, both.weight, both.hidden, both.weight)
    biases = {"bias": both.bias, "teacher_bias": both.bias + 30}
    loss = linear_distillation(*given, divergence=divergence, **biases, temperature=0.6)  # pyright: ignore
    assert isinstance(loss, Tensor)
    loss.backward()
    assert hidden.grad is not None
    assert abs(float(loss.detach())) < 1e-13
    # A sum of absolute values has no derivative where they are 0.
    assert divergence == "tvd" or float(hidden.grad.abs().max()) < 1e-14


@pytest.mark.parametrize("gradient", ["exact", "in_forward", "filtered"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "tvd"])
def test_sharp_softmaxes(divergence: str, gradient: Any) -> None:
    """Logits are of some hundreds and both softmaxes nearly one-hot. Each log-probability has the
    digits that a dense log_softmax in fp32 has. (Dense Jensen-Shannon's gradient is NaN there.)"""
    both = Both.make(torch.float32)
    generator, weight = torch.Generator().manual_seed(0), 20 * both.weight
    noise = torch.randn(weight.shape, generator=generator)
    teacher = {"teacher_hidden": both.hidden, "teacher_weight": weight + noise / 20}

    def dense(dtype: torch.dtype) -> list[Tensor]:
        x, c = (t.to(dtype).requires_grad_() for t in (both.hidden, weight.detach()))
        y = teacher["teacher_hidden"].to(dtype) @ teacher["teacher_weight"].to(dtype).T
        value = divergence_reference(x @ c.T, y, divergence, BETA)
        return [value, *torch.autograd.grad(value.mean(), [x, c])]

    x, c = (t.clone().requires_grad_() for t in (both.hidden, weight))
    options: dict[str, Any] = {"divergence": divergence, "stats": ("divergence",)}
    out = linear_distillation(x, c, **teacher, **options, gradient=gradient, backend="torch")
    assert isinstance(out, DistillationOutput) and out.divergence is not None
    ours = [out.divergence, *torch.autograd.grad(out.loss, [x, c])]
    golden, eager = dense(torch.float64), dense(torch.float32)
    for found, right, usual in zip(ours, golden, eager, strict=True):
        assert error(found, right) < 1.3 * error(usual, right)


def test_numbers_that_no_exponential_holds() -> None:
    """q underflows where p is large; the teacher masks ids."""
    weight, hidden = torch.eye(3), torch.tensor([[0.0, 500.0, 1.0], [0.0, 0.0, 0.0]])
    teacher_bias = torch.tensor([0.0, 0.0, -torch.inf])
    student = hidden.clone().requires_grad_()
    given = (student, weight, torch.zeros(2, 3), weight)
    for divergence in ("forward_kl", "jsd", "tvd"):
        loss = linear_distillation(
            *given, divergence=divergence, teacher_bias=teacher_bias, reduction="none"
        )
        z, y = hidden.double(), teacher_bias.double().expand(2, 3)
        expected = divergence_reference(z, y, divergence)
        torch.testing.assert_close(loss, expected.float(), rtol=1e-6, atol=1e-7)
        (grad,) = torch.autograd.grad(loss.sum(), student)  # pyright: ignore
        assert grad.isfinite().all()
    with torch.no_grad():
        loss = linear_distillation(*given, divergence="reverse_kl", teacher_bias=teacher_bias)
    assert loss == torch.inf


def test_a_tile_that_the_student_masks() -> None:
    both = Both.make(torch.float64)
    both.bias.fill_(-torch.inf)[-1] = 0
    tiles = {"workspace_bytes": 2**16, "softcap": None, "alpha": 0.0, "stats": ()}
    found = both.run(both.leaves(), **tiles)
    assert (found[both.targets[..., 1:] >= 0] == torch.inf).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_and_weights(reduction: Any) -> None:
    check_reduction(Both.make(torch.float64), reduction)


def test_without_targets_all_tokens_count() -> None:
    both = Both.make(torch.float64)
    given = (both.hidden, both.weight, both.teacher_hidden, both.teacher_weight)
    loss = linear_distillation(*given, reduction="none")
    z, y = both.hidden @ both.weight.T, both.teacher_hidden @ both.teacher_weight[:CLASSES].T
    torch.testing.assert_close(loss, divergence_reference(z, y, "forward_kl"))
    some = linear_distillation(*given, torch.full(TOKENS, -100))
    assert isinstance(some, Tensor) and not some.any()
    # A pad id that no target has.
    assert torch.equal(linear_distillation(*given, reduction="none", ignore_index=0), loss)  # pyright: ignore
    of_one = linear_distillation(both.hidden[0, 0], given[1], both.teacher_hidden[0, 0], given[3])
    torch.testing.assert_close(of_one, loss[0, 0])  # pyright: ignore


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_token_has_gradients_of_zero(divergence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both.make(torch.float64)
    both.targets.fill_(-100)
    full_of_nan = functools.partial(torch.full_like, fill_value=torch.nan)
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: full_of_nan(x))
    leaves = both.leaves()
    both.run(leaves, divergence=divergence).loss.sum().backward()
    assert not any(leaf.grad is None or leaf.grad.any() for leaf in leaves.values())


def test_autocast_casts_both_models() -> None:
    both, half = Both.make(torch.float32), Both.make(torch.bfloat16)
    leaves = {**both.leaves(), "hidden": half.hidden}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = replace(both, teacher_hidden=half.teacher_hidden).run(leaves)
    expected = half.run({**half.leaves(), "bias": both.bias})
    # Biases stay as they are.
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-2, atol=1e-2)
    found.loss.sum().backward()
    assert leaves["weight"].grad is not None and leaves["weight"].grad.dtype == torch.float32


def test_no_logits_are_allocated() -> None:
    tokens, classes = 512, 8192
    hidden = torch.randn(tokens, 16).requires_grad_()
    weight = torch.randn(classes, 16).requires_grad_()
    teacher = (torch.randn(tokens, 8), torch.randn(classes, 8))
    with track_allocations() as allocations:
        linear_distillation(hidden, weight, *teacher, workspace_bytes=2**20).backward()  # pyright: ignore
    assert allocations.largest_numel < tokens * classes / 8


# -- ranks --------------------------------------------------------------------------------------


def on_a_rank(group: Any, both: Both, cuts: tuple[int, ...], split: bool, how: str) -> Any:
    leaves, options, rows = on_rank(both.leaves(), group, cuts, split=split)
    found = both.with_teacher_on(group, rows, split).run(leaves, divergence=how, **options)
    (found.loss * upstream_of(found.loss)).sum().backward()
    values = tuple(x.detach() for x in found if x is not None)
    return values, {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("cuts", "split"),
    [((0, 350, CLASSES), True), ((0, 11, 11, CLASSES), False)],
    ids=["even_and_sequence_parallel", "ragged_with_an_empty_shard"],
)
def test_over_ranks(divergence: str, cuts: tuple[int, ...], split: bool) -> None:
    both = Both.make(torch.float64)
    ranks = shared_pool().run(len(cuts) - 1, on_a_rank, both, cuts, split, divergence)
    leaves = both.leaves()
    alone = both.run(leaves, divergence=divergence)
    (alone.loss * upstream_of(alone.loss)).sum().backward()
    for found, _ in ranks:
        for ours, first, expected in zip(found, ranks[0][0], alone[:3], strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    for name in ("weight", "bias"):
        joined = torch.cat([grads[name] for _, grads in ranks])
        torch.testing.assert_close(joined, leaves[name].grad, rtol=1e-11, atol=1e-12)
    hidden = [grads["hidden"] for _, grads in ranks]
    joined = torch.cat(hidden) if split else hidden[0]
    torch.testing.assert_close(joined, leaves["hidden"].grad, rtol=1e-11, atol=1e-12)


def whole_head(group: Any) -> None:
    both = Both.make(torch.float32)
    given = (both.hidden, both.weight, both.teacher_hidden, both.teacher_weight)
    linear_distillation(*given, both.targets, group=group, vocab_shard=VocabShard(0, 700, 700))


def test_ranks_that_do_not_tile_the_vocabulary() -> None:
    with pytest.raises(RankError, match="vocab_shard of the ranks must tile"):
        shared_pool().run(2, whole_head)


def of_a_padded_rank(group: Any) -> Tensor:
    # Megatron pads to a multiple of 128 rows a rank: here the second rank has padding alone.
    torch.manual_seed(0)
    shard = VocabShard.even(128, dist.get_rank(group), 2, 100)
    hidden, teacher_hidden, weight = (torch.randn(n, 8) for n in (5, 5, 256))
    rows = weight[shard.start : shard.start + 128]
    loss = linear_distillation(
        hidden, rows, teacher_hidden, rows, group=group, vocab_shard=shard, reduction="none"
    )
    logits = (x @ weight[:100].T for x in (hidden, teacher_hidden))
    torch.testing.assert_close(loss, divergence_reference(*logits, "forward_kl"))
    assert isinstance(loss, Tensor)
    return loss


def test_a_rank_of_padding_may_have_more_rows_than_the_vocabulary() -> None:
    first, second = shared_pool().run(2, of_a_padded_rank)
    assert torch.equal(first, second)


# -- what is refused ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "divergence": ({"divergence": "kl"}, "^divergence must be one of 'forward_kl', .* got 'kl'"),
    "beta": ({"beta": 1.0}, r"^beta must lie in \(0, 1\), got 1.0"),
    "beta of a KL": ({"beta": 0.3}, "^beta=0.3 has no effect with divergence='forward_kl'; use"),
    "temperature": ({"temperature": 0}, "^temperature must be > 0, got 0"),
    "scale": (
        {"temperature": 1e-40},
        "^logit_scale=1.0 / temperature=1e-40 must lie between 1e-30 and 1e.30 in size",
    ),
    "teacher's scale": (
        {"temperature": 1e20, "teacher_logit_scale": 1e-20},
        "^teacher_logit_scale=1e-20 / temperature=1e.20 must lie between",
    ),
    "teacher's softcap": (
        {"teacher_softcap": -1.0},
        "^teacher_softcap must be None or > 0, got -1.0",
    ),
    "alpha": ({"alpha": 1.5}, r"^alpha must lie in \[0, 1\], got 1.5"),
    "targets": ({"targets": None}, "^targets must be given with alpha=0.25, got None"),
    "nll": ({"alpha": 0.0}, '^stats "nll" needs alpha > 0, got alpha=0'),
    "stats": ({"stats": ("lse",)}, "^every entry of stats must be one of 'divergence', 'nll'"),
    "list": ({"teacher_hidden": [[0.0]]}, "^teacher_hidden must be a torch.Tensor, got <class"),
    "tokens": (
        {"teacher_hidden": torch.zeros(4, 34, TEACHER_DIM)},
        r"^teacher_hidden must be \[\.\.\., D_teacher\] with hidden's tokens \[4, 35\], got",
    ),
    "dims": (
        {"teacher_weight": torch.zeros(CLASSES, 3)},
        r"^teacher_weight must be \[V_local, D_teacher=40\], got \[700, 3\]",
    ),
    "rows": (
        {"teacher_weight": torch.zeros(CLASSES - 1, TEACHER_DIM)},
        "^teacher_weight must have the student's 700 classes .* got 699 rows",
    ),
    "dtype": (
        {"teacher_weight": torch.zeros(CLASSES, TEACHER_DIM).double()},
        "^teacher_weight must have teacher_hidden's dtype torch.float32, got torch.float64",
    ),
    "grad": (
        {"teacher_hidden": torch.zeros(*TOKENS, TEACHER_DIM, requires_grad=True)},
        "^teacher_hidden must not require grad",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    changes, rule = REFUSED[name]
    both = Both.make(torch.float32)
    tensors = {key: changes.pop(key) for key in list(changes) if hasattr(both, key)}
    with pytest.raises(ValueError, match=rule):
        replace(both, **tensors).run(both.leaves(), **changes)
