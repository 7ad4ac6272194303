"""A head that defers its logits: its own call waits until the loss, or a reader, is known."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

from cce_dist import LossOptions
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.log import logger
from cce_dist.integrations.transformers.expression import (
    DONE,
    IN_HEAD,
    Expression,
    Finish,
    HeadCall,
    Product,
    comes_from_wrapper,
    version_of,
)
from cce_dist.integrations.transformers.logits import DeferredLogits, not_compiled

QUANTISERS = ("bitsandbytes", "torchao", "optimum")
# Of PEFT's layers: which adapters they add, and how much of each.
PEFT_SWITCHES = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
# Modules whose output is the same in training and in evaluation, or whose parts have the mode.
WITHOUT_MODE = (nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.Sequential)


class Deferral:
    """From `begin` to `end` a call of the head returns deferred logits.

    The head itself is called when the loss is known, and computes the loss in its forward. So the
    hooks of whoever wraps it (FSDP, DeepSpeed, Accelerate) gather its weight for the loss, and free
    it after the loss.

    Args:
        said: what the model's user has been told already.
    """

    def __init__(self, head: Any, name: str, options: LossOptions, said: set[str]) -> None:
        require_linear(name, head)
        # Modules that torch.compile made of the head. Their callers get the head itself.
        self.compiled: list[OptimizedModule] = []
        self.head: Any = self._uncompiled(head)
        # FSDP1 wraps the head's module in one of its own.
        is_wrapped = isinstance(self.head, FullyShardedDataParallel)
        self.inside: Any = self._uncompiled(self.head.module) if is_wrapped else self.head
        self.name, self.options, self.said = name, options, said
        self.finish: Finish | None = None
        self.thread = threading.get_ident()
        # Hidden states by their id, and the generators' states before the head was first computed
        # for them.
        self.drawn: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}

    @not_compiled
    def begin(self) -> None:
        head, call = self.head, HeadCall(self.name, self.options, self.said, self.compute)
        # Deferred logits hold the call, and the call this object. Were it held from here after the
        # forward, hidden states and weights would stay until the garbage collector runs.
        self.held, self.reference = call, weakref.ref(call)
        call.num_classes = _num_classes(head)
        call.trains = any(x.requires_grad for x in head.parameters())
        call.is_zero3 = any(hasattr(x, "ds_id") for x in head.parameters())
        weight = getattr(self.inside, "weight", None)
        # A head that FSDP2 shards is known when it is gathered.
        self.is_split = isinstance(weight, DTensor) and not isinstance(head, FSDPModule)
        for each in self.compiled:
            if each._forward_hooks or each._forward_pre_hooks:
                self._refuse("a hook of its compiled head would not run; give it to the head")
        for name in ("forward_hooks", "backward_hooks", "backward_pre_hooks"):
            of_head = (getattr(x, f"_{name}").values() for x in self.head.modules())
            hooks = chain(_of_all_modules(name), *of_head)
            for hook in (x for x in hooks if not comes_from_wrapper(x)):
                self._refuse(
                    f"a {name.split('_')[0]} hook of its head or of all modules, {hook}, would get "
                    "the loss, or its gradient, in place of logits; remove the hook"
                )
        outer = getattr(self.inside.forward, "__self__", None)
        self.outer = outer if isinstance(outer, Deferral) else None
        self.replaced = self._replace(self.defer)

    @not_compiled
    def end(self) -> None:
        self.call.stage, self.held = DONE, None
        _restore(self.replaced)

    @property
    def call(self) -> HeadCall:
        call = self.reference()
        assert call is not None, "only logits that hold it ask after the forward"
        return call

    def _uncompiled(self, module: Any) -> Any:
        while isinstance(module, OptimizedModule):
            self.compiled.append(module)
            module = module._orig_mod
        return module

    def _replace(self, call: Any) -> list[tuple[Any, str, Any]]:
        """Stands in for the head's call and forward; returns what `_restore` puts back."""
        inner = self.inside.forward
        # A model may call itself, or another one that has the same head.
        while isinstance(outer := getattr(inner, "__self__", None), Deferral):
            if outer.thread != threading.get_ident():
                self._refuse("another thread is in the forward of a model with the same head")
            inner = outer.inner
        self.inner = inner
        replaced = []
        # A module's call runs its hooks, unless it has this attribute, which torch's own
        # Module.compile sets. The compiler calls forward in any case.
        for module, name, value in (
            *((each, "_compiled_call_impl", each._orig_mod.__call__) for each in self.compiled),
            (self.head, "_compiled_call_impl", call),
            (self.inside, "forward", self.forward),
        ):
            replaced.append((module, name, vars(module).get(name)))
            setattr(module, name, value)
        return replaced

    @not_compiled
    def defer(self, hidden: Tensor) -> DeferredLogits:
        """Returns the logits of [..., D], not computed."""
        call = self.call
        if hidden.is_meta:
            self._refuse("it is on the meta device, whose tensors hold no values")
        # A held weight's id is no other's.
        self.weights, self.state = list(self.head.parameters()), _state_of(self.head)
        call.dtype = _autocast_dtype(hidden)
        output = Expression((Product.of(hidden),))
        return DeferredLogits(call, output, call.dtype or hidden.dtype)

    @not_compiled
    def compute(self, hidden: Tensor, finish: Finish) -> Tensor:
        """Calls the head, whose forward returns the result of `finish`."""
        call, stage = self.call, self.call.stage
        if _state_of(self.head) != self.state:
            raise PatchError(
                "the head changed after it was called (its weights or buffers, adapters, hooks, or "
                "the mode of its dropout), so that its logits cannot be computed any more: read "
                "them before, such as before the optimizer's step"
            )
        # It may be read in another thread than the forward's.
        thread, self.thread = self.thread, threading.get_ident()
        replaced = self._replace(None)
        self.finish, call.stage = finish, IN_HEAD
        try:
            with self._draws_once(hidden), _autocast(hidden, call.dtype):
                # Tensor parallelism's hooks would gather what the head returns.
                return self.forward(hidden) if self.is_split else self.head(hidden)
        finally:
            self.finish, call.stage, self.thread = None, stage, thread
            _restore(replaced)

    @contextlib.contextmanager
    def _draws_once(self, hidden: Tensor) -> Iterator[None]:
        """The head draws the same numbers, such as dropout's masks, in each call for the same
        hidden states, and the calls after the first one leave torch's generators as they are."""
        if not any(_may_draw(x) for x in self.head.modules()):
            yield
            return
        # The head may be on another GPU than the model.
        devices = list({x.device for x in (hidden, *self.head.parameters()) if x.is_cuda})
        if id(hidden) not in self.drawn:
            of_devices = [torch.cuda.get_rng_state(each) for each in devices]
            self.drawn[id(hidden)] = hidden, torch.get_rng_state(), of_devices
            yield
            return
        _, state, of_devices = self.drawn[id(hidden)]
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state)
            for device, of_device in zip(devices, of_devices, strict=True):
                torch.cuda.set_rng_state(of_device, device)
            yield

    @not_compiled
    def forward(self, hidden: Any, **further: object) -> Any:
        """Stands in for the head's forward."""
        if further:
            # PEFT's aLoRA tells its layers where each sequence invokes it.
            self._refuse(f"its head gets {', '.join(sorted(further))} beside hidden states")
        if self.finish is None:
            return self.defer(hidden)
        products = self._products(hidden)
        # A head may switch autocast off.
        with _autocast(hidden, self.call.dtype):
            result = self.finish(products)
        if not isinstance(hidden, DTensor):
            return result
        # parallelize_module's hook makes it a plain tensor again.
        return DTensor.from_local(result, hidden.device_mesh, [Replicate()], run_check=False)

    def _products(self, hidden: Any) -> Expression:
        """Returns the head's output as an expression of its weights.

        Raises:
            PatchError: it is no linear map, or its weight is not here.
        """
        head: Any = self.inside
        call = self.call
        # Of a linear map.
        call.head_dtype = call.dtype or hidden.dtype
        weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
        biases = () if bias is None else ((bias, 1.0),)
        is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        if isinstance(weight, DTensor):
            self._require_split(weight)
            if not is_linear:
                self._refuse(f"its head, a {type(head).__name__}, is split over ranks")
            if isinstance(hidden, DTensor):
                hidden = hidden.redistribute(placements=[Replicate()]).to_local()
            call.group = weight.device_mesh
            return Expression((Product.of(hidden, weight),), biases)
        if is_linear and getattr(self.inner, "__func__", None) is nn.Linear.forward:
            assert isinstance(weight, Tensor)
            if weight.dim() != 2 or weight.shape[0] != call.num_classes:
                self._refuse("FSDP has freed its head's weight; read the logits in eval()")
            return Expression((Product.of(hidden, weight),), biases)
        call.head_dtype, call.rows = None, hidden.shape[:-1]
        with _Products(call):
            result = self.inner(hidden)
        if not isinstance(result, DeferredLogits):
            self._refuse(f"its head, a {type(head).__name__}, is no linear map by F.linear")
        call.head_dtype = result.dtype
        return result.expression

    def _require_split(self, weight: DTensor) -> None:
        if not self.is_split and not isinstance(self.head, FSDPModule):
            self._refuse("FSDP has freed its head's weight; read the logits in eval()")
        if tuple(weight.placements) != (Shard(0),):
            self._refuse(
                f"its head's weight is placed {weight.placements} on {weight.device_mesh}, and the "
                "loss needs Shard(0) on a mesh of one dim"
            )

    def _refuse(self, reason: str) -> None:
        raise PatchError(f"{self.name} cannot be patched: {reason}")

    @not_compiled
    def check(self, loss: Any) -> None:
        """Checks that the forward has computed its loss here, and says so at the first time.

        Args: loss: the forward's; None: it leaves the loss to its caller.
        """
        call = self.call
        if not call.num_losses:
            if loss is None:
                return
            self._refuse(
                "with labels its forward computed a loss without F.cross_entropy of its head's "
                "output (another patch, such as Liger's, may have replaced it); switch this patch "
                "off with remove(model)"
            )
        if self.outer is not None:
            # The inner of two models that share a head may compute the loss of both.
            self.outer.call.num_losses += 1
        if "loss" not in call.said:
            call.said.add("loss")
            logger.info(
                "%s: cce_dist.linear_cross_entropy computes the loss in place of F.cross_entropy, "
                "without logits (gradient=%s, logits=%s, backend=%s). Switch it off with "
                "cce_dist.integrations.transformers.remove(model)",
                *(call.model, call.gradient, call.options.logits, call.options.backend),
            )


