"""Hopper's own kernels: they compile everywhere, run where they can, and agree with the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, Screen, linear_cross_entropy
from cce_dist.testing import zipf_inputs
from tests.backends.triton.kernels.test_compiles import compiling

triton = pytest.importorskip("triton")

from cce_dist.backends.triton.backward import exact as backward_exact  # noqa: E402
from cce_dist.backends.triton.forward import hopper as forward_hopper  # noqa: E402
from cce_dist.backends.triton.forward import state as forward_state  # noqa: E402
from cce_dist.backends.triton.launch import replay  # noqa: E402

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from compile_jobs import skip_late_stages
from cce_dist.backends.triton.kernels.forward.hopper import hopper_forward_kernel
from cce_dist.backends.triton.kernels.forward.hopper_logits import hopper_logits_kernel
from cce_dist.backends.triton.kernels.teacher.hopper import hopper_teacher_kernel

skip_late_stages()
TYPES = {
    "bias": "bf16", "column": "fp32", "token": "fp32", "count": "i32", "shape": "i32",
    "lower": "fp32", "state": "fp32", "mass": "bf16", "extras": "fp32", "key": "i64",
    "logit": "fp16", "kept_ref": "fp32", "teacher": "fp32", "teacher_lower": "fp32",
    "teacher_bias": "bf16", "teacher_mass": "bf16",
}
STATISTICS = ("SURPLUS", "SQUARES", "ARGMAX", "MOMENTS")
# Each flag once and once not; test_compiles.py compiles the plain ones, bf16 with a softcap and a
# filter, and two heads of which one is in i8.
KINDS = {
    "bf16 with statistics": (gl.bfloat16, False, False),
    "i8": (gl.int8, True, False),
    "i8 with a large softcap and statistics": (gl.int8, True, True),
    "bf16 whose logits are kept": (gl.bfloat16, False, True),
    "bf16 of two heads, and of their mixture": (gl.bfloat16, True, True),
}
for kind, (dtype, score, softcap) in KINDS.items():
    dims = 1024 // dtype.primitive_bitwidth
    layout = gl.NVMMASharedLayout.get_default_for([128, dims], dtype)
    tile = f"tensordesc<{kind.split()[0]}[128, {dims}],{layout!r}>"
    constants = {
        "BLOCK_N": 128, "ROWS": 128, "BLOCK_D": dims, "STAGES": 4,
        "HAS_BIAS": softcap or "statistics" in kind, "HAS_SOFTCAP": softcap,
        "HAS_SCORE": score, "BY_LARGEST": False,
        "IS_SCREENED": dtype is gl.int8, "FINE": "large" in kind,
        "SEGMENT": 4096 if kind == "bf16 with statistics" else 0,
        **{f"HAS_{sums}": "statistics" in kind for sums in STATISTICS},
    }
    teacher_tile = tile
    if "in i8" in kind:
        of_8_bits = gl.NVMMASharedLayout.get_default_for([128, 2 * dims], gl.int8)
        teacher_tile = f"tensordesc<i8[128, {2 * dims}],{of_8_bits!r}>"
    kernel = hopper_logits_kernel if "kept" in kind else hopper_forward_kernel
    if "heads" in kind:
        kernel = hopper_teacher_kernel
        constants |= {"STAGES": 3, "TEACHER_HAS_BIAS": softcap}
        constants |= dict.fromkeys(("IS_REVERSE", "IS_JSD"), "mixture" in kind)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("hidden", "weight"):
            signature[name] = tile
        elif name in ("teacher_hidden", "teacher_weight"):
            signature[name] = teacher_tile
        elif name.endswith("_ptr"):
            signature[name] = "*" + TYPES[name.removesuffix("_ptr")]
        else:
            numbers = ("scale", "teacher_scale", "softcap", "keep", "beta")
            signature[name] = "fp32" if name in numbers else "i32"
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, places)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "ttng.warp_group_dot" in found.asm["ttgir"]
    # Of a Hopper multiprocessor's shared memory.
    assert found.metadata.shared <= 232448, found.metadata.shared
print("compiled")
"""


