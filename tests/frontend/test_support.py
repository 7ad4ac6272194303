"""`token_logprobs` under a support, and of candidates, against masked dense logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import TokenLogprobs, TokenSupport, token_logprobs
from cce_dist.testing import DTYPES, Place, grid
from tests.support.graphs import AOT_CHECKED
from tests.support.listed_cases import CLASSES, DIM, LEAVES, SHAPE, STATS, Listing

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0, "logit_scale": 0.7},
    "shift": {"shift": 1},
}
FIELDS = ("logprobs", "candidates", "entropy")


def compute(
    listing: Listing, leaves: dict[str, Tensor], *, supported: bool, **options: Any
) -> TokenLogprobs:
    # The whole softmax's entropy has no derivative by a temperature.
    temperature = leaves["temperature"] if supported else leaves["temperature"].detach()
    return token_logprobs(
        leaves["hidden"],
        leaves["weight"],
        options.pop("targets", listing.targets),
        bias=leaves["bias"],
        temperature=temperature,
        support=listing.support if supported else None,
        candidates=listing.candidates,
        stats=STATS,
        gradient="exact",
        **options,
    )


def objective(found: TokenLogprobs, usable: Tensor) -> Tensor:
    """Another weight of either sign for each number; none for what is -inf."""
    total = torch.zeros((), dtype=torch.float64)
    for name in FIELDS:
        values = getattr(found, name).double().cpu()
        at = usable if values.dim() == usable.dim() else usable[..., None]
        weights = torch.cos(torch.arange(values.numel()) * 0.7).double().view(values.shape)
        total = total + (weights * values).masked_fill(~(at & values.isfinite()), 0).sum()
    return total


def gradients(found: TokenLogprobs, usable: Tensor, leaves: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(objective(found, usable), list(leaves.values())))


def differentiated(leaves: dict[str, Tensor], supported: bool) -> dict[str, Tensor]:
    return {name: leaves[name] for name in LEAVES if supported or name != "temperature"}


@pytest.mark.parametrize(
    **grid(options=OPTIONS, supported=(True, False), dtype=("fp32", "bf16", "float64"))
)
def test_they_are_those_of_dense_logits(
    place: Place, options: dict[str, Any], supported: bool, dtype: str
) -> None:
    listing = Listing.make(DTYPES[dtype])
    golden_leaves = listing.to(torch.float64).leaves()
    shift, others = options.get("shift", 0), {k: v for k, v in options.items() if k != "shift"}
    golden = listing.dense(golden_leaves, supported=supported, shift=shift, options=others)
    there = listing.on(place.device)
    leaves = there.leaves()
    found = compute(there, leaves, supported=supported, **place.options, **options)
    usable = listing.usable(shift)
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == "float64" else {"rtol": 2e-4, "atol": 2e-4}
    for name in (*FIELDS, "sum_p2", "mean_logit", "correct"):
        ours, right = getattr(found, name).cpu(), getattr(golden, name)
        assert ours.shape[:2] == usable.shape
        torch.testing.assert_close(ours[usable], right[usable].to(ours.dtype), **close)
    counts = listing.targets[..., shift:] != -100
    assert not any(getattr(found, name).cpu()[~counts].any() for name in FIELDS)
    if supported:
        outside = (found.logprobs == -torch.inf).sum()
        assert found.outside is not None and int(found.outside) == int(outside) > 3
    by_ours = gradients(found, usable, differentiated(leaves, supported))
    by_dense = gradients(golden, usable, differentiated(golden_leaves, supported))
    for name, ours, right in zip(LEAVES, by_ours, by_dense, strict=False):
        error = float((ours.cpu().double() - right).norm() / right.norm())
        stored = torch.finfo(ours.dtype).eps
        assert error <= (1e-9 if dtype == "float64" else max(4e-4, stored)), (name, error)


def test_the_same_call_has_the_same_bits_and_ids_have_no_order() -> None:
    listing = Listing.make(torch.float64)
    leaves = listing.leaves()
    first = compute(listing, leaves, supported=True)
    again = compute(listing, leaves, supported=True)
    for name in TokenLogprobs._fields:
        if getattr(first, name) is not None:
            assert torch.equal(getattr(first, name), getattr(again, name)), name
    flat = listing.allowed.view(-1, CLASSES)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), flat.sum(1).cumsum(0)])
    rising = TokenSupport(offsets, flat.nonzero()[:, 1])
    other = token_logprobs(
        leaves["hidden"],
        leaves["weight"],
        listing.targets,
        bias=leaves["bias"],
        temperature=leaves["temperature"],
        support=rising,
    )
    torch.testing.assert_close(other.logprobs, first.logprobs, rtol=1e-12, atol=1e-12)


def test_a_support_of_everything_is_none() -> None:
    listing = replace(Listing.make(torch.float32), allowed=torch.ones(*SHAPE, CLASSES).bool())
    flat = torch.arange(CLASSES).flip(0).repeat(SHAPE[0] * SHAPE[1])
    everything = TokenSupport(torch.arange(SHAPE[0] * SHAPE[1] + 1) * CLASSES, flat)
    given = (listing.hidden, listing.weight, listing.targets)
    whole = token_logprobs(*given, stats=STATS)
    found = token_logprobs(*given, stats=STATS, support=everything)
    assert found.outside is not None and int(found.outside) == 0
    for name in (*STATS, "logprobs"):
        assert torch.equal(getattr(found, name), getattr(whole, name)), name
    # As many ids, of which two are the same: not everything.
    flat = flat.clone()
    flat[0] = flat[1]
    found = token_logprobs(*given, support=TokenSupport(everything.offsets, flat))
    assert not torch.equal(found.logprobs, whole.logprobs)


@pytest.mark.parametrize("repeated", [(0, 0, 3, 3), (0, 3, 3, 3)], ids=["same sum", "other sum"])
def test_as_many_repeated_ids_as_classes(repeated: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (3, 4))
    support = TokenSupport(torch.arange(4) * 4, torch.tensor(repeated).repeat(3))

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_logprobs(hidden, weight, torch.tensor([0, 3, 3]), support=support).logprobs

    listed = (hidden @ weight.T)[:, [0, 3]].log_softmax(-1)
    expected = listed.gather(1, torch.tensor([[0], [1], [1]]))[:, 0]
    torch.testing.assert_close(logprobs(hidden, weight), expected)
    # A graph does not wait for the ids.
    compiled = torch.compile(logprobs, fullgraph=True, backend=AOT_CHECKED)
    with pytest.raises(RuntimeError, match="must list each id once at each token"):
        compiled(hidden, weight)


@pytest.mark.parametrize(**grid())
def test_ids_whose_bias_is_minus_infinity(place: Place) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(place.device) for n in (3, 5))
    bias = torch.tensor([-torch.inf, 0.3, 0.0, -torch.inf, 0.0], device=place.device)
    temperature = torch.tensor([0.7, 1.3, 2.0], device=place.device)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias, temperature)]
    # The first token has no id of any probability, the second one's target has none.
    rows = torch.tensor([[0, 3, 0], [3, 1, 2], [0, 1, 4]], device=place.device)
    support = TokenSupport(torch.arange(4, device=place.device) * 3, rows.reshape(-1))
    targets = torch.tensor([3, 3, 4], device=place.device)
    found = token_logprobs(
        *(hidden, weight, targets),
        bias=bias,
        temperature=temperature,
        support=support,
        candidates=rows,
        stats=("entropy", "sum_p2", "correct"),
        top_k=2,
        **place.options,
    )
    logits = ((hidden @ weight.T + bias) / temperature[:, None]).gather(1, rows)
    expected = logits[1:].log_softmax(-1)
    assert found.outside is not None and int(found.outside) == 2
    assert found.logprobs[:2].tolist() == [-torch.inf] * 2
    torch.testing.assert_close(found.logprobs[2], expected[1, 2])
    assert found.candidates is not None and bool((found.candidates[0] == -torch.inf).all())
    torch.testing.assert_close(found.candidates[1:], expected)
    assert found.top_logprobs is not None and bool((found.top_logprobs[0] == -torch.inf).all())
    assert found.entropy is not None and not found.entropy.isnan().any() and found.entropy[0] == 0
    assert found.correct is not None and found.correct.tolist()[:2] == [False, False]
    ours = found.candidates.where(found.candidates.isfinite(), 0).sum() + found.logprobs[2]
    right = expected.where(expected.isfinite(), 0).sum() + expected[1, 2]
    grads = torch.autograd.grad(ours, leaves)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.isfinite().all(), leaf.shape
    golden = torch.autograd.grad(right, (hidden, weight, bias))
    for grad, other in zip(grads, golden, strict=False):
        torch.testing.assert_close(grad, other.nan_to_num(), rtol=1e-4, atol=1e-5)
    # Finite logits alone make the temperature's gradient.
    alone = [rows[1, 1:], rows[2, 1:]]
    parts = [
        ((hidden[i + 1] @ weight[ids].T + bias[ids]) / temperature[i + 1]).log_softmax(-1)
        for i, ids in enumerate(alone)
    ]
    (right_temperature,) = torch.autograd.grad(
        sum(x.sum() for x in parts) + parts[1][1], temperature
    )
    torch.testing.assert_close(grads[3], right_temperature, rtol=1e-4, atol=1e-5)


def test_candidates_of_other_strides_warn_of_nothing() -> None:
    listing = Listing.make(torch.float32)
    given = listing.hidden, listing.weight, listing.targets
    dims = listing.candidates.movedim(-1, 0).contiguous().movedim(0, -1)
    assert not dims.is_contiguous()
    found = token_logprobs(*given, support=listing.support, candidates=dims)
    other = token_logprobs(*given, support=listing.support, candidates=listing.candidates)
    assert found.candidates is not None and other.candidates is not None
    assert torch.equal(found.candidates, other.candidates)


def test_a_support_of_everything_has_the_entropys_derivative_by_temperature() -> None:
    listing = replace(Listing.make(torch.float64), allowed=torch.ones(*SHAPE, CLASSES).bool())
    tokens = SHAPE[0] * SHAPE[1]
    flat = torch.arange(CLASSES).repeat(tokens)
    everything = TokenSupport(torch.arange(tokens + 1) * CLASSES, flat)
    temperature = torch.rand(SHAPE, dtype=torch.float64).add_(0.5).requires_grad_()
    given = (listing.hidden, listing.weight, listing.targets.clamp(min=0))
    out = token_logprobs(*given, temperature=temperature, entropy=True, support=everything)
    assert out.entropy is not None
    (grad,) = torch.autograd.grad(out.entropy.sum() + out.logprobs.sum(), temperature)
    log_p = (listing.hidden @ listing.weight.T / temperature[..., None]).log_softmax(-1)
    picked = log_p.gather(-1, given[2][..., None]).sum()
    (expected,) = torch.autograd.grad(picked - (log_p.exp() * log_p).sum(), temperature)
    torch.testing.assert_close(grad, expected)


def test_a_single_token() -> None:
    listing = Listing.make(torch.float64)
    hidden, target = listing.hidden[0, 0], torch.tensor(2)
    ids = torch.tensor([1, 2, 5])
    out = token_logprobs(
        hidden, listing.weight, target, support=TokenSupport(torch.tensor([0, 3]), ids)
    )
    expected = (hidden @ listing.weight[ids].T).log_softmax(-1)[1]
    torch.testing.assert_close(out.logprobs, expected)


@pytest.mark.parametrize("supported", [True, False])
def test_tokens_left_out_are_not_read(supported: bool) -> None:
    listing = Listing.make(torch.float64)
    mask = torch.arange(SHAPE[1]).expand(SHAPE) % 3 > 0
    bad = replace(
        listing,
        hidden=listing.hidden.where(mask[..., None], torch.nan),
        temperature=listing.temperature.where(mask, torch.nan),
        candidates=listing.candidates.where(mask[..., None], -7),
    )
    leaves = bad.leaves()
    found = compute(bad, leaves, supported=supported, mask=mask)
    clean = compute(listing, listing.leaves(), supported=supported, mask=mask)
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(clean, name)), name
    usable = listing.usable(0) & mask
    for grad in gradients(found, usable, differentiated(leaves, supported)):
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("targets", [(0, 4), (2, 0), (3, 1)])
def test_nothing_to_compute(targets: tuple[int, int]) -> None:
    hidden = torch.ones(*targets, 8, requires_grad=True)
    weight = torch.ones(9, 8, requires_grad=True)
    ids = torch.zeros(targets, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    support = TokenSupport(torch.zeros(ids.numel() + 1, dtype=torch.int64), nothing)
    found = token_logprobs(
        hidden, weight, ids, support=support, candidates=ids[..., None][..., :0], shift=1
    )
    assert found.candidates is not None
    assert found.candidates.shape == (targets[0], max(targets[1] - 1, 0), 0)
    assert bool((found.logprobs == -torch.inf).all())
    for values in (found.logprobs, found.candidates):
        (grad,) = torch.autograd.grad(
            values.masked_fill(values == -torch.inf, 0).sum(), hidden, retain_graph=True
        )
        assert not grad.any()


@pytest.mark.parametrize("tokens", [0, 3])
def test_candidates_of_an_empty_support(tokens: int) -> None:
    """They are of the graph, as log-probabilities are: a batch without ids has a backward, too."""
    leaves = hidden, weight, bias = [
        torch.ones(n, requires_grad=True) for n in ((tokens, 8), (9, 8), 9)
    ]
    ids, nothing = torch.zeros(tokens, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    support = TokenSupport(torch.zeros(tokens + 1, dtype=torch.int64), nothing)
    found = token_logprobs(
        hidden, weight, ids[:, 0], bias=bias, support=support, candidates=ids
    ).candidates
    assert found is not None and found.shape == (tokens, 2)
    assert bool((found == -torch.inf).all())
    for grad in torch.autograd.grad(found.masked_fill(found == -torch.inf, 0).sum(), leaves):
        assert bool((grad == 0).all())


# -- what is refused ----------------------------------------------------------------------------

FOUR = torch.arange(5)
IDS = torch.arange(4)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no_support": ({"support": (FOUR, IDS)}, r"support must be a TokenSupport.*tuple"),
    "list": ({"support": TokenSupport([0, 4], IDS)}, r"support\.offsets must be a torch\.Tensor"),  # pyright: ignore[reportArgumentType]
    "int32": ({"support": TokenSupport(FOUR.int(), IDS)}, r"support\.offsets must be int64.*int32"),
    "dims": ({"support": TokenSupport(FOUR, IDS[None])}, r"support\.ids must have one dim.*1, 4"),
    "device": (
        {"support": TokenSupport(FOUR, IDS.to("meta"))},
        r"support\.ids must be on targets' device cpu, got meta",
    ),
    "tokens": (
        {"support": TokenSupport(FOUR[:4], IDS)},
        r"support\.offsets must have shape \[N \+ 1\] with N=4, the tokens of targets, got \[4\]",
    ),
    "falls": (
        {"support": TokenSupport(torch.tensor([0, 2, 1, 3, 4]), IDS)},
        r"support\.offsets must rise from 0 to the number of ids, 4, got \[0, 2, 1, 3, 4\]",
    ),
    "ends": (
        {"support": TokenSupport(FOUR, torch.arange(3))},
        r"support\.offsets must rise from 0 to the number of ids, 3, got \[0, 1, 2, 3, 4\]",
    ),
    "range": (
        {"support": TokenSupport(FOUR, IDS + 6)},
        r"support\.ids must lie in \[0, vocab_size=9\), got values from 6 to 9",
    ),
    "candidates_shape": (
        {"candidates": IDS},
        r"candidates must have targets' shape \[4\] and a last dim K, got \[4\]",
    ),
    "candidates_type": ({"candidates": IDS[:, None].int()}, r"candidates must be int64.*int32"),
    "candidates_range": (
        {"candidates": IDS[:, None] - 1},
        r"candidates must lie in \[0, vocab_size=9\), got values from -1 to 2",
    ),
    "top_k": ({"top_k": 0}, r"top_k must be an int in \[1, 128\], got 0"),
    "top_k_large": ({"top_k": 129}, r"top_k must be an int in \[1, 128\], got 129"),
    "top_k_bool": ({"top_k": True}, r"top_k must be an int in \[1, 128\], got True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    changed, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        token_logprobs(torch.ones(4, DIM), torch.ones(9, DIM), IDS, **changed)
