"""TRL's function with the loss, beside its own and float64; the switch."""

from __future__ import annotations

import functools
import importlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cce_dist.integrations
from cce_dist import Filter, Screen, linear_cross_entropy
from cce_dist.integrations import transformers
from cce_dist.integrations import trl as patch
from cce_dist.integrations.errors import PatchError
from tests.integrations.architectures import batch, make

N, D, V = 37, 16, 301
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

with warnings.catch_warnings():
    # Of the packages, about one another, as they are imported.
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    import trl
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils


@pytest.fixture(autouse=True)
def without_a_trace() -> Iterator[None]:
    picks_rows = utils._use_triton
    yield
    patch.remove()
    assert utils._use_triton is picks_rows
    assert utils._ChunkedLogProbFunction is ChunkedLogProbFunction


def inputs(
    num_tokens: int = N, dtype: torch.dtype = torch.float32, bias: bool = True
) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(num_tokens, D, generator=generator).to(dtype),
        "weight": (0.6 * torch.randn(V, D, generator=generator)).to(dtype),
        "bias": torch.randn(V, generator=generator).to(dtype) if bias else None,
        "targets": torch.randint(V, (num_tokens,), generator=generator),
    }


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def results_of(
    tensors: dict[str, Tensor | None],
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: tuple[str, ...] = ALL,
    entropy_weight: float = 0.3,
    golden: bool = False,
) -> dict[str, Any]:
    """Outputs, and gradients of a sum with weights of both signs and 0.

    They are those of TRL's seam, or `golden`: of dense logits in float64.
    """
    leaves = {
        name: None if x is None else x.clone().requires_grad_(x.is_floating_point())
        for name, x in tensors.items()
    }
    options = (temperature, softcap, logit_scale)
    if golden:
        results = dense(*leaves.values(), *options)
    else:
        temperature, *others = options
        function = utils._ChunkedLogProbFunction
        named = function.apply(*leaves.values(), temperature, 64, *others, outputs)
        results = dict(zip(FIELDS, named, strict=True))
    upstream = torch.arange(len(results["log_probs"])).sub(5).float()
    total = (results["log_probs"] * upstream).sum()
    if results["entropy"] is not None and entropy_weight:
        total = total + entropy_weight * (results["entropy"] * upstream.flip(0)).sum()
    total.backward()
    for name, leaf in leaves.items():
        if leaf is not None and leaf.requires_grad:
            results[f"grad_{name}"] = leaf.grad
    return {name: None if x is None else x.detach() for name, x in results.items()}


