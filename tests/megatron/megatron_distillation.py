"""What test_megatron.py checks of `megatron_patch.distillation_loss`, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patch
from cce_dist import linear_distillation
from cce_dist.reference import divergence_reference
from megatron_patch import PatchError, distillation_loss
from megatron_patch.distillation import loss as of_losses
from tests.megatron.megatron_head import Check, changed, run_in
from tests.megatron.megatron_jobs import build, grads_of, make_config, wrap
from tests.megatron.megatron_setup import BATCH, CLASSES, HIDDEN, SEQUENCE, Setup

TP = Setup(tp=2)
SP = Setup(tp=2, sequence_parallel=True)
# As that of losses: of these models in fp32, most of which is not the loss.
LIMIT = 2e-6
SOFTCAPS = {"student": 3.0, "teacher": 2.0}
# Setups run in groups of their own, the checks' name after them.
CHECKS: dict[str, tuple[Setup, Check]] = {}


def check(setup: Setup) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[function.__name__] = setup, function
        return function

    return add


def run_check(_: Any, name: str) -> None:
    run_in(*CHECKS[name])


def make_student(setup: Setup) -> Any:
    return build(setup, make_config(setup))[0]


def make_teacher(setup: Setup) -> Any:
    """A frozen model of its own width, whose logits are large enough to differ."""
    config = make_config(setup)
    config.hidden_size = HIDDEN + 16
    config.kv_channels = config.hidden_size // 2
    model = build(setup, config)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.requires_grad_(False).eval()


def inputs() -> tuple[tuple[Tensor, ...], Tensor]:
    """Tokens, positions and mask; labels [b, s] of which some are no class."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(CLASSES, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(CLASSES, (BATCH, SEQUENCE), generator=generator)
    labels[:, ::5], labels[0, 1] = -100, CLASSES + 7
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    return (tokens, torch.arange(SEQUENCE).expand_as(tokens).contiguous(), future), labels


def dense(
    student: Any,
    teacher: Any,
    classes: int = CLASSES,
    capped: bool = False,
    alpha: float = 0.0,
    temperature: float = 1.0,
    divergence: str = "forward_kl",
    beta: float = 0.5,
) -> Tensor:
    """Losses [b, s] from all logits of two models that are not patched; 0 at labels of no class."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    given, labels = inputs()
    counts = (labels >= 0) & (labels < classes)
    logits = {}
    for name, model in (("student", student), ("teacher", teacher)):
        values = gather(model(*given))[..., :classes]
        cap = SOFTCAPS[name]
        logits[name] = cap * torch.tanh(values / cap) if capped else values
    both = [(logits[name] / temperature).log_softmax(-1) for name in ("student", "teacher")]
    loss = (1 - alpha) * divergence_reference(*both, divergence, beta)
    nll = -logits["student"].log_softmax(-1).gather(-1, labels.where(counts, 0)[..., None])[..., 0]
    return (loss + alpha * nll).masked_fill(~counts, 0)


def upstream() -> Tensor:
    return 0.5 + torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(2)).double()


def require_close(ours: dict[str, Tensor], right: dict[str, Tensor], limit: float = LIMIT) -> None:
    assert ours.keys() == right.keys()
    for name, grad in right.items():
        off = (ours[name].double() - grad).norm() / grad.norm()
        assert float(off) < limit, (name, float(off))


def compare_with_dense(
    setup: Setup, classes: int = CLASSES, capped: bool = False, **options: Any
) -> None:
    """Losses, and every parameter's gradient, beside the same models in float64."""
    of_teacher = replace(setup, tied=not setup.tied)
    student, exact = make_student(setup), make_student(setup).double()
    teacher, exact_teacher = make_teacher(of_teacher), make_teacher(of_teacher).double()
    expected = dense(exact, exact_teacher, classes, capped, **options)
    (expected * upstream()).sum().backward()
    size = None if classes == CLASSES else classes
    for name, model in (("student", student), ("teacher", teacher)):
        cap = SOFTCAPS[name] if capped else None
        megatron_patch.apply(model, gradient="exact", vocab_size=size, softcap=cap)
    given, labels = inputs()
    losses = distillation_loss(student, teacher, *given, labels=labels.int(), **options)
    assert losses.dtype == torch.float32 and losses.shape == labels.shape
    assert losses.is_contiguous() and not losses[expected == 0].any()
    off = (losses - expected).norm() / expected.norm()
    assert float(off) < LIMIT, float(off)
    both = [torch.empty_like(losses) for _ in range(2)]
    dist.all_gather(both, losses.detach())
    assert torch.equal(*both)
    (losses * upstream()).sum().backward()
    found = [{k: x.grad for k, x in model.named_parameters()} for model in (student, exact)]
    require_close(*found)
    assert all(x.grad is None for x in teacher.parameters())


