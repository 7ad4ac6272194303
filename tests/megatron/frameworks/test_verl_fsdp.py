"""verl's FSDP engine with our log-probabilities: a small model, verl's stand-in or verl itself."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cce_dist.testing import RankPool
from megatron_patch import PatchError
from megatron_patch.frameworks import verl
from megatron_patch.frameworks.verl_fsdp import FORWARDS, TORCH, TRITON
from tests.integrations import architectures
from tests.megatron.frameworks.stand_ins import SOURCES, VERL_PATCH, load, shard, stand_ins

CLASSES, DIM, TEMPERATURE = 37, 8, 0.7
BACKENDS = ("torch", "liger", "triton")
OPTIONS: dict[str, Any] = {"backend": "torch", "gradient": "exact"}
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
INSTALLED = importlib.util.find_spec("verl") is not None
either = pytest.mark.parametrize(
    "is_real",
    [
        pytest.param(False, id="stand_in"),
        pytest.param(
            True, id="verl", marks=pytest.mark.skipif(not INSTALLED, reason="needs verl 0.9.1")
        ),
    ],
)


class Outputs(tuple[Tensor]):
    past_key_values = hidden_states = attentions = None


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CLASSES, DIM)
        self.layer = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, input_ids: Tensor, **_: object) -> Outputs:
        return Outputs([3 * self.layer(self.embed_tokens(input_ids))])


def make_model(is_tied: bool = False, **config: Any) -> Any:
    """Makes a model of a class of its own: verl replaces the forward of the class."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = Body(), nn.Linear(DIM, CLASSES, bias=False)
            if is_tied:
                self.lm_head.weight = self.model.embed_tokens.weight
            self.config = SimpleNamespace(
                model_type="llama", output_attentions=False, output_hidden_states=False, **config
            )

    torch.manual_seed(0)
    return Model()


def patched(model: Any, backend: str) -> Any:
    patch = load(VERL_PATCH).patch_forward_with_backends
    patch(model, use_fused_kernels=True, fused_kernels_backend=backend)
    return model


def run(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    labels = ids.roll(-1, -1)
    output = model(input_ids=ids, temperature=TEMPERATURE, return_dict=True, shift_labels=labels)
    return output.log_probs, output.entropy


def dense(model: Any, ids: Tensor, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    logits = model.model(ids)[0] @ model.lm_head.weight.T
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids.roll(-1, -1)[..., None])[..., 0], entropy


def total(results: tuple[Tensor, Tensor]) -> Tensor:
    logprobs, entropy = results
    return logprobs.sin().sum() + entropy.cos().sum()


def make_ids(rank: int = 0, rows: int = 1) -> Tensor:
    return torch.randint(CLASSES, (rows, 9), generator=torch.Generator().manual_seed(rank))


@contextmanager
def verls(is_real: bool = False, **options: Any) -> Iterator[None]:
    with nullcontext() if is_real else stand_ins():
        verl.apply(**{**OPTIONS, **options})
        try:
            yield
        finally:
            verl.remove()


@either
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 2], ids=["packed", "rows"])
def test_values_and_gradients(backend: str, rows: int, is_real: bool) -> None:
    model, ids = make_model(), make_ids(rows=rows)
    golden = copy.deepcopy(model).double()
    with verls(is_real):
        ours = run(patched(model, backend), ids)
    right = dense(golden, ids)
    for x, right_one in zip(ours, right, strict=True):
        assert x.dtype == torch.float32
        assert x.shape == ((ids.numel(),) if backend == "triton" else ids.shape)
        close(x.double().flatten(), right_one.flatten())
    of, of_golden = (list(x.parameters()) for x in (model, golden))
    grads = torch.autograd.grad(total(ours), of)
    for x, right_one in zip(grads, torch.autograd.grad(total(right), of_golden), strict=True):
        close(x.double(), right_one)


@pytest.mark.parametrize("backend", BACKENDS)
def test_options(backend: str) -> None:
    model, ids = make_model(final_logit_softcapping=5.0), make_ids()
    with verls(softcap=5.0):
        ours = run(patched(model, backend), ids)
    for x, right in zip(ours, dense(model, ids, softcap=5.0), strict=True):
        close(x.flatten(), right.flatten())
    model = make_model()
    with verls(vocab_size=CLASSES - 2):
        ours = run(patched(model, backend), ids % 30)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:-2].detach())
    close(ours[1].flatten(), dense(model, ids % 30)[1].flatten())


