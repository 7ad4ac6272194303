"""Every divergence with gradients of every column, by kernels that read tiles of both logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import VocabShard
from cce_dist.backends.triton.teacher import tiles
from cce_dist.backends.triton.teacher.tiles import COLUMNS, TileKernels
from cce_dist.core.stats import Stats, logaddexp_parts
from cce_dist.distillation.divergences import Divergences, Sums
from cce_dist.ranks.merge_header import NUM_DIGITS, digits_of, is_sound
from cce_dist.testing import DTYPES, TRITON_PLACES, Place, shared_pool
from tests.distillation.test_by_kernels import BY_PLACE, MARKS, gradients, wide_leaves
from tests.distillation.test_distillation import CLASSES, DIVERGENCES, Both, error

pytestmark = pytest.mark.usefixtures("loops")
# Relative: logits and sums are fp32, d_logits have the operands' digits.
VALUES = 3e-6
GRADIENTS = {"fp32": 4e-6, "fp16": 1e-3, "bf16": 4e-3}
# The gradient of "tvd" jumps where q = p. Rounding puts some logit on the other side: eager torch
# is off by 4e-6 to 9e-6 then, by the size of its tiles.
JUMPS = 1e-5
CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "no cross-entropy": {"alpha": 0.0, "stats": ("divergence",), "temperature": 1.0},
    "teacher's softcap": {"alpha": 0.0, "stats": (), "softcap": None, "teacher_softcap": 5.0},
    # Fourteen, the last narrower.
    "many tiles": {"workspace_bytes": 2**18},
}


def noted(names: list[str], name: str, call: Any) -> Any:
    def note(*args: Any) -> Any:
        names.append(name)
        return call(*args)

    return note


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched."""
    names: list[str] = []
    for name in ("add_sums", "add_terms", "gradient"):
        monkeypatch.setattr(TileKernels, name, noted(names, name, getattr(TileKernels, name)))
    return names


# In the interpreter each call has a divergence that takes a pass over the tiles, and one of two.
INTERPRETED = {
    **{"no cross-entropy": ("forward_kl", "tvd"), "teacher's softcap": ("reverse_kl", "jsd")},
    "no softcap": ("reverse_kl", "jsd"),
    "many tiles": ("forward_kl", "jsd"),
}


def cases_of(calls: Iterable[str]) -> list[Any]:
    """Of 16 bits one call does: what it rounds depends on no option."""
    return [
        pytest.param(
            *(*each.values, call, divergence),
            id=f"{each.id}-{call}-{divergence}",
            marks=each.marks,
        )
        for each in BY_PLACE
        for call in calls
        for divergence in DIVERGENCES
        if each.values[1] == "fp32" or call == "all"
        if not each.values[0].interprets or divergence in INTERPRETED.get(call, DIVERGENCES)
    ]