for _name, _setup, _options in (
    ("one_rank", Setup(), {}),
    ("one_rank_tied", Setup(tied=True), {"alpha": 0.25, "temperature": 2.0}),
    ("tensor_parallel", TP, {"alpha": 0.25, "temperature": 2.0}),
    ("tied", Setup(tp=2, tied=True), {"divergence": "reverse_kl"}),
    ("sequence_parallel", SP, {"divergence": "jsd", "beta": 0.3, "temperature": 2.0}),
    ("sequence_parallel_tied", replace(SP, tied=True), {"alpha": 0.5}),
    ("context_parallel", Setup(cp=2), {}),
    ("recompute", replace(SP, recompute=True), {}),
    ("capped_without_padding", TP, {"classes": 90, "capped": True, "alpha": 0.25}),
):
    CHECKS[_name] = _setup, partial(compare_with_dense, _setup, **_options)


def make_jobs(setup: Setup) -> tuple[list[Any], Any, Any, Any, Tensor]:
    """A student, wrapped as in Megatron's training, and a teacher, patched; the student in float64,
    its losses, and their gradients in its parameters."""
    config = make_config(setup)
    stages = build(setup, config)
    plain = replace(setup, bf16=False, fusion=False)
    exact, of_teacher = make_student(plain).double(), replace(plain, tied=not plain.tied)
    exact.load_state_dict(stages[0].state_dict(), strict=False)
    teacher = make_teacher(of_teacher)
    losses = dense(exact, make_teacher(of_teacher).double())
    (losses * upstream()).sum().backward()
    (wrapped,) = wrap(setup, config, stages)
    megatron_patch.apply([wrapped, teacher], gradient="exact")
    return stages, wrapped, teacher, exact, losses.detach()


def of_first_stage(exact: Any) -> dict[str, Tensor]:
    return {f"0.{name}": x.grad for name, x in exact.named_parameters()}


def gradients_beside_those_of_the_loss(setup: Setup) -> None:
    """In one step with a microbatch whose loss has added its gradient to main_grad."""
    stages, student, teacher, exact, _ = make_jobs(setup)
    given, labels = inputs()
    classes = labels.clamp(0, CLASSES - 1)
    (exact(*given, labels=classes).double() * upstream()).sum().backward()
    student.zero_grad_buffer()
    (student(*given, labels=classes) * upstream()).sum().backward()
    losses = distillation_loss(student, teacher, *given, labels=labels)
    (losses * upstream()).sum().backward()
    require_close(grads_of(stages), of_first_stage(exact))


for _name, _setup in {
    "main_grad": Setup(tp=2, fusion=True),
    "main_grad_tied": Setup(tp=2, fusion=True, tied=True, sequence_parallel=True),
    "main_grad_without_fusion": TP,
}.items():
    CHECKS[_name] = _setup, partial(gradients_beside_those_of_the_loss, _setup)

IN_BF16 = replace(SP, bf16=True)