@pytest.mark.skipif(
    forward_hopper.why_no_gluon() is not None, reason=str(forward_hopper.why_no_gluon())
)
@pytest.mark.timeout(300)
def test_hopper_forward_compiles_without_a_gpu(tmp_path: Path) -> None:
    # The script finds compile_jobs.py beside this file.
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    env = os.environ | compiling(tmp_path)
    made = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=env | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert made.stdout.endswith("compiled\n"), made.stdout + made.stderr


def test_why_no_gluon_names_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    why, changed = forward_hopper.why_no_gluon, {"warp_specialize": ("functions_and_args", "warps")}
    monkeypatch.setattr(forward_hopper, "GLUON", changed)
    reason = str(why.__wrapped__())
    assert reason.startswith(f"triton {triton.__version__}")
    if why() is None:
        assert "warp_specialize takes ('functions_and_args', 'worker_num_warps'" in reason
        monkeypatch.setattr(forward_hopper, "GLUON", {})
        monkeypatch.setattr("triton._C.libtriton.gluon_ir.GluonOpBuilder", object)
        assert str(why.__wrapped__()).endswith("has no create_async_tma_reduce in Gluon")


# -- on a Hopper GPU ----------------------------------------------------------------------------


def screened(bits: Literal["int8", "e4m3"], **options: Any) -> dict[str, Any]:
    """8-bit logits of whatever vocabulary, however many columns are kept."""
    screen = Screen(dtype=bits, max_kept=1.0, max_error=1e9)
    return {"logits": "screened", "screen": screen, **options}


pytestmark_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 20.0, "logit_scale": 0.7},
    "softcap_by_largest": {"softcap": 5.0, "filter": Filter(eps=1e-4)},
    "exact": {"gradient": "exact"},
    "exact_softcap": {"gradient": "exact", "softcap": 5.0},
    "chunks": {"gradient": "in_forward", "filter": Filter(keep=0)},
    "chunks_softcap": {"gradient": "in_forward", "filter": Filter(keep=0), "softcap": 5.0},
    "screened": screened("int8"),
    "screened_softcap": screened("int8", softcap=20.0, logit_scale=0.7),
    "screened_large_softcap": screened("int8", softcap=100.0),
    "screened_softcap_e4m3": screened("e4m3", softcap=5.0),
}
# Of lse and loss, more than by sums in another order: with 8 bits and a softcap the tail is summed
# of bf16 numbers, and products in e4m3 are sums that the two kernels round, so that another column
# may be kept (2.3e-5 on an H100; e4m3 itself errs by more, docs/results.md#screened-logits).
OFF = {"screened_softcap": 2e-5, "screened_large_softcap": 2e-5, "screened_softcap_e4m3": 1e-4}
# Tokens, classes, dim: whole tiles; a second group without columns; ragged; one class more than a
# program's tile; fewer tokens than a block; and so few of so many classes that many splits
# have them.
SHAPES = (
    *((512, 8192, 128), (256, 5000, 64), (1000, 4997, 200), (130, 257, 64), (7, 100, 8)),
    (100, 60000, 64),
)


def outputs(kernels: int, shape: tuple[int, int, int], dtype: torch.dtype, **options: Any) -> Any:
    """Loss, lse, gradients and how often the Hopper kernel was launched."""
    inputs = zipf_inputs(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    hidden, weight = (tensor.cuda().requires_grad_() for tensor in (inputs.hidden, inputs.weight))
    targets = inputs.targets.cuda()
    found, launched = loss_of(kernels, hidden, weight, targets, stats=("lse",), **options)
    found.loss.backward()
    return [found.loss, found.lse, hidden.grad, weight.grad], launched


def loss_of(
    kernels: int, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> tuple[Any, int]:
    """The loss with its statistics, and how often the Hopper kernel was launched."""
    launches = []
    whole = forward_state.launch_forward

    def counted(*args: Any) -> None:
        launches.append(args)
        whole(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_state, "launch_forward", counted)
        if kernels == 1:
            patch.setattr(forward_state, "num_groups", lambda *_: 1)
        found: Any = linear_cross_entropy(hidden, weight, targets, backend="triton", **options)
    return found, len(launches)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# Of `gradients`. "everything" has all that the kernel adds to a product, or to a logit.
THIRDS = slice(None, None, 3)
EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 20.0, "logit_scale": 0.7, "ignored": THIRDS},
    "smoothing": {"label_smoothing": 0.1, "ignored": THIRDS},
    "smoothing_of_softcaps": {"label_smoothing": 0.1, "softcap": 5.0, "weighs": True},
    "everything": {"label_smoothing": 0.1, "weighs": True, "has_bias": True, "entropy": 0.1},
    "negative_scale": {"logit_scale": -0.7},
    # The rows of most blocks' tokens follow each other, not those of the first; several chunks.
    "prompt": {"ignored": slice(100, 140), "workspace_bytes": 2**22},
    "main_grad": {"accumulates": True},
    "hidden_alone": {"needs": (True, False)},
    "weight_alone": {"needs": (False, True), "ignored": THIRDS},
    "invariant": {"invariant": True},
}