def _restore(replaced: list[tuple[Any, str, Any]]) -> None:
    for module, name, old in replaced:
        if old is None:
            delattr(module, name)
        else:
            setattr(module, name, old)


def _may_draw(module: nn.Module) -> bool:
    """Tells whether a module of a head, or a user's pre-hook of it, may draw random numbers: all
    but a plain linear map may."""
    if type(module).forward is not nn.Linear.forward:
        return True
    hooks = chain(_of_all_modules("forward_pre_hooks"), module._forward_pre_hooks.values())
    return not all(comes_from_wrapper(x) for x in hooks)


def _of_all_modules(name: str) -> list[Any]:
    """Returns hooks that torch.nn.modules.module has registered for every module."""
    return list(getattr(nn.modules.module, f"_global_{name}").values())


def _state_of(head: nn.Module) -> list[Any]:
    """Returns versions of the head's tensors, its hooks, PEFT's switches of adapters, and the mode
    of modules that have one: other ones make other logits, or another gradient."""
    tensors = (*head.parameters(), *head.buffers())
    # Not shapes: ZeRO-3 and FSDP take a weight apart, and gather it again.
    state: list[Any] = [(id(x), version_of(x), x.dtype, x.requires_grad) for x in tensors]
    hooks = [*_of_all_modules("forward_pre_hooks"), *_of_all_modules("forward_hooks")]
    for module in head.modules():
        state += [copy.copy(getattr(module, name, None)) for name in PEFT_SWITCHES]
        hooks += [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        of_peft = type(module).__module__.startswith("peft.")
        is_linear = type(module).forward is nn.Linear.forward
        if not (of_peft or is_linear or isinstance(module, WITHOUT_MODE)):
            state.append(module.training)
    return state + [id(x) for x in hooks if not comes_from_wrapper(x)]


def require_linear(name: str, head: Any) -> None:
    """Checks what can be seen of a head before it is called.

    Raises:
        PatchError: it is none, or its weight is quantised.
    """
    if not isinstance(head, nn.Module):
        raise PatchError(
            f"{name} cannot be patched: it has no output embeddings, which the loss would replace"
        )
    if isinstance(head, (nn.Embedding, nn.ModuleList)):
        raise PatchError(
            f"{name} cannot be patched: its head must be one linear map, got {type(head).__name__}"
        )
    for module in head.modules():
        weight = getattr(module, "weight", None)
        dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
        quantised = not dtype.is_floating_point or dtype.itemsize < 2
        # torchao's weights are tensors of its own in a plain nn.Linear, whose dtype is as before.
        if quantised or any(
            type(x).__module__.split(".")[0] in QUANTISERS for x in (module, weight)
        ):
            raise PatchError(
                f"{name} cannot be patched: its head is a {type(module).__name__}, whose weight is "
                "quantised; leave the head out of the quantisation (llm_int8_skip_modules)"
            )


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _autocast(tensor: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(tensor.device.type, dtype=dtype, enabled=dtype is not None)


def _num_classes(head: nn.Module) -> int:
    """Returns V, also of a weight that is sharded at the moment."""
    sizes = []
    for module in head.modules():
        weight = getattr(module, "weight", None)
        # DeepSpeed's ZeRO-3 keeps the shape; FSDP1 keeps a flat part.
        shape = getattr(weight, "ds_shape", None) or getattr(weight, "shape", ())
        sizes.append(shape[0] if len(shape) == 2 else getattr(module, "out_features", 0))
    return max(sizes)


class _Products(TorchFunctionMode):
    """F.linear with as many rows as there are classes returns deferred logits."""

    def __init__(self, call: HeadCall) -> None:
        self.call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if weight.dim() != 2 or weight.shape[0] != self.call.num_classes:
            return F.linear(input, weight, bias)
        biases = () if bias is None else ((bias, 1.0),)
        self.call.dtype = _autocast_dtype(input)
        dtype = self.call.dtype or input.dtype
        return DeferredLogits(self.call, Expression((Product.of(input, weight),), biases), dtype)