@check(IN_BF16)
def in_bf16_from_a_teacher_in_fp32() -> None:
    stages, student, teacher, exact, expected = make_jobs(IN_BF16)
    student.zero_grad_buffer()
    losses = distillation_loss(student, teacher, *inputs()[0], labels=inputs()[1])
    assert losses.dtype == torch.float32
    assert (losses - expected).norm() < 2e-2 * expected.norm()
    (losses * upstream()).sum().backward()
    require_close(grads_of(stages), of_first_stage(exact), 3e-2)
    from megatron.core.transformer.module import Float16Module

    of_teacher = replace(IN_BF16, tied=True)
    wrapped = Float16Module(make_config(of_teacher), make_teacher(of_teacher)).eval()
    wrapped.load_state_dict(teacher.state_dict(), strict=False)
    megatron_patch.apply(wrapped, gradient="exact")
    losses = distillation_loss(student, wrapped, *inputs()[0], labels=inputs()[1])
    assert (losses - expected).norm() < 4e-2 * expected.norm()


@check(IN_BF16)
def screened_teacher() -> None:
    """The student's option says how the teacher's logits are computed."""
    from megatron.core.transformer.module import Float16Module

    _, student, teacher, _, _ = make_jobs(IN_BF16)
    wrapped = Float16Module(make_config(IN_BF16), make_teacher(IN_BF16)).eval()
    megatron_patch.apply(wrapped)
    given, labels = inputs()
    full = distillation_loss(student, wrapped, *given, labels=labels)
    megatron_patch.remove()
    megatron_patch.apply(student, logits="screened")
    megatron_patch.apply([wrapped, teacher])
    asked: list[Any] = []

    def note(*tensors: Any, **options: Any) -> Any:
        asked.append(options["logits"])
        return linear_distillation(*tensors, **options)

    with changed(of_losses, linear_distillation=note):
        losses = distillation_loss(student, wrapped, *given, labels=labels)
    # Without kernels they are full.
    assert asked == ["screened"] and torch.allclose(losses, full, rtol=1e-5)
    with pytest.raises(PatchError, match="no distillation but of 'forward_kl', got 'jsd'"):
        distillation_loss(student, wrapped, *given, labels=labels, divergence="jsd")
    with pytest.raises(ValueError, match="teacher_hidden must be bf16 or fp16 with logits="):
        distillation_loss(student, teacher, *given, labels=labels)


def whole(sharded: Any) -> Tensor:
    """Gathers a DTensor of FSDP's. full_tensor would take the plan of an equal mesh of an earlier
    test, whose groups are gone."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, sharded.to_local(), group=group)
    return torch.cat(parts)


def under_fsdp(setup: Setup) -> None:
    stages, student, teacher, exact, expected = make_jobs(setup)
    losses = distillation_loss(student, teacher, *inputs()[0], labels=inputs()[1])
    assert (losses - expected).norm() < LIMIT * expected.norm()
    (losses * upstream()).sum().backward()
    ours = {f"0.{name}": whole(x.grad) for name, x in stages[0].named_parameters()}
    require_close(ours, of_first_stage(exact))
    student.requires_grad_(False).eval()
    with pytest.raises(PatchError, match="teacher must not be under FSDP"):
        distillation_loss(teacher, student, *inputs()[0], labels=inputs()[1])


for _name, _setup in {
    "fsdp": Setup(dp=2, fsdp="root"),
    "fsdp_head": Setup(tp=2, dp=2, fsdp="head"),
}.items():
    CHECKS[_name] = _setup, partial(under_fsdp, _setup)

OVER_PIPELINE = Setup(pp=2)


@check(OVER_PIPELINE)
def a_student_over_a_pipeline() -> None:
    """The teacher is whole on the last stage's rank."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    is_last, config = parallel_state.is_pipeline_last_stage(), make_config(OVER_PIPELINE)
    stage = build(OVER_PIPELINE, config)
    (wrapped,) = wrap(OVER_PIPELINE, config, stage)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, dict(stage[0].named_parameters()))
    # A whole model has its layers in the order of the stages.
    first, second = ({k: x.detach() for k, x in state.items()} for state in states)
    second = {k.replace("layers.0", "layers.1"): x for k, x in second.items()}
    always = {f"is_pipeline_{end}_stage": lambda **_: True for end in ("first", "last")}
    with changed(parallel_state, **always):
        exact, exact_teacher = (make(Setup()).double() for make in (make_student, make_teacher))
        teacher = make_teacher(Setup())
    # Megatron's seed differs from stage to stage.
    for parameter in teacher.parameters():
        dist.broadcast(parameter.data, 1)
    exact_teacher.load_state_dict(teacher.state_dict())
    exact.load_state_dict({**first, **second}, strict=False)
    (dense(exact, exact_teacher) * upstream()).sum().backward()
    megatron_patch.apply([wrapped, teacher], gradient="exact")
    given, labels = inputs()

    def forward_step(_: Any, model: Any) -> Any:
        output = distillation_loss(model, teacher if is_last else None, *given, labels=labels)
        return output, lambda losses: ((losses * upstream()).sum(), {})

    wrapped.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([]),
        model=wrapped,
        num_microbatches=1,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    layer = "layers.1" if is_last else "layers.0"
    ours = {k[2:].replace("layers.0", layer): x for k, x in grads_of(stage).items()}
    right = {k: x.grad for k, x in exact.named_parameters() if k in ours}
    require_close(ours, right)
    if is_last:
        with pytest.raises(
            PatchError, match=r"teacher must have all its layers .* pre_process=Fal"
        ):
            distillation_loss(teacher, stage[0].requires_grad_(False), *given, labels=labels)