@pytest.mark.parametrize(("place", "dtype", "call", "divergence"), cases_of(CALLS))
def test_values_and_gradients_are_those_of_dense_logits(
    place: Place, dtype: str, divergence: str, call: str, used: list[str]
) -> None:
    both, options = Both.make(DTYPES[dtype], place.device), CALLS[call]
    if place.interprets and call != "many tiles":
        both = both.few()
    leaves, wide = both.leaves(), wide_leaves(both)
    run = {"divergence": divergence, "gradient": "exact", **place.options, **options}
    found = both.run(leaves, **run)
    loss = found if isinstance(found, Tensor) else found.loss
    expected = both.dense(wide, divergence, options)
    assert error(loss, expected.loss) < VALUES
    if not isinstance(found, Tensor):
        assert error(found.divergence, expected.divergence) < VALUES  # pyright: ignore
        assert found.nll is None or error(found.nll, expected.nll) < VALUES  # pyright: ignore
    ours, right = gradients(loss, leaves), gradients(expected.loss, wide)
    limit = max(GRADIENTS[dtype], JUMPS if divergence == "tvd" else 0)
    for name, grad in ours.items():
        assert error(grad, right[name]) < limit, name
    assert {"add_sums", "gradient"} <= set(used)
    assert ("add_terms" in used) is (divergence in ("jsd", "tvd"))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_masked_ids(divergence: str) -> None:
    """As in eager torch: a masked id of the teacher adds nothing, nor one of both models; a tile
    may have no other."""
    both = Both.make(torch.float32).few()
    both.teacher_bias[130:270] = -torch.inf
    if divergence != "reverse_kl":  # which is then infinite
        both.teacher_bias[5] = -torch.inf
    both.bias[130:270] = -torch.inf
    both.targets[(both.targets >= 130) & (both.targets < 270)] = 1
    options = {"divergence": divergence, "gradient": "exact", "workspace_bytes": 2**18}
    # A softcap would leave no logit at -inf.
    options |= {"softcap": None, "shift": 0}
    results = []
    for backend in ("torch", "triton"):
        leaves = both.leaves()
        found = both.run(leaves, backend=backend, **options)
        results.append((*found[:3], *gradients(found.loss, leaves).values()))
    for mine, right in zip(results[1], results[0], strict=True):
        assert not mine.isnan().any()
        assert error(mine, right.double()) < 1e-5