def dense(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
) -> dict[str, Any]:
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    return {
        "log_probs": log_p.gather(1, targets[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == targets,
    }


def in_float64(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    doubled = ((name, x) for name, x in tensors.items())
    return {n: x.double() if x is not None and x.is_floating_point() else x for n, x in doubled}


def assert_same(ours: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Equal to `tolerance` of a result's largest value."""
    for name, errors in errors_of(ours, expected).items():
        assert errors <= tolerance, name


def errors_of(ours: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest errors, of each result as a share of its largest value."""
    assert ours.keys() == expected.keys()
    errors = {}
    for name, value in expected.items():
        assert (ours[name] is None) == (value is None), name
        if value is None:
            continue
        assert ours[name].shape == value.shape, name
        size = float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 1.0
        error = (ours[name].double() - value.double()).abs()
        errors[name] = float(error.max()) / max(size, 1e-3) if value.numel() else 0.0
    return errors


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
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("picks_rows", [False, True], ids=["every row", "picks rows"])
@pytest.mark.parametrize("case", ["some ignored", "none ignored", "all ignored"])
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


# -- the switch ------------------------------------------------------------------------------------


def test_apply_remove_status() -> None:
    assert patch.status() == patch.Status(None)
    on = patch.apply(gradient="exact", workspace_bytes=2**20)
    assert on.options is not None
    assert (on.options.gradient, on.options.workspace_bytes) == ("exact", 2**20)
    assert on.version == trl.__version__ and on.file == trl.__file__
    assert patch.apply(gradient="exact", workspace_bytes=2**20) == on
    with pytest.raises(PatchError, match=r"now with gradient='filtered', .*; call remove\(\)"):
        patch.apply()
    kept = utils._ChunkedLogProbFunction
    results_of(inputs())
    assert patch.status().calls == 1
    patch.remove()
    patch.remove()
    assert patch.status() == patch.Status(None)
    # Whoever has kept the object has TRL's function.
    out = kept.apply(*inputs().values(), 1.0, 64)
    assert out[0].equal(utils._ChunkedLogProbFunction.apply(*inputs().values(), 1.0, 64)[0])
    with pytest.raises(ZeroDivisionError), patch.patched(), patch.patched():
        raise ZeroDivisionError
    assert patch.status() == patch.Status(None)
    options = patch.apply().options
    with patch.patched():
        pass
    assert patch.status().options == options


def test_losses_of_tokens_are_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(patch.logger, "info", lambda line, *args: lines.append(line % args))
    with patch.patched():
        expected = results_of(inputs())
    with patch.patched(gradient="in_forward"):
        torch.testing.assert_close(results_of(inputs()), expected, rtol=0, atol=0)
    assert sum("gradient 'filtered'" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient": "exact", "z_loss": 1.0}, r"takes the options .*, got \['z_loss'\]"),
        ({"gradient": "exact", "logits": "screened"}, "screened.* needs a filter"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"gradient": "exact", "filter": Filter(keep=0.1)}, "filter=.* has no effect"),
    ],
    ids=["unknown", "screened", "backend", "filter"],
)
def test_apply_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch.apply(**options)
    assert patch.status() == patch.Status(None)


def test_apply_to_another_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str) -> None:
        with pytest.raises(PatchError, match=message):
            patch.apply()
        monkeypatch.undo()

    known = rf"TRL 1.15 and 1.16 are supported, and TRL {trl.__version__} is installed: "
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    refused(known + "it has no trl.trainer.utils._ChunkedLogProbFunction")
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", object())
    refused("_ChunkedLogProbFunction must be TRL's ChunkedLogProbFunction, got <object")
    monkeypatch.setattr(ChunkedLogProbFunction, "forward", lambda ctx, hidden: None)
    refused(known + r".* must have the arguments \(ctx hidden .* outputs\), got \(ctx hidden\)")
    monkeypatch.setattr(sys.modules["trl.kernels.chunked_logprob"], "OPTIONAL_OUTPUTS", ("x",))
    refused(known + r"its outputs must be \('entropy'.*, got \('x',\)")
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_logprob", None)
    refused(known)
    monkeypatch.setitem(sys.modules, "trl", None)
    refused("trl cannot be imported .*; TRL 1.15 and 1.16 are supported")


def test_first_loss_is_logged() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("cce_dist.integrations")
    logger.addHandler(handler)
    try:
        with patch.patched():
            assert lines == []
            results_of(inputs())
            results_of(inputs())
    finally:
        logger.removeHandler(handler)
    (line,) = lines
    for part in ("linear_cross_entropy", "filtered", "torch", "ChunkedLogProbFunction", "remove()"):
        assert part in line


def test_import_needs_no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, patch.__name__)
    monkeypatch.setattr(cce_dist.integrations, "trl", patch)  # put back at the end
    importlib.import_module(patch.__name__)


@pytest.mark.filterwarnings("ignore")
def test_a_patched_model_says_that_trl_has_a_loss_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (handler,) = logging.getLogger("cce_dist.integrations").handlers
    stream = io.StringIO()
    monkeypatch.setattr(handler, "stream", stream)
    model = make("llama")
    utils.add_fused_lm_head(model)
    stock = model(**batch(), fused_lm_head=True)
    with transformers.patched(model):
        for _ in range(2):
            output = model(**batch(), fused_lm_head=True)
        assert torch.equal(output.loss, stock.loss)
        assert stream.getvalue().count("LlamaForCausalLM: TRL's trainer computes its loss") == 1
    with patch.patched(), transformers.patched(model):
        output = model(**batch(), fused_lm_head=True)
        assert patch.status().calls == 1
    assert stream.getvalue().count("TRL's trainer") == 1
    torch.testing.assert_close(output.loss, stock.loss, atol=1e-6, rtol=1e-6)
