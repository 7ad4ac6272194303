"""Every refusal of linear_cross_entropy names the argument, the rule and what it got."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cce_dist import Filter, LinearCrossEntropy, VocabShard, linear_cross_entropy

N, V, D = 6, 20, 8


def arguments(**changed: Any) -> dict[str, Any]:
    made = {
        "hidden": torch.ones(N, D, requires_grad=True),
        "weight": torch.ones(V, D, requires_grad=True),
        "targets": torch.arange(N),
    }
    return {**made, **changed}


class Rows(torch.Tensor):
    """A tensor that holds another one, as torchao's quantised weights do."""

    def __new__(cls, inner: torch.Tensor) -> Rows:
        return cls._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, torch.Tensor], *others: Any) -> Rows:
        return Rows(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)

    def __repr__(self, **_: Any) -> str:
        return "Rows"


SHARED = torch.ones(V, D, requires_grad=True)
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden_list": ({"hidden": [[1.0] * D] * N}, r"hidden must be a torch.Tensor.*list"),
    "weight_module": (
        {"weight": torch.nn.Linear(D, V)},
        r"weight must be a torch.Tensor, got a module, Linear: .*weight=head\.weight and bias=head",
    ),
    "hidden_int": ({"hidden": torch.ones(N, D, dtype=torch.int64)}, r"hidden must be .*int64"),
    "hidden_bool": ({"hidden": torch.ones(N, D, dtype=torch.bool)}, r"hidden must be .*bool"),
    "hidden_complex": (
        {"hidden": torch.ones(N, D, dtype=torch.complex64)},
        r"hidden must be .*complex64",
    ),
    "hidden_scalar": ({"hidden": torch.tensor(1.0)}, r"hidden must have shape .*0 dims"),
    "hidden_without_channels": (
        {"hidden": torch.ones(N, 0), "weight": torch.ones(V, 0)},
        rf"hidden must have shape .*D >= 1.*\[{N}, 0\]",
    ),
    "hidden_without_values": (
        {name: arguments()[name].to("meta") for name in ("hidden", "weight", "targets")},
        r"hidden must hold values, got .*meta",
    ),
    "hidden_sparse": ({"hidden": torch.ones(N, D).to_sparse()}, r"hidden must be a dense .*sparse"),
    "hidden_nested": (
        {"hidden": torch.nested.nested_tensor([torch.ones(2, D)] * 2, layout=torch.jagged)},
        r"hidden must be a dense tensor, got a nested",
    ),
    "weight_sparse": ({"weight": torch.ones(V, D).to_sparse()}, r"weight must be a dense .*sparse"),
    "targets_sparse": (
        {"targets": torch.arange(N).to_sparse()},
        r"targets must be a dense .*sparse",
    ),
    "bias_sparse": ({"bias": torch.ones(V).to_sparse()}, r"bias must be a dense .*sparse"),
    "weight_without_rows": (
        {"weight": torch.ones(0, D)},
        rf"weight must have at least one row, got \[0, {D}\].*vocab_shard",
    ),
    "weight_none": ({"weight": None}, r"weight must be a torch.Tensor.*None"),
    "weight_dim": ({"weight": torch.ones(V, D + 1)}, rf"weight must .*D={D}.*\[{V}, {D + 1}\]"),
    "weight_transposed": ({"weight": torch.ones(D, V)}, rf"weight must .*\[{D}, {V}\]"),
    "weight_1d": ({"weight": torch.ones(D)}, r"weight must have shape \[V_local, D\]"),
    "weight_3d": ({"weight": torch.ones(1, V, D)}, r"weight must have shape \[V_local, D\]"),
    "dtypes_differ": (
        {"weight": torch.ones(V, D, dtype=torch.bfloat16)},
        r"weight must have hidden's dtype .*bfloat16.*autocast",
    ),
    "targets_list": ({"targets": [0] * N}, r"targets must be a torch.Tensor"),
    "targets_int32": (
        {"targets": torch.arange(N, dtype=torch.int32)},
        r"targets must be int64.*int32",
    ),
    "targets_float": ({"targets": torch.ones(N)}, r"targets must be int64.*float32.*long"),
    "targets_probabilities": (
        {"targets": torch.ones(N, V) / V},
        r"targets must be int64.*class probabilities are not supported.*class ids are",
    ),
    "targets_probabilities_flat": (
        {"hidden": torch.ones(2, N, D), "targets": torch.ones(2 * N, V) / V},
        r"targets must be int64.*class probabilities are not supported",
    ),
    "targets_one_hot": (
        {"targets": torch.ones(N, V, dtype=torch.int64)},
        rf"targets must have shape \[{N}\].*argmax\(-1\) of one-hot rows",
    ),
    **{
        f"weight_{dtype}".removeprefix("torch."): (
            {"weight": torch.ones(V, D).to(dtype)},
            rf"weight must be bf16, .*{dtype}: a quantised weight.*autocast does not cast it",
        )
        for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    },
    "hidden_float8": (
        {"hidden": torch.ones(N, D).to(torch.float8_e4m3fn)},
        r"hidden must be bf16, .*float8_e4m3fn: a quantised hidden is not supported",
    ),
    "weight_of_torchao": (
        {"weight": Rows(torch.ones(V, D))},
        r"weight must be a plain tensor or a DTensor, got .*Rows.*dequantise it",
    ),
    "weight_int64": (
        {"weight": torch.ones(V, D, dtype=torch.int64)},
        r"weight must be bf16, fp16, fp32 or float64, got torch.int64$",
    ),
    "weight_packed": (
        {"weight": torch.ones(V * D // 2, 1, dtype=torch.uint8)},
        r"a quantised weight is not supported",
    ),
    "weight_of_one_dim": (
        {"weight": torch.ones(V * D // 2)},
        rf"got \[{V * D // 2}\]; if FSDP has split.*within the.*summon_full_params.*unshard",
    ),
    "targets_long": (
        {"targets": torch.zeros(N + 1, dtype=torch.int64)},
        rf"targets must have shape \[{N}\].*\[{N + 1}\]",
    ),
    "targets_2d": (
        {"targets": torch.zeros(N, 1, dtype=torch.int64)},
        rf"targets must have shape \[{N}\].*\[{N}, 1\]",
    ),
    "bias_long": ({"bias": torch.ones(V + 1)}, rf"bias must have shape \[{V}\].*\[{V + 1}\]"),
    "bias_2d": ({"bias": torch.ones(1, V)}, r"bias must have shape"),
    "bias_int": ({"bias": torch.ones(V, dtype=torch.int64)}, r"bias must .*float.*int64"),
    "bias_list": ({"bias": [0.0] * V}, r"bias must be a torch.Tensor"),
    "token_weight_shape": (
        {"token_weight": torch.ones(N + 1)},
        rf"token_weight must have shape \[{N}\].*\[{N + 1}\]",
    ),
    "token_weight_int": (
        {"token_weight": torch.ones(N, dtype=torch.int64)},
        r"token_weight must .*float.*int64",
    ),
    "token_weight_grad_in_forward": (
        {"token_weight": torch.ones(N, requires_grad=True), "gradient": "in_forward"},
        r"token_weight must not require grad .*in_forward.*(filtered|exact)",
    ),
    "class_weight_shape": (
        {"class_weight": torch.ones(V - 1)},
        rf"class_weight must have shape \[{V}\].*\[{V - 1}\]",
    ),
    "class_weight_int": (
        {"class_weight": torch.ones(V, dtype=torch.int64)},
        r"class_weight must .*float.*int64",
    ),
    "class_weight_grad": (
        {"class_weight": torch.ones(V, requires_grad=True)},
        r"class_weight must not require grad.*detach",
    ),
    "main_grad_shape": (
        {"grad_weight_into": torch.zeros(V, D + 1)},
        rf"grad_weight_into must .*\[{V}, {D}\].*\[{V}, {D + 1}\]",
    ),
    "main_grad_dtype": (
        {"grad_weight_into": torch.zeros(V, D, dtype=torch.bfloat16)},
        r"grad_weight_into must be torch.float32.*bfloat16",
    ),
    "main_grad_dtype_of_float64": (
        {
            "hidden": torch.ones(N, D, dtype=torch.float64),
            "weight": torch.ones(V, D, dtype=torch.float64, requires_grad=True),
            "grad_weight_into": torch.zeros(V, D),
        },
        r"grad_weight_into must be torch.float64.*float32",
    ),
    "main_grad_frozen_weight": (
        {"weight": torch.ones(V, D), "grad_weight_into": torch.zeros(V, D)},
        r"grad_weight_into must be None .*weight does not require grad",
    ),
    "main_grad_requires_grad": (
        {"grad_weight_into": torch.zeros(V, D, requires_grad=True)},
        r"grad_weight_into must not require grad",
    ),
    "main_grad_expanded": (
        {"grad_weight_into": torch.zeros(1, D).expand(V, D)},
        r"grad_weight_into must have memory for each .*\[0, 1\]",
    ),
    "main_grad_overlaps_itself": (
        {"grad_weight_into": torch.zeros(V * D).as_strided((V, D), (D - 1, 1))},
        rf"grad_weight_into must have memory for each .*\[{D - 1}, 1\]",
    ),
    "main_grad_overlaps_the_weight": (
        {"weight": SHARED[:-1], "grad_weight_into": SHARED.detach()[1:]},
        r"grad_weight_into must have memory of its own, got that of weight",
    ),
    "main_grad_is_the_weight": (
        {"weight": SHARED, "grad_weight_into": SHARED.detach()},
        r"grad_weight_into must have memory of its own, got that of weight",
    ),
    "main_grad_list": ({"grad_weight_into": []}, r"grad_weight_into must be a torch.Tensor"),
    "other_device": (
        {"weight": torch.ones(V, D, device="meta")},
        r"weight must be on hidden's device cpu.*meta",
    ),
    "targets_on_other_device": (
        {"targets": torch.zeros(N, dtype=torch.int64, device="meta")},
        r"targets must be on hidden's device",
    ),
    "group_str": ({"group": "tp"}, r"group must be a ProcessGroup.*str"),
    "group_int": ({"group": 4}, r"group must be a ProcessGroup.*int"),
    "vocab_shard_tuple": ({"vocab_shard": (0, V)}, r"vocab_shard must be .*VocabShard.*tuple"),
    "vocab_shard_rows": (
        {"vocab_shard": VocabShard(0, V + 1, V + 1)},
        rf"weight must have vocab_shard's {V + 1} rows.*got {V}",
    ),
    "vocab_shard_part": (
        {"vocab_shard": VocabShard(0, V, V + 5)},
        rf"vocab_shard .*\[0, vocab_size={V + 5}\).*group",
    ),
    "vocab_shard_offset": (
        {"vocab_shard": VocabShard(5, V + 5, V + 5)},
        r"vocab_shard .*\[5, 25\).*group",
    ),
    "padded_target": (
        {"vocab_shard": VocabShard(0, V, N - 1)},
        rf"targets must lie in \[0, vocab_size={N - 1}\).*{N - 1}",
    ),
    "class_weight_of_padded_rows": (
        {"vocab_shard": VocabShard(0, V, V - 3), "class_weight": torch.ones(V)},
        rf"class_weight must have shape \[{V - 3}\].*\[{V}\]",
    ),
    "shift_without_tokens": (
        {"hidden": torch.ones(D), "targets": torch.tensor(1), "shift": 1},
        r"shift=1 goes along the last dim of targets.*\[\.\.\., T, D\]",
    ),
}

# Values of one option, and pairs that exclude each other.
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "reduction": ({"reduction": "avg"}, r"reduction must be one of 'mean', 'sum', 'none'.*'avg'"),
    "gradient": ({"gradient": "fast"}, r"gradient must be one of .*'exact'.*'fast'"),
    "backend": ({"backend": "cuda"}, r"backend must be one of .*'torch'.*'cuda'"),
    "reduction_array": ({"reduction": np.array(["mean", "sum"])}, r"reduction must be one of"),
    "sequence_parallel": (
        {"sequence_parallel": "no"},
        r"sequence_parallel must be True or False.*'no'",
    ),
    "ignore_index_large": ({"ignore_index": 2**63}, r"ignore_index must fit int64.*9223372036854"),
    "softcap_large": ({"softcap": 1e300}, r"softcap must lie between .*fp32.*1e\+300"),
    "softcap_integer": ({"softcap": 10**400}, r"softcap must be a finite number"),
    "logit_scale_large": ({"logit_scale": 1e39}, r"logit_scale must lie between .*fp32.*1e\+39"),
    "logit_scale_small": ({"logit_scale": -1e-40}, r"logit_scale must lie between .*fp32.*1e-40"),
    "z_loss_large": ({"z_loss": 1e39}, r"z_loss must be <= 1e\+30.*1e\+39"),
    "logits": ({"logits": "fp8"}, r"logits must be one of .*'fp8'"),
    "screened_exact": (
        {"logits": "screened", "gradient": "exact"},
        r"logits=\"screened\".*keeps every column.*logits=\"full\"",
    ),
    "stats_str": ({"stats": "lse"}, r"stats must be a tuple.*'lse'"),
    "stats_unknown": ({"stats": ("lse", "argmax")}, r"stats must be one of .*'argmax'"),
    "filter_type": ({"filter": 0.1}, r"filter must be a cce_dist.Filter.*0\.1"),
    "shift_negative": ({"shift": -1}, r"shift must be >= 0.*-1"),
    "shift_bool": ({"shift": True}, r"shift must be an int.*True"),
    "shift_float": ({"shift": 1.0}, r"shift must be an int.*1\.0"),
    "ignore_index": ({"ignore_index": None}, r"ignore_index must be an int.*None"),
    "softcap_zero": ({"softcap": 0.0}, r"softcap must be None or > 0.*0\.0"),
    "softcap_negative": ({"softcap": -1.0}, r"softcap must be None or > 0.*-1\.0"),
    "softcap_nan": ({"softcap": float("nan")}, r"softcap must be a finite number.*nan"),
    "logit_scale_inf": ({"logit_scale": float("inf")}, r"logit_scale must be a finite.*inf"),
    "logit_scale_none": ({"logit_scale": None}, r"logit_scale must be a finite.*None"),
    "smoothing_negative": ({"label_smoothing": -0.1}, r"label_smoothing must be >= 0.*-0\.1"),
    "smoothing_large": ({"label_smoothing": 1.5}, r"label_smoothing must lie in \[0, 1\].*1\.5"),
    "z_loss_negative": ({"z_loss": -1e-4}, r"z_loss must be >= 0"),
    "z_loss_nan": ({"z_loss": float("nan")}, r"z_loss must be a finite number"),
    "workspace_small": ({"workspace_bytes": 100}, r"workspace_bytes must be >= 65536.*100"),
    "workspace_float": ({"workspace_bytes": 1e8}, r"workspace_bytes must be an int"),
    "keep_logits_filtered": (
        {"keep_logits": True},
        r"keep_logits=True has no effect with gradient='filtered'.*exact",
    ),
    "keep_logits_int": ({"keep_logits": 1}, r"keep_logits must be True, False or None.*1"),
    "in_forward_none": (
        {"gradient": "in_forward", "reduction": "none"},
        r"gradient=\"in_forward\".*reduction=\"none\".*(filtered|exact)",
    ),
    "filter_of_exact": (
        {"gradient": "exact", "filter": Filter(keep=0.1)},
        r"filter=.*no effect.*gradient='exact'.*filtered",
    ),
    "draw_of_exact": (
        {"gradient": "exact", "filter": Filter(draw=False)},
        r"filter=.*draw=False.*no effect.*gradient='exact'.*filtered",
    ),
    "softcap_smoothing_filtered": (
        {"softcap": 2.0, "label_smoothing": 0.1},
        r"softcap=2\.0.*label_smoothing=0\.1.*(exact|in_forward)",
    ),
    "softcap_smoothing_in_forward_filter": (
        {
            "softcap": 2.0,
            "label_smoothing": 0.1,
            "gradient": "in_forward",
            "filter": Filter(keep=0.1),
        },
        r"softcap=2\.0.*label_smoothing=0\.1.*\"in_forward\" without a filter",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_linear_cross_entropy_refuses_tensors(case: str) -> None:
    changed, pattern = TENSORS[case]
    made = arguments(**changed)
    positional = [made.pop(name) for name in ("hidden", "weight", "targets")]
    with pytest.raises(ValueError, match=pattern):
        linear_cross_entropy(*positional, **made)


@pytest.mark.parametrize("case", OPTIONS)
def test_linear_cross_entropy_refuses_options(case: str) -> None:
    options, pattern = OPTIONS[case]
    made = arguments()
    with pytest.raises(ValueError, match=pattern):
        linear_cross_entropy(*made.values(), **options)


@pytest.mark.parametrize("case", OPTIONS)
def test_module_refuses_options_when_it_is_made(case: str) -> None:
    options, pattern = OPTIONS[case]
    with pytest.raises(ValueError, match=pattern):
        LinearCrossEntropy(**options)


def test_module_refuses_a_shard_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"vocab_shard must be a cce_dist.VocabShard or None"):
        LinearCrossEntropy(vocab_shard=(0, V))  # pyright: ignore[reportArgumentType]


def test_module_refuses_what_it_does_not_know() -> None:
    with pytest.raises((ValueError, TypeError), match="softcapp"):
        LinearCrossEntropy(softcapp=1.0)
    with pytest.raises((ValueError, TypeError), match="bias"):
        LinearCrossEntropy(bias=torch.ones(3))


@pytest.mark.parametrize("where", ["function", "module"])
def test_linear_cross_entropy_never_falls_back_from_triton(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # float64 is torch's alone, on any device; test_stats.py has the other reasons.
    double = {name: torch.ones(3, D, dtype=torch.float64) for name in ("hidden", "weight")}
    made = arguments(**double, targets=torch.arange(3))
    with pytest.raises(ValueError, match=r"backend=.?['\"]triton['\"].*torch"):
        if where == "function":
            linear_cross_entropy(*made.values(), backend="triton")
        else:
            LinearCrossEntropy(backend="triton")(*made.values())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton is not installed"):
        linear_cross_entropy(*made.values(), backend="triton")
    linear_cross_entropy(*made.values(), backend="auto")


def test_linear_cross_entropy_accepts_what_looks_like_an_error() -> None:
    made = arguments()
    # A group is not needed for sequence_parallel on one rank, nor a target for a last position.
    loss = linear_cross_entropy(*made.values(), sequence_parallel=True, shift=1, ignore_index=V)
    assert loss.ndim == 0
    frozen = arguments(weight=torch.ones(V, D), hidden=torch.ones(N, D))
    with torch.no_grad():
        linear_cross_entropy(*frozen.values(), grad_weight_into=torch.zeros(V, D))
    bf16 = arguments(weight=torch.ones(V, D, dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(*bf16.values())