def test_models_of_one_class_and_remove() -> None:
    model, ids = make_model(), make_ids()
    with stand_ins():
        verl.apply(**OPTIONS)
        first = run(patched(model, "torch"), ids)
        again = copy.deepcopy(model)
        close(run(patched(again, "torch"), ids), first)
        again.lm_head = nn.Linear(DIM, CLASSES)
        with pytest.raises(PatchError, match="lm_head has a bias"):
            run(again, ids)
        verl.remove()
        # The class keeps our wrapper, which calls verl's functions.
        assert run(model, ids) == ("theirs", "theirs")


def lora(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["lm_head"]), model)


def to_save(model: Any) -> None:
    utils = pytest.importorskip("peft.utils")
    model.lm_head = utils.ModulesToSaveWrapper(model.lm_head, "default")


def replaced_forward(model: Any) -> None:
    model.lm_head.forward = lambda hidden: hidden


def no_head(model: Any) -> None:
    del model.lm_head


def bias(model: Any) -> None:
    model.lm_head = nn.Linear(DIM, CLASSES)


def hook(kind: str) -> Callable[[Any], object]:
    return lambda model: getattr(model.lm_head, f"register_{kind}")(lambda *_: None)


def config(**entries: Any) -> Callable[[Any], object]:
    return lambda model: vars(model.config).update(entries)


def text_config(**entries: Any) -> Callable[[Any], object]:
    return config(get_text_config=lambda: SimpleNamespace(**entries))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        pytest.param(lora, r"plain torch\.nn\.Linear.*got peft.*LoRA", id="lora"),
        pytest.param(to_save, r"plain torch\.nn\.Linear.*got peft.*modules_to_save", id="to_save"),
        pytest.param(replaced_forward, r"plain torch\.nn\.Linear.*lambda", id="replaced_forward"),
        pytest.param(no_head, r"plain torch\.nn\.Linear.*NoneType", id="no_head"),
        pytest.param(bias, "lm_head has a bias", id="bias"),
        *(
            pytest.param(hook(x), f"lm_head has the {name} .*remove it", id=x)
            for x, name in {
                "forward_hook": "forward hook",
                "forward_pre_hook": "forward pre-hook",
                "full_backward_hook": "backward hook",
                "full_backward_pre_hook": "backward pre-hook",
            }.items()
        ),
        pytest.param(
            config(final_logit_softcapping=30.0),
            r"final_logit_softcapping must be None, got 30\.0",
            id="softcap",
        ),
        *(
            pytest.param(config(**{x: 0.25}), rf"{x} must be 1\.0, got 0\.25", id=x)
            for x in ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
        ),
        pytest.param(text_config(logit_scale=2), r"logit_scale must be 1\.0, got 2", id="text"),
    ],
)
def test_refused_heads(change: Callable[[Any], object], match: str) -> None:
    model, ids = make_model(), make_ids()
    with verls():
        change(patched(model, "torch"))
        with pytest.raises(PatchError, match=rf"^Model: .*{match}.*use_fused_kernels=False"):
            run(model, ids)