def gradients(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    by_one_launch: bool,
    needs: tuple[bool, bool] = (True, True),
    ignored: slice = slice(0),
    padding: int = 0,
    weighs: bool = False,
    has_bias: bool = False,
    accumulates: bool = False,
    entropy: float = 0.0,
    **options: Any,
) -> tuple[list[Tensor], int]:
    """Gradients of `exact` in fp32, and how often Hopper's kernel for them was prepared."""
    generator = torch.Generator().manual_seed(0)
    inputs = zipf_inputs(*shape, generator=generator, dtype=dtype)
    padded = torch.nn.functional.pad(inputs.weight.cuda(), (0, padding))
    hidden, weight = (
        tensor.cuda().requires_grad_(needed)
        for tensor, needed in zip((inputs.hidden, padded[:, : shape[2]]), needs, strict=True)
    )
    targets = inputs.targets.cuda()
    targets[ignored] = -100
    leaves = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    if weighs:
        options["class_weight"] = torch.rand(shape[1], generator=generator).cuda()
    if has_bias:
        bias = torch.randn(shape[1], generator=generator).to("cuda", dtype)
        options["bias"] = bias.requires_grad_()
        leaves.append(bias)
    main_grad = torch.ones(weight.shape, device="cuda")
    if accumulates:
        options["grad_weight_into"] = main_grad
        leaves = [hidden]
    whole = mock.Mock(wraps=backward_exact.products_on_hopper)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward_exact, "products_on_hopper", whole)
        if not by_one_launch:
            patch.setattr(backward_exact, "runs_on_hopper", lambda *_, **__: False)
        found: Any = linear_cross_entropy(
            hidden,
            weight,
            targets,
            gradient="exact",
            backend="triton",
            stats=("entropy",) if entropy else (),
            **options,
        )
        loss = found.loss - entropy * found.entropy.mean() if entropy else found
        loss.backward()
    replay.forget_recordings()
    grads = [leaf.grad.float() for leaf in leaves if leaf.grad is not None]
    assert len(grads) == len(leaves)
    return [*grads, *([main_grad] if accumulates else [])], whole.call_count