@pytest.mark.parametrize("columns", [256, COLUMNS])
@pytest.mark.parametrize(
    "place",
    [pytest.param(place, id=str(place), marks=MARKS[place.device]) for place in TRITON_PLACES],
)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_an_infinite_ratio_of_no_mass(
    divergence: str, place: Place, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One model masks an id. The other gives it a logit, which the next one of its lane makes too
    small for an exponential."""
    monkeypatch.setattr(tiles, "COLUMNS", columns)
    z, y = (torch.zeros(2, 4000, device=place.device) for _ in range(2))
    near, far = (y, z) if divergence == "forward_kl" else (z, y)
    far[:, 5], near[:, 5 + columns] = -torch.inf, 200.0
    sums = torch.empty(3, 2, device=place.device)
    TileKernels(divergence, 0.5, 1.0).add_sums(z, y, 0, sums, None)
    expected = Divergences(divergence, 0.5).sums(z, y)  # pyright: ignore[reportArgumentType]
    # Eager torch has sums in float64.
    torch.testing.assert_close(tuple(sums), tuple(x.to(sums.dtype) for x in expected))


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, id=str(place), marks=MARKS[place.device]) for place in TRITON_PLACES],
)
@pytest.mark.parametrize("has_targets", [False, True])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_merge_of_ranks_is_that_of_eager_torch(
    divergence: str, has_targets: bool, place: Place
) -> None:
    """Shards without columns, of infinite ratios, and of logits that overflow."""
    generator, eager = torch.Generator().manual_seed(0), Divergences(divergence, 0.3)  # pyright: ignore
    parts = 3 * torch.randn(4, 5 if has_targets else 3, 300, generator=generator)
    parts[1, :2], parts[1, 2:] = -torch.inf, 0.0
    parts[2, 2, :9] = torch.inf
    parts[3, 0, 5:20] = -torch.inf
    parts[:, 1, 7] = -torch.inf
    parts[0, 0, 40], parts[0, 1, 50], parts[0, 2, 60] = torch.inf, torch.nan, torch.nan
    # As behind the header of a rank's message: a rank's numbers are apart from those of the next.
    apart = torch.zeros(4, 9 + parts[0].numel(), device=place.device)[:, 9:].view_as(parts)
    kernels = TileKernels(divergence, 0.3, 1.0)
    merged = kernels.merge(apart.copy_(parts)).cpu()
    shards = [VocabShard(5 * rank, 5 * rank + 5, 20) for rank in range(4)]
    headers = [digits_of(shard, parts[0].numel()) for shard in shards]
    messages = [
        kernels.pack(part.to(place.device), None, header)
        for part, header in zip(parts, headers, strict=True)
    ]
    again, sound = kernels.merge_messages(torch.stack(messages), parts.shape[1])
    assert sound.item() == 1
    torch.testing.assert_close(again.cpu(), merged, equal_nan=True, rtol=0, atol=0)
    expected = [*eager.merge(Sums(*parts[:, :3].transpose(0, 1)), parts.dtype)]
    if eager.passes == 2:
        expected[2] = torch.zeros(300)  # not in use
    if has_targets:
        expected += [logaddexp_parts(parts[:, 3]), parts[:, 4].sum(0)]
    torch.testing.assert_close(merged, torch.stack(expected), equal_nan=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, id=str(place), marks=MARKS[place.device]) for place in TRITON_PLACES],
)
@pytest.mark.parametrize("fault", ["none", "length", "gap", "same rows", "same rows, no targets"])
def test_messages_that_do_not_belong_together(fault: str, place: Place) -> None:
    rows, kernels = 3 if "no" in fault else 5, TileKernels("jsd", 0.3, 1.0)
    sums = torch.randn(3, rows, 40, generator=torch.Generator().manual_seed(0)).to(place.device)
    if rows == 5:
        sums[1:, 4] = 0
    if "same rows" in fault:
        sums[:, : min(rows, 4)] = sums[0, : min(rows, 4)].clone()
    bounds = [(0, 5), (5 + (fault == "gap"), 9), (9, 14)]
    full = [torch.full((1,), float(rank), device=place.device) for rank in range(3)]
    messages = []
    for rank, (start, stop) in enumerate(bounds):
        length = sums[0].numel() + (fault == "length" and rank == 2)
        header = digits_of(VocabShard(start, stop, 14), length)
        messages.append(kernels.pack(sums[rank], full[rank], header))
    packed = torch.stack(messages)
    sound = kernels.merge_messages(packed, rows)[1].item()
    parts = packed[:, NUM_DIGITS + 1 :].view(sums.shape)
    targets = parts[:, 4] if rows == 5 else torch.zeros_like(parts[:, 0])
    stats = Stats(parts[:, 3 if rows == 5 else 0], targets)
    assert sound == is_sound(packed[:, :NUM_DIGITS], stats, None)
    assert sound == (fault in ("none", "same rows, no targets"))
    assert torch.equal(packed[:, NUM_DIGITS], torch.cat(full))


def test_each_value_alone_has_its_gradient() -> None:
    """The gradient of a sum is one number in memory, and no part of the other value's."""
    both = Both.make(torch.float32).few()
    both = replace(both, targets=both.targets.clamp_min(0))
    options = {"divergence": "jsd", "gradient": "exact", "shift": 0, "reduction": "sum"}
    for name in ("divergence", "nll"):
        results = []
        for backend in ("torch", "triton"):
            leaves = both.leaves()
            value = getattr(both.run(leaves, backend=backend, **options), name).sum()
            results.append(torch.autograd.grad(value, list(leaves.values())))
        for mine, right in zip(results[1], results[0], strict=True):
            assert error(mine, right.double()) < 1e-5, name


def test_models_with_little_mass_in_common() -> None:
    """Log ratios are some 40 nats. A gradient is the difference of a column's own log ratio to the
    mixture, which is below 1, and the mean: as exact as eager torch's, if both round alike."""
    generator, divergence = torch.Generator().manual_seed(0), Divergences("jsd", 0.3)
    z, y = (20 * torch.randn(64, 700, generator=generator) for _ in range(2))

    def eager(z: Tensor, y: Tensor) -> Tensor:
        sums = Sums(z.logsumexp(1), y.logsumexp(1), z.new_zeros(64))
        return divergence.derivative(z, y, sums, divergence.terms(z, y, sums)[1])

    kernels, lses = TileKernels("jsd", 0.3, 1.0), (z.logsumexp(1), y.logsumexp(1))
    terms = torch.empty(2, 64)
    kernels.add_terms(z, y, 0, lses, terms)
    of_loss = (*lses, terms[1], lses[0]), (torch.ones(64), None), 1.0, None, torch.float32
    found = kernels.gradient(z.clone(), y, None, 0, torch.zeros(64), *of_loss)
    right = eager(z.double(), y.double())
    assert error(found, right) < 1.5 * error(eager(z, y), right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_gradient_is_divided_and_rounded(divergence: str, dtype: torch.dtype) -> None:
    """As fp16 operands on a GPU are."""
    kernels, generator = TileKernels(divergence, 0.3, 1.7), torch.Generator().manual_seed(0)
    z, y, slope = (torch.randn(5, 37, generator=generator) for _ in range(3))
    targets = torch.tensor([16, -1, 52, 53, 3])
    lses = [(x / 1.7).logsumexp(1) for x in (z, y)]
    sums = (*lses, torch.linspace(0, 1, 5), z.logsumexp(1))
    upstream = 1e-5 * torch.rand(5, generator=generator), 1e-5 * torch.rand(5, generator=generator)
    tensors = (z, y, slope, 16, targets, sums, upstream, 0.7)
    scale = torch.tensor(2.0**-17)
    whole = kernels.gradient(z.clone(), *tensors[1:], None, torch.float32)
    divided = kernels.gradient(*tensors, scale, dtype)
    assert divided.dtype == dtype
    assert error(divided.double() * scale, whole.double()) < (1e-6 if dtype.itemsize == 4 else 1e-3)


def on_a_rank(group: Any, both: Both, split: bool, options: dict[str, Any]) -> Any:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    start, stop = rank * CLASSES // size, (rank + 1) * CLASSES // size
    heads = ("weight", "bias", "teacher_weight", "teacher_bias")
    part = replace(both, **{name: getattr(both, name)[start:stop] for name in heads})
    if split:
        tokens = slice(rank * len(both.hidden) // size, (rank + 1) * len(both.hidden) // size)
        split_up = {name: getattr(both, name)[tokens] for name in ("hidden", "teacher_hidden")}
        part = replace(part, **split_up)
    leaves = part.leaves()
    where = {"group": group, "vocab_shard": VocabShard(start, stop, CLASSES)}
    found = part.run(leaves, sequence_parallel=split, **where, **options)
    return found.loss.detach(), gradients(found.loss, leaves)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_ranks(divergence: str, split: bool) -> None:
    both = Both.make(torch.float32).few()
    options = {"divergence": divergence, "gradient": "exact", "backend": "triton"}
    ranks = shared_pool().run(2, on_a_rank, both, split, options)
    wide = wide_leaves(both)
    expected = both.dense(wide, divergence).loss
    right = gradients(expected, wide)
    for loss, _ in ranks:
        assert torch.equal(loss, ranks[0][0]) and error(loss, expected) < VALUES
    for name in ("weight", "bias"):
        parts = torch.cat([grads[name] for _, grads in ranks])
        assert error(parts, right[name]) < GRADIENTS["fp32"], name
    hidden = [grads["hidden"] for _, grads in ranks]
    assert error(torch.cat(hidden) if split else hidden[0], right["hidden"]) < GRADIENTS["fp32"]


def test_float64_is_refused() -> None:
    both = Both.make(torch.float64)
    with pytest.raises(ValueError, match=r'backend="triton" .* needs a teacher in bf16, fp16 or'):
        both.run(both.leaves(), gradient="exact", backend="triton")
    narrow = {"teacher_hidden": both.teacher_hidden.float()}
    narrow |= {"teacher_weight": both.teacher_weight.float()}
    with pytest.raises(ValueError, match=r'backend="triton" cannot run here: .*float64'):
        replace(both, **narrow).run(both.leaves(), gradient="exact", backend="triton")