@check(TP)
def refusals() -> None:
    student, teacher = make_student(TP), make_teacher(TP)
    given, labels = inputs()

    def refused(message: str, kind: Any = PatchError, **options: Any) -> None:
        arguments = {"student": student, "teacher": teacher, "labels": labels, **options}
        models = arguments.pop("student"), arguments.pop("teacher")
        with pytest.raises(kind, match=message):
            distillation_loss(*models, *given, **arguments)

    refused("needs a patched student: call megatron_patch.apply")
    megatron_patch.apply(student)
    refused("needs a patched teacher: call megatron_patch.apply")
    megatron_patch.apply(teacher)
    distillation_loss(student, teacher, *given, labels=labels)
    refused("labels must be given", ValueError, labels=None)
    refused("teacher must be a model where the student has its head", ValueError, teacher=None)
    refused("student must be one module, got <class 'list'>", student=[student])
    refused("teacher must be, or wrap, a Megatron LanguageModule", teacher=torch.nn.Linear(2, 2))
    refused("alpha must lie in", ValueError, alpha=2.0)
    teacher.decoder.train()
    refused("teacher must be in evaluation mode")
    teacher.eval().decoder.requires_grad_(True)
    refused(r"teacher must not require grad, got decoder.layers.0.* that does: call teacher\.requ")
    teacher.requires_grad_(False)
    with changed(student.config, mtp_num_layers=1):
        refused("student must not have heads of multi-token prediction, got mtp_num_layers=1")
    for name, model in (("ours", student), ("theirs", teacher)):
        with changed(model.output_layer, sequence_parallel=True):
            value = name == "theirs"
            refused(f"teacher must have the student's sequence_parallel {not value}, got {value}")
    with changed(teacher.output_layer, output_size_per_partition=64):
        refused("teacher must have the student's rows of the output layer on a rank 48, got 64")
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with changed(teacher.output_layer, tp_group=alone):
        refused(r"teacher must have the student's tensor-parallel ranks \[0, 1\], got \[.\]")
    # Logits that something reads on their way to the loss.
    with changed(teacher.output_layer, gather_output=True):
        refused("distillation needs a loss without logits, but the model has computed its logits")
    with changed(student, compute_language_model_loss=lambda labels, logits: logits):
        refused("student must compute one loss by compute_language_model_loss .* computed 0")
    megatron_patch.remove()
    for options, message in (
        ({"check_ranks": True}, "check_ranks=True has no distillation"),
        ({"vocab_size": 90}, "vocab_size of megatron_patch.apply 90, got None"),
    ):
        megatron_patch.apply(student, **options)
        megatron_patch.apply(teacher)
        refused(message)
        megatron_patch.remove()
    # A failed call leaves the models as they were.
    megatron_patch.apply(student)
    losses = student(*given, labels=labels)
    assert losses.shape == labels.shape and losses[labels >= CLASSES].eq(0).all()
