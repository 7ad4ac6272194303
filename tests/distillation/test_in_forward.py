"""gradient="in_forward": the loss and its gradients in one pass, by chunks of tokens."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, VocabShard, linear_distillation
from cce_dist.core.allocations import track_allocations
from cce_dist.distillation import in_forward
from cce_dist.testing import DTYPES, Place, nccl_pool, shared_pool
from tests.distillation.test_by_kernels import wide_leaves
from tests.distillation.test_distillation import CLASSES, DIVERGENCES, Both, error
from tests.distillation.test_tiles import GRADIENTS, JUMPS, VALUES, cases_of, on_a_rank

pytestmark = pytest.mark.usefixtures("loops")
# The upstream gradient of the loss.
UPSTREAM = 0.375
CALLS: dict[str, dict[str, Any]] = {
    "all": {"reduction": "sum"},
    "no cross-entropy": {"alpha": 0.0, "stats": ("divergence",), "temperature": 1.0},
    "no softcap": {"alpha": 0.0, "softcap": None, "stats": ("divergence",), "shift": 0},
}
TORCH = Place("torch", "cpu", ("fp32", "bf16"))
CASES = [
    *cases_of(CALLS),
    *(
        pytest.param(TORCH, dtype, "all", divergence, id=f"torch-{dtype}-{divergence}")
        for dtype in TORCH.dtypes
        for divergence in DIVERGENCES
    ),
]


def run(both: Both, leaves: dict[str, Tensor], **options: Any) -> Any:
    given = {"gradient": "in_forward", "reduction": "mean", **options}
    return both.run(leaves, **given)


def loss_of(each: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns the scalar loss of dense losses of each token."""
    counts = int((targets[..., options.get("shift", 1) :] >= 0).sum())
    return each.sum() if options.get("reduction") == "sum" else each.sum() / counts