class TestOnHopper:
    pytestmark = pytestmark_gpu

    def test_gluon_is_there(self) -> None:
        assert forward_hopper.why_no_gluon() is None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("options", OPTIONS)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_hopper_forward_agrees_with_the_portable_one(
        self, shape: tuple[int, int, int], options: str, dtype: torch.dtype
    ) -> None:
        ours, launched = outputs(2, shape, dtype, **OPTIONS[options])
        portable, none = outputs(1, shape, dtype, **OPTIONS[options])
        assert (launched > 0, none) == (True, 0)
        off = OFF.get(options, 2e-6)
        for found, expected in zip(ours[:2], portable[:2], strict=True):
            torch.testing.assert_close(found, expected, rtol=off, atol=off)
        for found, expected in zip(ours[2:], portable[2:], strict=True):
            assert relative(found.float(), expected.float()) < 8e-3

    def test_hopper_forward_is_deterministic(self) -> None:
        first, _ = outputs(2, (1000, 50000, 256), torch.bfloat16)
        again, _ = outputs(2, (1000, 50000, 256), torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))

    @pytest.mark.parametrize(
        "options", ["plain", "softcap", "exact", "screened", "screened_softcap"]
    )
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_hopper_statistics_agree_with_the_portable_ones(
        self, shape: tuple[int, int, int], options: str
    ) -> None:
        inputs = zipf_inputs(*shape, generator=torch.Generator().manual_seed(0))
        hidden = inputs.hidden.to("cuda", torch.bfloat16).requires_grad_()
        weight = inputs.weight.to("cuda", torch.bfloat16)
        targets = inputs.targets.cuda()
        targets[::5] = -100
        every = {
            **OPTIONS[options],
            "stats": ("lse", "entropy", "sum_p2", "correct", "logit_moments"),
        }
        ours, launched = loss_of(2, hidden, weight, targets, **every)
        portable, none = loss_of(1, hidden, weight, targets, **every)
        assert (launched > 0, none) == (True, 0)
        assert torch.equal(ours.correct, portable.correct)
        off = 2 * OFF.get(options, 2e-6)
        for found, expected in (
            (ours.lse, portable.lse),
            (ours.entropy, portable.entropy),
            (ours.sum_p2, portable.sum_p2),
            *zip(ours.logit_moments, portable.logit_moments, strict=True),
        ):
            torch.testing.assert_close(found, expected, rtol=off, atol=off)
        # All together leave half as many rows of each sum.
        alone, _ = loss_of(2, hidden, weight, targets, **{**every, "stats": ("sum_p2",)})
        torch.testing.assert_close(alone.sum_p2, portable.sum_p2, rtol=off, atol=off)
        # A statistic costs no bit of the loss.
        alone, _ = loss_of(2, hidden, weight, targets, **OPTIONS[options])
        assert torch.equal(alone, ours.loss)

    @pytest.mark.parametrize("scale", [1.0, -1.0])
    def test_the_lowest_of_equal_columns_is_correct(self, scale: float) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        hidden, weight = (
            torch.randn(size, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
            for size in (300, 20000)
        )
        # Each token's largest column occurs in four tiles, in other splits and groups too.
        largest = (scale * hidden.double() @ weight[:5000].double().T).argmax(1)
        weight = weight[:5000].repeat(4, 1)
        for times in range(4):
            targets = largest + 5000 * times
            found, launched = loss_of(
                2, hidden, weight, targets, stats=("correct",), logit_scale=scale
            )
            if times == 0:  # A later call of the kind is played, and starts no kernel anew.
                assert (launched > 0) == (scale > 0)
            assert bool((found.correct == (times == 0)).all())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @pytest.mark.parametrize("options", EXACT)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_exact_by_one_launch_agrees_with_a_chunk_at_a_time(
        self, shape: tuple[int, int, int], options: str, dtype: torch.dtype
    ) -> None:
        if options == "invariant" and dtype == torch.float16:
            pytest.skip("refused")
        ours, launched = gradients(shape, dtype, by_one_launch=True, **EXACT[options])
        portable, none = gradients(shape, dtype, by_one_launch=False, **EXACT[options])
        # The first call of a kind goes through one of few tokens, which compiles only.
        assert (launched > 0, none) == (True, 0)
        assert all(relative(a, b) < 1e-3 for a, b in zip(ours, portable, strict=True))

    # 44 and 132 pieces of chunks: of some no columns are left.
    @pytest.mark.parametrize("shape", [(1, 50257, 768), (1, 200_000, 64)], ids=str)
    def test_exact_by_one_launch_in_pieces(self, shape: tuple[int, int, int]) -> None:
        few = {"dtype": torch.bfloat16, "workspace_bytes": 2**22}
        ours, launched = gradients(shape, by_one_launch=True, **few)
        portable, none = gradients(shape, by_one_launch=False, **few)
        assert (launched > 0, none) == (True, 0)
        assert all(relative(a, b) < 1e-3 for a, b in zip(ours, portable, strict=True))

    def test_exact_of_padded_rows(self) -> None:
        # Descriptors take the weight's rows of 24 numbers, and not the hidden gradient's of 17.
        shape = (300, 5000, 17)
        padded, launched = gradients(shape, torch.bfloat16, by_one_launch=True, padding=7)
        right, _ = gradients(shape, torch.bfloat16, by_one_launch=False)
        assert launched == 0
        assert all(relative(a, b) < 1e-3 for a, b in zip(padded, right, strict=True))

    def test_exact_by_one_launch_is_deterministic(self) -> None:
        # Chunks of few columns: most tasks wait for others.
        shape = (3000, 20000, 320)
        first, _ = gradients(shape, torch.bfloat16, by_one_launch=True, workspace_bytes=2**24)
        for _ in range(5):
            again, _ = gradients(shape, torch.bfloat16, by_one_launch=True, workspace_bytes=2**24)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
