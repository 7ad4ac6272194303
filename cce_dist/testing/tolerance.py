"""The tolerance rule of the project: the largest error that a test accepts.

The golden is the reference in float64 on the inputs already rounded to the tested dtype, the
baseline the dense PyTorch recipe in that dtype. `check_promise` bounds any output, `check_gate` the
outputs in fp32, for which a bf16 baseline would leave room for a bug.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cce_dist.testing.cases import Case, dense_outputs, golden_outputs

# In float64 both sides round: another order of summation cannot agree to 1e-16.
CLOSE64 = 1e-11


def band(golden: Tensor, output_dtype: torch.dtype) -> float:
    """Returns the rounding of the largest golden value to the output's dtype."""
    largest = float(golden.abs().max()) if golden.numel() else 0.0
    return torch.finfo(output_dtype).eps * largest


def _errors(name: str, ours: Tensor, golden: Tensor) -> Tensor:
    """Returns |ours - golden| in float64; 0 where both hold the same infinity."""
    assert ours.shape == golden.shape, (
        f"{name}: shape {tuple(ours.shape)}, expected {tuple(golden.shape)}"
    )
    ours, golden = ours.double(), golden.double()
    same = ours == golden
    errors = torch.where(same, 0.0, (ours - golden).abs())
    bad = ~errors.isfinite()
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} values are not finite, first at {where}: "
            f"got {float(ours[tuple(where)])}, expected {float(golden[tuple(where)])}"
        )
    return errors


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.double().square().mean())) if values.numel() else 0.0


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _share(name: str, rule: str, got: float, bound: float, errors: Tensor, golden: Tensor) -> float:
    """Returns got / bound; raises AssertionError above 1."""
    if got <= bound:
        return got / bound if got else 0.0
    where = "-"
    if errors.numel():
        where = str([int(x) for x in torch.unravel_index(errors.argmax(), errors.shape)])
    raise AssertionError(
        f"{name}: {rule}: {got:.3e} > {bound:.3e} ({got / bound if bound else math.inf:.2f}x); "
        f"largest error {_largest(errors):.3e} at {where}, "
        f"golden rms {_rms(golden):.3e}, shape {tuple(golden.shape)}"
    )


def check_promise(
    name: str,
    ours: Tensor,
    golden: Tensor,
    baseline: Tensor,
    output_dtype: torch.dtype,
    *,
    noise: float = 0.0,
) -> float:
    """Checks max err <= 2 (baseline's max err + band) and rms err <= 1.5 (baseline's rms err).

    Args:
        noise: expected error of the baseline; the error of a single number may be 0 by luck.
    Returns: the larger of both errors over their bounds.
    Raises:
        AssertionError: the promise is broken, or a value is not finite where the golden is.
    """
    errors = _errors(name, ours, golden)
    theirs = _errors(f"{name} of the baseline", baseline, golden)
    bound = 2 * (_largest(theirs) + band(golden, output_dtype))
    largest = _share(name, "promise, max err", _largest(errors), bound, errors, golden)
    bound = 1.5 * max(_rms(theirs), noise)
    return max(largest, _share(name, "promise, rms err", _rms(errors), bound, errors, golden))


def check_gate(
    name: str,
    ours: Tensor,
    golden: Tensor,
    dense_fp32: Tensor,
    *,
    scale: Tensor | None = None,
    noise: float = 0.0,
) -> float:
    """Checks rms err <= 4 (rms err of dense with fp32 logits + 2^-24 rms golden).

    Args:
        scale: numbers whose rounding counts, if larger than the golden: an entropy near 0 is the
            difference of two numbers of lse's size.
        noise: expected error of the dense value; the error of a single number may be 0 by luck.
    Returns: the error over its bound.
    Raises:
        AssertionError: the error is above its bound, or a value is not finite where the golden is.
    """
    errors = _errors(name, ours, golden)
    theirs = max(_rms(_errors(f"{name} of dense fp32", dense_fp32, golden)), noise)
    size = _rms(golden) if scale is None else max(_rms(golden), _rms(scale))
    bound = 4 * (theirs + 2**-24 * size)
    return _share(name, "gate, rms err", _rms(errors), bound, errors, golden)