def grads_of(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    grads = torch.autograd.grad(UPSTREAM * loss, list(leaves.values()), retain_graph=True)
    return dict(zip(leaves, grads, strict=True))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[slice]:
    """The chunks that were computed."""
    found: list[slice] = []
    add = in_forward._add_chunk

    def noted(pair: Any, at: slice, *rest: Any) -> None:
        found.append(at)
        add(pair, at, *rest)

    monkeypatch.setattr(in_forward, "_add_chunk", noted)
    return found


@pytest.mark.parametrize(("place", "dtype", "call", "divergence"), CASES)
def test_values_and_gradients_are_those_of_dense_logits(
    place: Place, dtype: str, divergence: str, call: str, chunks: list[slice]
) -> None:
    both, options = Both.make(DTYPES[dtype], place.device), CALLS[call]
    leaves, wide = both.leaves(), wide_leaves(both)
    # One block of tokens.
    found = run(
        both, leaves, divergence=divergence, workspace_bytes=2**16, **place.options, **options
    )
    assert [at.start for at in chunks] == list(range(0, 128 * len(chunks), 128))
    assert len(chunks) > 1
    expected = both.dense(wide, divergence, options)
    right_loss = loss_of(expected.loss, both.targets, options)
    assert found.loss.shape == () and error(found.loss, right_loss) < VALUES
    assert error(found.divergence, expected.divergence) < VALUES  # pyright: ignore
    assert found.nll is None or error(found.nll, expected.nll) < VALUES  # pyright: ignore
    ours, right = grads_of(found.loss, leaves), grads_of(right_loss, wide)
    limit = max(GRADIENTS[dtype], JUMPS if divergence == "tvd" else 0)
    for name, grad in ours.items():
        assert grad.dtype == leaves[name].dtype and error(grad, right[name]) < limit, name


def test_a_small_call_is_one_chunk(chunks: list[slice]) -> None:
    both = Both.make(torch.float32)
    run(both, both.leaves(), workspace_bytes=2**30, backend="triton")
    assert len(chunks) == 1


def test_a_second_backward_has_the_same_gradients(chunks: list[slice]) -> None:
    both = Both.make(torch.float32)
    leaves = both.leaves()
    loss = run(both, leaves).loss
    first, computed = grads_of(loss, leaves), len(chunks)
    assert computed == len(chunks)
    for name, grad in grads_of(loss, leaves).items():
        assert torch.equal(grad, first[name]), name
    assert len(chunks) == 2 * computed


@pytest.mark.parametrize("softcaps", [(None, None), (5.0, None), (None, 5.0), (5.0, 5.0)], ids=str)
def test_a_chunk_fits_the_workspace(softcaps: tuple[float | None, float | None]) -> None:
    both, room = Both.make(torch.float32), 1_300_000
    options = {"softcap": softcaps[0], "teacher_softcap": softcaps[1], "workspace_bytes": room}
    leaves = both.leaves()
    with torch.no_grad(), track_allocations() as allocations:
        run(both, leaves, backend="triton", **options)
    assert allocations.peak_bytes < room


@pytest.mark.parametrize("gradient", ["filtered", "exact", "in_forward"])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("logit", [50.0, 200.0])
def test_an_infinite_ratio_of_little_mass(logit: float, divergence: str, gradient: str) -> None:
    """One model masks an id. A later one, of the same lane of a tile's kernel, leaves it little
    mass in the other, or none."""
    student, teacher = torch.zeros(3000), torch.zeros(3000)
    near, far = (student, teacher) if divergence == "reverse_kl" else (teacher, student)
    far[5], near[5 + 9 * 256] = -torch.inf, logit
    tensors = [torch.zeros(rows, 16) for rows in (5, 3000, 5, 3000)]
    biases = {"bias": student, "teacher_bias": teacher, "divergence": divergence}
    found, expected = (
        linear_distillation(*tensors, **biases, **options)  # pyright: ignore
        for options in ({"gradient": gradient, "backend": "triton"}, {"backend": "torch"})
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


WRITTEN = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias")


@pytest.mark.parametrize("name", [*WRITTEN, "targets", "token_weight"])
@pytest.mark.parametrize("gradient", ["filtered", "exact", "in_forward"])
def test_a_write_to_an_argument_changes_no_gradient(gradient: str, name: str) -> None:
    """The second backward has the first one's gradients, or says why it cannot."""
    both = Both.make(torch.float32).few()
    both = replace(both, targets=both.targets.clamp_min(0))
    leaves, weights = both.leaves(), torch.ones(both.targets.shape)
    options = {"token_weight": weights, "shift": 0, "gradient": gradient, "backend": "triton"}
    loss = run(both, leaves, **options).loss
    first = grads_of(loss, leaves)
    arguments = {"token_weight": weights, **vars(both), **leaves}
    with torch.no_grad():
        arguments[name].mul_(3).clamp_(max=CLASSES - 1)
    try:
        second = grads_of(loss, leaves)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for key, grad in second.items():
        assert torch.equal(grad, first[key]), key


def test_gradients_that_nobody_needs() -> None:
    both = Both.make(torch.float32)
    leaves = both.leaves()
    right = grads_of(run(both, leaves).loss, leaves)
    for needed in ("hidden", "weight", "bias"):
        some = {name: x.detach().requires_grad_(name == needed) for name, x in leaves.items()}
        (grad,) = torch.autograd.grad(UPSTREAM * run(both, some).loss, some[needed])
        assert torch.equal(grad, right[needed]), needed
    with torch.no_grad():
        loss = run(both, leaves).loss
    assert not loss.requires_grad and torch.equal(loss, run(both, leaves).loss)


def test_no_token_counts() -> None:
    both = Both.make(torch.float32)
    both, leaves = replace(both, targets=torch.full_like(both.targets, -100)), both.leaves()
    loss = run(both, leaves).loss
    assert float(loss.detach()) == 0
    for name, grad in grads_of(loss, leaves).items():
        assert grad.shape == leaves[name].shape and not grad.any(), name


def test_padded_rows_have_no_gradient() -> None:
    both = Both.make(torch.float32)
    leaves = both.leaves()
    right = grads_of(run(both, leaves).loss, leaves)
    padded = {
        name: x if name == "hidden" else torch.cat([x, 7 * torch.ones_like(x[:5])])
        for name, x in leaves.items()
    }
    padded = {name: x.detach().requires_grad_() for name, x in padded.items()}
    found = grads_of(
        run(both, padded, vocab_shard=VocabShard(0, CLASSES + 5, CLASSES)).loss, padded
    )
    for name in ("weight", "bias"):
        assert torch.equal(found[name][:CLASSES], right[name]) and not found[name][CLASSES:].any()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_ranks(divergence: str, backend: str, split: bool) -> None:
    both = Both.make(torch.float32)
    options = {"divergence": divergence, "gradient": "in_forward", "backend": backend}
    options |= {"reduction": "mean", "workspace_bytes": 2**16}
    ranks = shared_pool().run(2, on_a_rank, both, split, options)
    check_ranks(both, divergence, ranks, split, GRADIENTS["fp32"])


def on_a_gpu(group: Any, both: Both, split: bool, options: dict[str, Any]) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    there = {field.name: getattr(both, field.name).to(device) for field in fields(both)}
    loss, grads = on_a_rank(group, replace(both, **there), split, options)
    return loss.cpu(), {name: grad.cpu() for name, grad in grads.items()}


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_two_gpus(divergence: str, split: bool) -> None:
    both = Both.make(torch.bfloat16)
    options = {"divergence": divergence, "gradient": "in_forward", "reduction": "mean"}
    ranks = nccl_pool().run(2, on_a_gpu, both, split, {**options, "workspace_bytes": 2**16})
    check_ranks(both, divergence, ranks, split, GRADIENTS["bf16"])


def check_ranks(both: Both, divergence: str, ranks: Any, split: bool, limit: float) -> None:
    wide = wide_leaves(both)
    expected = loss_of(both.dense(wide, divergence).loss, both.targets, {})
    # Of one number the ranks' function has an upstream gradient of -1.
    grads = torch.autograd.grad(-expected, list(wide.values()))
    right = dict(zip(wide, grads, strict=True))
    for loss, _ in ranks:
        assert torch.equal(loss, ranks[0][0]) and error(loss, expected) < VALUES
    for name in ("weight", "bias"):
        parts = torch.cat([grads[name] for _, grads in ranks])
        assert error(parts, right[name]) < limit, name
    hidden = [grads["hidden"] for _, grads in ranks]
    assert error(torch.cat(hidden) if split else hidden[0], right["hidden"]) < limit


def message_of(group: Any, both: Both, split: bool, options: dict[str, Any]) -> str:
    given = {"reduction": "mean", "backend": "triton", **options}
    try:
        on_a_rank(group, both, split, given)
    except ValueError as error:
        return str(error)
    return "no error"


def of_other_chunks(group: Any, both: Both) -> str:
    """Each rank bounds its workspace in its own way, so that the ranks' chunks differ."""
    room = 2 ** (16 + 14 * torch.distributed.get_rank(group))
    return message_of(group, both, False, {"gradient": "in_forward", "workspace_bytes": room})


def test_ranks_with_other_chunks_are_refused() -> None:
    for message in shared_pool().run(2, of_other_chunks, Both.make(torch.float32)):
        assert "needs one workspace_bytes on all ranks" in message
        assert message.endswith("by rank: [128, 256]")


def of_another_teacher(group: Any, both: Both, gradient: str, split: bool) -> str:
    """The teacher's hidden states are wider on one rank."""
    if torch.distributed.get_rank(group):
        wide = torch.cat([both.teacher_hidden] * 2, -1)
        both = replace(both, teacher_hidden=wide, teacher_weight=both.teacher_weight.repeat(1, 2))
    return message_of(group, both, split, {"gradient": gradient})


@pytest.mark.parametrize("gradient", ["filtered", "exact", "in_forward"])
def test_ranks_of_other_sizes_are_refused(gradient: str) -> None:
    """Before the first collective of sequence parallelism."""
    both = Both.make(torch.float32)
    for message in shared_pool().run(2, of_another_teacher, both, gradient, True):
        assert "must be called with tensors of the same sizes" in message


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no scalar": ({"reduction": "none"}, '^gradient="in_forward" .* must be a scalar, got'),
    "a filter": (
        {"filter": Filter(keep=0.01)},
        '^filter=Filter.*has no effect with gradient="in_forward".*use gradient="filtered"',
    ),
    "screened": ({"logits": "screened"}, "^logits='screened' of linear_distillation has no"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    changes, rule = REFUSED[name]
    both = Both.make(torch.float32)
    with pytest.raises(ValueError, match=rule):
        run(both, both.leaves(), divergence="forward_kl", **changes)


def test_every_column_by_name() -> None:
    """The loss's own way to say it."""
    both = Both.make(torch.float32)
    leaves = both.leaves()
    loss = run(both, leaves, filter=Filter(keep=0)).loss
    assert torch.equal(loss, run(both, leaves).loss)


def test_weights_of_tokens_have_no_gradient() -> None:
    both = Both.make(torch.float32)
    weights = torch.ones(both.targets.shape, requires_grad=True)
    with pytest.raises(ValueError, match=r'^token_weight .* with gradient="in_forward"'):
        run(both, both.leaves(), token_weight=weights)
    halves = torch.full(both.targets.shape, 0.5)
    found = run(both, both.leaves(), token_weight=halves).loss
    assert error(found, 0.5 * run(both, both.leaves()).loss.double()) < VALUES


@pytest.mark.parametrize("name", ["divergence", "nll"])
def test_values_of_tokens_have_no_gradient(name: str) -> None:
    both = Both.make(torch.float32)
    leaves = both.leaves()
    found = run(both, leaves)
    with pytest.raises(RuntimeError, match=f'^stats "{name}" cannot be differentiated with'):
        (found.loss + getattr(found, name).sum()).backward()


def of_all_or_no_rows(group: Any, both: Both) -> Any:
    rank = torch.distributed.get_rank(group)
    rows = VocabShard(0, CLASSES * rank, CLASSES)
    heads = ("weight", "bias", "teacher_weight", "teacher_bias")
    part = replace(both, **{name: getattr(both, name)[: rows.stop] for name in heads})
    leaves = part.leaves()
    found = run(part, leaves, group=group, vocab_shard=rows, backend="triton")
    return found.loss.detach(), grads_of(found.loss, leaves)


def test_a_rank_without_rows() -> None:
    both = Both.make(torch.float32).few()
    leaves = both.leaves()
    loss = run(both, leaves, backend="triton").loss
    right = grads_of(loss, leaves)
    (empty_loss, empty), (full_loss, full) = shared_pool().run(2, of_all_or_no_rows, both)
    assert torch.equal(empty_loss, full_loss) and error(full_loss, loss.double()) < VALUES
    assert empty["weight"].shape == (0, leaves["weight"].shape[1]) and empty["bias"].shape == (0,)
    for name, grad in full.items():
        assert error(grad, right[name].double()) < GRADIENTS["fp32"], name
    assert torch.equal(empty["hidden"], full["hidden"])
