"""The recipes of docs/guide/options.md as they stand there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import (
    TokenSupport,
    VocabShard,
    largest_logits,
    linear_cross_entropy,
    token_logprobs,
)
from cce_dist.reference import Reference, linear_cross_entropy_reference, reference_logits
from cce_dist.testing import shared_pool
from tests.docs.recipe_cases import (
    BATCH,
    CLASSES,
    LENGTH,
    VARIANTS,
    close,
    dense,
    grads_of,
    head_of,
    made,
    recipes,
    section,
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_recipe(variant: str) -> None:
    recipe, _ = recipes("guide/options.md", "Log-probabilities")
    given, options = made(), {k: v for k, v in VARIANTS[variant].items() if k != "shift"}
    response, advantage = given["targets"] != -100, given["advantage"][:, 1:]
    head = head_of(given["weight"], None if variant == "plain" else given["bias"])
    names: dict[str, Any] = {
        "torch": torch,
        "token_logprobs": functools.partial(token_logprobs, **options),
        "hidden": given["hidden"].requires_grad_(),
        "head": head,
        "ids": given["targets"].clamp_min(0),
        "is_response": response,
        "before": torch.full((BATCH, LENGTH - 1), -4.0),
        "advantage": advantage,
    }
    exec(recipe, names)
    names["loss"].backward()

    def by(found: Reference) -> Tensor:
        ratio = (4.0 - found.nll).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -(gain * response[:, 1:]).sum() / response[:, 1:].sum()

    wanted, grads = dense(variant, by, shift=1, temperature=0.8)
    found = {"loss": names["loss"].detach(), "hidden": names["hidden"].grad, **grads_of(head)}
    close(found, {"loss": wanted, **grads})


@pytest.mark.parametrize("variant", VARIANTS)
def test_support_recipe(variant: str) -> None:
    _, recipe = recipes("guide/options.md", "Log-probabilities")
    given, options = made(), VARIANTS[variant]
    bias = None if variant == "plain" else given["bias"]
    ids = given["targets"].clamp_min(0)
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(BATCH, LENGTH, CLASSES, generator=generator) < 0.3
    # Some targets lie outside.
    allowed.scatter_(-1, ids[..., None], ids[..., None] % 4 > 0)
    flat = allowed.view(-1, CLASSES)
    others = torch.randint(CLASSES, (BATCH, LENGTH, 3), generator=generator)
    names: dict[str, Any] = {
        "TokenSupport": TokenSupport,
        "token_logprobs": functools.partial(token_logprobs, bias=bias, **options),
        "hidden": given["hidden"],
        "head": head_of(given["weight"], bias),
        "ids": ids,
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), flat.sum(1).cumsum(0)]),
        "allowed": flat.nonzero()[:, 1],
        "others": others,
    }
    exec(recipe, names)
    more = {"support": allowed, "candidates": others, **options}
    dense = linear_cross_entropy_reference(given["hidden"], given["weight"], ids, bias=bias, **more)
    found = {name: getattr(names["found"], name).detach() for name in ("logprobs", "candidates")}
    assert dense.candidates is not None
    for name, right in {"logprobs": -dense.nll, "candidates": dense.candidates}.items():
        torch.testing.assert_close(found[name], right)
    assert names["found"].outside == (dense.nll == torch.inf).sum() > 0


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("spares", [False, True], ids=["of_all", "spares_bias"])
def test_a_multiplier_before_bias_and_softcap(softcap: float | None, spares: bool) -> None:
    given, m = made(), 0.3
    hidden, weight, bias, targets = (given[n] for n in ("hidden", "weight", "bias", "targets"))
    x = m * (hidden @ weight.T) + (bias if spares else m * bias)
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    wanted = linear_cross_entropy_reference(hidden, weight, targets, logits=z).loss
    found = linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias / m if spares else bias,
        logit_scale=m,
        softcap=None if softcap is None else softcap / m,
    )
    assert isinstance(found, Tensor)
    close({"loss": found}, {"loss": wanted})


@pytest.mark.parametrize("shift", [0, 1], ids=["whole", "shifted"])
def test_a_bias_takes_a_class_out(shift: int) -> None:
    given = made()
    hidden, weight, bias, targets = (given[n] for n in ("hidden", "weight", "bias", "targets"))
    targets = targets.masked_fill(targets == CLASSES - 1, 0)
    bias[-1] = -torch.inf
    found = linear_cross_entropy(hidden, weight, targets, bias=bias, logit_scale=1.7, shift=shift)
    rest = {"bias": bias[:-1], "logit_scale": 1.7, "shift": shift}
    wanted = linear_cross_entropy_reference(hidden, weight[:-1], targets, **rest).loss  # pyright: ignore[reportArgumentType]
    assert isinstance(found, Tensor)
    close({"loss": found}, {"loss": wanted})
    # Under a softcap it is one more class, of the logit -softcap, as the table says.
    assert "but not under a softcap" in " ".join(section("guide/options.md", "Tensors").split())
    capped = linear_cross_entropy(hidden, weight, targets, bias=bias, softcap=2.0)
    logits = reference_logits(hidden, weight[:-1], bias[:-1], softcap=2.0)
    logits = torch.cat([logits, torch.full_like(logits[..., :1], -2.0)], -1)
    wanted = linear_cross_entropy_reference(hidden, weight, targets, logits=logits).loss
    assert isinstance(capped, Tensor)
    close({"loss": capped}, {"loss": wanted})


def largest_over_ranks(group: Any, variant: str) -> None:
    rank, given = dist.get_rank(group), made()
    options = {k: v for k, v in VARIANTS[variant].items() if k != "shift"}
    bias = None if variant == "plain" else given["bias"]
    shard = VocabShard.even(CLASSES // 2, rank, 2)
    rows = slice(shard.start, shard.stop)
    own = None if bias is None else bias[rows]
    found = largest_logits(given["hidden"], given["weight"][rows], bias=own, **options)
    every = [torch.empty_like(found.value) for _ in range(2)]
    ids = [torch.empty_like(found.index) for _ in range(2)]
    dist.all_gather(every, found.value, group=group)
    dist.all_gather(ids, found.index + shard.start, group=group)
    best = torch.stack(every).argmax(0)
    wanted = reference_logits(given["hidden"], given["weight"], bias, **options)
    assert torch.equal(torch.where(best == 0, *ids), wanted.argmax(-1))


@pytest.mark.parametrize("variant", ["plain", "bias", "capped"])
def test_largest_logits_over_ranks(variant: str) -> None:
    shared_pool().run(2, largest_over_ranks, variant)
