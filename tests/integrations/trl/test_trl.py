"""TRL's function with the loss, beside its own and float64."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, Screen, linear_cross_entropy
from cce_dist.integrations import trl as patch
from cce_dist.integrations.errors import PatchError
from tests.integrations.architectures import batch, make
from tests.integrations.trl.trl_cases import (
    ALL,
    FIELDS,
    N,
    V,
    assert_same,
    errors_of,
    in_float64,
    inputs,
    results_of,
    without_a_trace,  # noqa: F401
)

with warnings.catch_warnings():
    # Of the packages, about one another, as they are imported.
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from trl.trainer import utils


CASES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "scale before softcap": {"softcap": 3.0, "logit_scale": 1.75, "temperature": 1.3},
    "negative scale": {"softcap": 3.0, "logit_scale": -0.5, "temperature": 0.9},
    "entropy without gradient": {"entropy_weight": 0.0},
}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_function(case: str, bias: bool) -> None:
    tensors = inputs(bias=bias)
    theirs = results_of(tensors, **CASES[case])
    with patch.patched(gradient="exact"):
        ours = results_of(tensors, **CASES[case])
    golden = results_of(in_float64(tensors), golden=True, **CASES[case])
    assert_same(ours, golden)
    # Their own errors, and ours.
    assert_same(ours, theirs, 2e-6)
    for name, result in ours.items():
        assert result is None or result.dtype == theirs[name].dtype, name


def test_function_of_screened_logits() -> None:
    """Every output of TRL's: exact for columns that matter, of 8 bits for the others."""
    tensors = inputs(dtype=torch.bfloat16)
    golden = results_of(in_float64(tensors), golden=True)
    screen = Screen(max_kept=1.0, max_error=1.0)
    with patch.patched(filter=Filter(keep=1.0), logits="screened", screen=screen):
        ours = results_of(tensors)
    with patch.patched(filter=Filter(keep=1.0)):
        full = results_of(tensors)
    errors = errors_of(
        {name: ours[name] for name in FIELDS}, {name: golden[name] for name in FIELDS}
    )
    assert errors.pop("is_top1") == 0 and max(errors.values()) < 4e-3, errors
    assert not ours["entropy"].equal(full["entropy"])


def test_function_of_no_tokens() -> None:
    tensors = inputs(0)
    theirs = results_of(tensors)
    with patch.patched():
        ours = results_of(tensors)
    assert_same(ours, theirs)
    assert ours["grad_weight"].eq(0).all()


def test_function_of_equal_logits() -> None:
    """Of equal logits the first is the prediction."""
    tensors = inputs(4)
    for name in ("weight", "bias"):
        tensors[name][:] = tensors[name][7]
    tensors["targets"] = torch.tensor([0, 1, 7, V - 1])
    for golden in (False, True):
        top1 = results_of(tensors, golden=golden)["is_top1"]
        assert top1.tolist() == [True, False, False, False]
    with patch.patched():
        assert results_of(tensors)["is_top1"].equal(top1)


def test_function_computes_what_is_asked_for() -> None:
    for outputs in (("log_probs",), ("log_probs", "entropy"), ("is_top1",), ("log_sum_sq_probs",)):
        theirs = results_of(inputs(), outputs=outputs)
        with patch.patched(gradient="exact"):
            assert_same(results_of(inputs(), outputs=outputs), theirs, 2e-6)


def test_function_refuses() -> None:
    tensors = inputs()
    tensors["targets"][3] = V
    with patch.patched():
        with pytest.raises(ValueError, match=rf"targets must lie in \[0, vocab_size={V}\)"):
            results_of(tensors)
        with pytest.raises(PatchError, match=r"outputs \['entropy', .* of TRL, got \['margin'\]"):
            results_of(inputs(), outputs=("log_probs", "margin"))
        with pytest.raises(ValueError, match="logit_scale must not be 0"):
            results_of(inputs(), logit_scale=0.0)