def test_neutral_configurations_are_computed() -> None:
    model = make_model(logit_scale=1, logits_scaling=None, final_logit_softcapping=None)
    with verls():
        run(patched(model, "torch"), make_ids())
    with verls(softcap=5.0), pytest.raises(PatchError, match=r"softcap=5\.0 .* none of this model"):
        run(patched(model, "torch"), make_ids())


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("llama", None),
        ("qwen2", None),
        ("gemma2", "final_logit_softcapping"),
        ("recurrent_gemma", "logits_soft_cap"),
        ("cohere", "logit_scale"),
        ("granite", "logits_scaling"),
        ("minicpm3", "logits_scaling"),
        ("falcon_h1", "lm_head_multiplier"),
    ],
)
def test_models_of_transformers(
    name: str, entry: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    model, ids = architectures.make(name).eval(), make_ids()
    monkeypatch.setattr(type(model), "forward", type(model).forward)
    right = (model(input_ids=ids).logits / TEMPERATURE).log_softmax(-1)
    with verls():
        patched(model, "torch")
        if entry is None:
            close(run(model, ids)[0], right.gather(-1, ids.roll(-1, -1)[..., None])[..., 0])
        else:
            with pytest.raises(PatchError, match=f"{entry} must be .*, which verl leaves out"):
                run(model, ids)


def test_refused_calls() -> None:
    model, ids = make_model(), make_ids()
    with stand_ins():
        patched(model, "torch")
        verl.apply(**OPTIONS)
        with pytest.raises(PatchError, match=r"ours checks the head: call verl\.apply\(\) before"):
            run(model, ids)
        function: Any = load("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
        arguments = (torch.ones(1, DIM), model.lm_head.weight, torch.zeros(1).long(), 1.0)
        with pytest.raises(PatchError, match=r"no dist_process_group.*got 'none' and a group"):
            function(*arguments, "none", "a group")
        with pytest.raises(PatchError, match=r"must have reduction 'none'.*got 'mean'"):
            function(*arguments, "mean")
        verl.remove()


@pytest.mark.parametrize("name", ["vocab_weights", "dist_process_group", "shift_labels"])
def test_refused_signatures(name: str) -> None:
    moved = {module: source.replace(name, "moved") for module, source in SOURCES.items()}
    with stand_ins(moved):
        verl.apply()
        with pytest.raises(PatchError, match=rf"must take \(.*{name}.*\), got \(.*moved.*in verl"):
            for module in (TORCH, TRITON, *FORWARDS):
                load(module)
        verl.remove()


def test_refused_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_ins():
        module = load(TRITON)
        monkeypatch.setattr(module, "linear_cross_entropy", lambda: None)
        with pytest.raises(PatchError, match=r"linear_cross_entropy must take .*got \(\)"):
            verl.apply()

        def forward(
            ctx: Any,
            hidden: Any,
            weight: Any,
            labels: Any,
            temperature: Any,
            reduction: Any,
            dist_process_group: Any,
        ) -> None: ...

        other = type("Other", (torch.autograd.Function,), {"forward": staticmethod(forward)})
        monkeypatch.setattr(module, "linear_cross_entropy", other.apply)
        with pytest.raises(PatchError, match=r"linear_cross_entropy must be verl's, got .*forward"):
            verl.apply()


# -- FSDP ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    new = RankPool(2)
    yield new
    new.close()


def train_sharded(group: Any, kind: str, backend: str, is_real: bool) -> None:
    model, (rank, size) = make_model(kind == "tied").double(), (dist.get_rank(group), group.size())
    golden, head = copy.deepcopy(model), model.lm_head
    with verls(is_real):
        model = shard(patched(model, backend), kind, group)
        optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (model, golden)]
        for step in range(3):
            with torch.no_grad():
                ours, right = run(model, make_ids(rank)), dense(golden, make_ids(rank))
            same(ours, right)
            if kind == "untied" and step == 0:
                # A checkpoint's weights, loaded between two forwards.
                for weight in (head.weight, golden.lm_head.weight):
                    weight.data.mul_(0.9)
            if kind == "tied":
                model.reshard()  # as verl does after an evaluation
            # Two microbatches a step; FSDP averages over the ranks.
            for part in range(2):
                loss = total(run(model, make_ids(4 * step + 2 * part + rank)))
                if kind == "untied":
                    with torch.no_grad():
                        run(model, make_ids(rank))
                loss.backward()
                for each in range(size):
                    (total(dense(golden, make_ids(4 * step + 2 * part + each))) / size).backward()
            assert isinstance(head.weight, DTensor) == (kind != "fsdp1")
            if kind == "untied" and step < 2:
                run(model, make_ids(rank))  # without a backward
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if kind != "fsdp1":
            weights = [x.full_tensor() for x in model.parameters()]
            same(weights, list(golden.parameters()))


def same(ours: Any, right: Any) -> None:
    for x, right_one in zip(ours, right, strict=True):
        assert x.dtype == torch.float64
        torch.testing.assert_close(x.flatten(), right_one.flatten(), rtol=1e-9, atol=1e-9)


@either
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["tied", "untied", "fsdp1"])
def test_over_two_ranks(pool: RankPool, kind: str, backend: str, is_real: bool) -> None:
    pool.run(2, train_sharded, kind, backend, is_real)


def refuse_split(group: Any) -> None:
    model = make_model()
    with verls():
        patched(model, "torch")
        mesh = DeviceMesh.from_group(group, "cpu")
        whole = model.lm_head.weight.detach()
        model.lm_head.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        with pytest.raises(PatchError, match=r"weight is a DTensor placed .*must be whole"):
            run(model, make_ids())


def test_a_weight_that_fsdp_does_not_gather(pool: RankPool) -> None:
    pool.run(2, refuse_split)