def check_close64(name: str, ours: Tensor, golden: Tensor, *, scale: Tensor | None = None) -> float:
    """Checks max err <= 1e-11 max|golden|, in float64.

    Args:
        scale: as for `check_gate`.
    Returns: the error over its bound.
    Raises:
        AssertionError: the error is above its bound, or a value is not finite where the golden is.
    """
    errors = _errors(name, ours, golden)
    size = _largest(golden.double().abs())
    if scale is not None:
        size = max(size, _largest(scale.double().abs()))
    return _share(name, "float64, max err", _largest(errors), CLOSE64 * size, errors, golden)


# Differences of large numbers: they round like the logits, whatever their own size.
_CANCELLING = ("entropy", "sum_p2", "mean_logit")


def check_outputs(
    case: Case, outputs: Mapping[str, Tensor], *, but: tuple[str, ...] = ()
) -> dict[str, float]:
    """Checks every output of `run_case` or `join_ranks`, except `but`, against its rule.

    Returns: by name of each output but `correct`: its error over the bound.
    Raises:
        AssertionError: an output misses its bound, is missing, or has the wrong dtype.
    """
    dtype = case.computed_dtype
    golden = golden_outputs(case)
    baseline = golden if dtype == torch.float64 else dense_outputs(case)
    dense32 = baseline if dtype.itemsize > 2 else dense_outputs(case, torch.float32)
    helpers = ("token_loss", "scale")
    missing = set(golden) - set(outputs) - set(helpers)
    assert not missing, f"missing outputs: {sorted(missing)}"
    shares: dict[str, float] = {}
    for name in golden:
        if name in helpers or name in but:
            continue
        ours = outputs[name]
        if name == "correct":
            assert ours.dtype == torch.bool, f"correct must be bool, got {ours.dtype}"
            assert torch.equal(ours, golden[name]), "correct differs from the golden"
            continue
        is_gradient = name.startswith("grad_")
        expected = _output_dtype(case, name)
        assert ours.dtype == expected, f"{name} must be {expected}, got {ours.dtype}"
        scale = golden["scale"] if name in _CANCELLING else None
        if dtype == torch.float64:
            shares[name] = check_close64(name, ours, golden[name], scale=scale)
            continue
        if dtype == torch.float32 or not is_gradient:
            noise = _sum_noise(golden, dense32) if name == "loss" else 0.0
            shares[name] = check_gate(
                name, ours, golden[name], dense32[name], scale=scale, noise=noise
            )
        if dtype != torch.float32 and (is_gradient or name in ("loss", "lse")):
            noise = _sum_noise(golden, baseline) if name == "loss" else 0.0
            share = check_promise(name, ours, golden[name], baseline[name], expected, noise=noise)
            shares[name] = max(share, shares.get(name, 0.0))
    return shares


def _output_dtype(case: Case, name: str) -> torch.dtype:
    wide = torch.promote_types(case.inputs.hidden.dtype, torch.float32)
    if not name.startswith("grad_") or (name == "grad_weight" and case.main_grad):
        return wide
    return getattr(case.inputs, name.removeprefix("grad_")).dtype


def _sum_noise(golden: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> float:
    """Returns the error of a sum (or mean) of token losses, if errors of tokens are independent."""
    errors = dense["token_loss"].double() - golden["token_loss"]
    if golden["loss"].ndim or not errors.numel():
        return 0.0
    total = float(golden["token_loss"].sum())
    denominator = total / float(golden["loss"]) if float(golden["loss"]) else 1.0
    return float(errors.square().sum().sqrt()) / abs(denominator)
