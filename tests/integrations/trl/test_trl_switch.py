"""The switch that gives TRL's function our loss, and takes it back."""

from __future__ import annotations

import importlib
import io
import logging
import sys
import warnings
from typing import Any

import pytest
import torch

import cce_dist.integrations
from cce_dist import Filter
from cce_dist.integrations import transformers
from cce_dist.integrations import trl as patch
from cce_dist.integrations.errors import PatchError
from tests.integrations.architectures import batch, make
from tests.integrations.trl.trl_cases import (
    inputs,
    results_of,
    without_a_trace,  # noqa: F401
)

with warnings.catch_warnings():
    # Of the packages, about one another, as they are imported.
    warnings.simplefilter("ignore")
    pytest.importorskip("trl")
    import trl
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils


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