def test_function_of_a_frozen_weight() -> None:
    tensors = inputs()
    for trained in ("hidden", "weight", "bias"):
        leaves = {n: x.clone().requires_grad_(n == trained) for n, x in tensors.items()}
        with patch.patched(gradient="exact"):
            out = utils._ChunkedLogProbFunction.apply(*leaves.values(), 1.0, 64)
        out[0].sum().backward()
        gradient, leaves[trained].grad = leaves[trained].grad, None
        out = utils._ChunkedLogProbFunction.apply(*leaves.values(), 1.0, 64)
        out[0].sum().backward()
        assert_same({"": gradient}, {"": leaves[trained].grad})
        assert all(x.grad is None for name, x in leaves.items() if name != trained)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "no autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_function_of_two_dtypes(dtype: torch.dtype, autocast: bool) -> None:
    """The weight takes hidden's dtype, or both autocast's; gradients have their leaf's."""
    tensors = inputs(dtype=dtype)
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    tensors["weight"] = inputs(dtype=other)["weight"]
    computed = torch.bfloat16 if autocast else dtype
    rounded = {n: x.to(computed) if n in ("hidden", "weight") else x for n, x in tensors.items()}
    golden = results_of(in_float64(rounded), golden=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        theirs = results_of(tensors)
        with patch.patched(gradient="exact"):
            ours = results_of(tensors)
    for name, result in ours.items():
        leaf = tensors.get(name.removeprefix("grad_"))
        assert result.dtype == (theirs[name] if leaf is None else leaf).dtype, name
    # Their logits are rounded to 16 bits, ours are not; gradients are, once.
    their_errors = errors_of(theirs, golden)
    for name, error in errors_of(ours, golden).items():
        assert error <= max(their_errors[name], 2.0**-9 if "grad" in name else 1e-6), name


def test_function_of_a_frozen_head_emptied_after_the_forward() -> None:
    """As DeepSpeed's ZeRO-3 does: the memory stays until the backward."""
    tensors = inputs()
    golden = results_of(in_float64(tensors), golden=True, entropy_weight=0)
    hidden, weight, bias, targets = tensors.values()
    head = [torch.nn.Parameter(x.clone(), requires_grad=False) for x in (weight, bias)]
    hidden.requires_grad_()
    with patch.patched(gradient="exact"):
        out = utils._ChunkedLogProbFunction.apply(hidden, *head, targets, 1.0, 64)
    for parameter in head:
        parameter.data = torch.empty(0)
    (out[0] * torch.arange(N).sub(5)).sum().backward()
    assert_same({"hidden": hidden.grad}, {"hidden": golden["grad_hidden"]})


# -- tokens that TRL ignores ----------------------------------------------------------------------


def results_of_model(labels: Tensor, compiled: bool = False) -> dict[str, Tensor]:
    """What the fused head returns, and the gradients of its loss and its entropy's sum."""
    model = make("llama", num_hidden_layers=1)
    utils.add_fused_lm_head(model, outputs=("log_probs", *ALL))
    forward = torch.compile(model, backend="eager") if compiled else model
    output = forward(input_ids=batch()["input_ids"], labels=labels, fused_lm_head=True)
    (output.loss + 0.1 * output.entropy.sum()).backward()
    results = {name: getattr(output, name) for name in ("loss", *FIELDS)}
    grads = {f"grad_{name}": x.grad for name, x in model.named_parameters()}
    return {name: x.detach() for name, x in {**results, **grads}.items() if x is not None}


def labels_of(case: str) -> Tensor:
    labels = batch()["input_ids"].clone()
    if case != "none ignored":
        labels[:, : None if case == "all ignored" else 5] = -100
    return labels


# Of torch's compiler, where its graph breaks: at TRL's mask, and at the tests' poisoned memory.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
# Compiled, TRL's own code meets each case once.
@pytest.mark.parametrize(
    ("case", "picks_rows", "compiled"),
    [
        *(
            (case, picks_rows, False)
            for case in ("some ignored", "none ignored", "all ignored")
            for picks_rows in (False, True)
        ),
        *(("some ignored", True, True), ("none ignored", False, True)),
        ("all ignored", True, True),
    ],
)
def test_ignored_tokens(
    case: str, picks_rows: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody picks rows, and the loss is told what is ignored; compiled, TRL does as ever."""
    monkeypatch.setattr(utils, "_use_triton", lambda device: picks_rows)
    labels, seen = labels_of(case), []
    theirs = results_of_model(labels)

    def spy(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        seen.append(targets)
        return linear_cross_entropy(hidden, weight, targets, **options)

    monkeypatch.setattr(patch, "linear_cross_entropy", spy)
    with patch.patched(gradient="exact"):
        ours = results_of_model(labels, compiled)
    assert_same(ours, theirs, 2e-6)
    counted = labels[:, 1:].reshape(-1)
    if compiled:
        counted = counted[counted != -100] if picks_rows else counted.clamp(min=0)
    assert seen[-1].equal(counted)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_the_host_does_not_wait() -> None:
    labels = labels_of("some ignored").cuda()
    model = make("llama").cuda()
    hidden = torch.randn(*labels.shape, 32, device="cuda", requires_grad=True)
    model.model.forward = lambda **_: BaseModelOutputWithPast(hidden)
    utils.add_fused_lm_head(model, outputs=("log_probs", *ALL))
    theirs = model(labels=labels, fused_lm_head=True)
    with patch.patched(gradient="exact"):
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                ours = model(labels=labels, fused_lm_head=True)
                ours.loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    for name in ("loss", "label_mask", *FIELDS):
        expected = getattr(theirs, name)
        torch.testing.assert_close(getattr(ours, name), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "change", ["no _use_triton", "another forward", "no source", "another caller"]
)
def test_another_forward_picks_its_rows(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of TRL 1.15 too, which always picks them."""

    def add_fused_lm_head() -> None:
        # The mask is that of the ignored tokens.
        def _fused_forward(labels: Tensor) -> None:
            mask = labels == -100
            compact = utils._use_triton(mask.device)
            labels = labels[mask] if compact else labels.clamp(min=0).reshape(-1)

        del _fused_forward

    def picks_rows(device: torch.device) -> bool:
        return True

    monkeypatch.setattr(utils, "_use_triton", picks_rows)
    if change == "no _use_triton":
        monkeypatch.delattr(utils, "_use_triton")
    if change == "another forward":
        monkeypatch.setattr(utils, "add_fused_lm_head", add_fused_lm_head)
    if change == "no source":
        monkeypatch.setattr(utils, "add_fused_lm_head", functools.partial(print))
    lines: list[str] = []
    monkeypatch.setattr(patch.logger, "info", lambda line, *args: lines.append(line % args))
    with patch.patched():
        if change != "no _use_triton":
            assert (utils._use_triton is picks_rows) == (change != "another caller")
            assert utils._use_triton(torch.device("cuda"))
        # As TRL's function is called by others, the targets are all that count.
        assert results_of(inputs(4))["log_probs"].ne(0).all()
    says = any("picks the rows of the tokens that count" in line for line in lines)
    assert says == (change != "another caller")
    assert getattr(utils, "_use_triton", picks_rows) is picks_rows
