"""Registry of all methods (the dense recipe, ours, the peers), and handling of a peer's failure."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cce_dist import Filter, LinearCrossEntropy, QuantizedWeight, Screen, quantize_weight
from cce_dist.options import Backend, Stat

from . import peers
from .golden import LossFunction, mean_of
from .machine import version_of
from .rank_methods import Setup, dense

MAX_REASON_CHARS = 160
# A method of ours that `bench train` names too.
SCREENED = "screened"
# About a GiB to keep logits in.
MEMORY = 900 * 2**20
# The packages of several peers.
APPLE, FLA = "cut-cross-entropy", "flash-linear-attention"
LIGER, MEGATRON = "liger-kernel", "megatron-core"


@dataclass(frozen=True)
class Method:
    """A loss by name.

    Args:
        builder: imports and configures the loss; `build` calls it.
        package: the distribution that a peer comes from; empty: none, or torch.
        default: measured where nobody names methods. On a GPU all peers are.
        alone: one rank can run it, with the whole vocabulary.
        ranks: ranks that share the vocabulary can run it.
        softcap: takes a softcap.
        entropy: takes an entropy bonus.
        on_cpu: can run on a CPU; says nothing of peers, whose failure is reported.
        exact: computes every column's gradient; of a peer.
    """

    name: str
    origin: Literal["dense", "ours", "peer"]
    builder: Callable[[Setup], LossFunction]
    package: str = ""
    default: bool = False
    alone: bool = True
    ranks: bool = False
    softcap: bool = False
    entropy: bool = False
    on_cpu: bool = True
    exact: bool = True

    @property
    def is_ours(self) -> bool:
        return self.origin == "ours"

    def build(self, setup: Setup) -> LossFunction:
        """Returns the loss. A peer may raise anything here; that is reported in a row.

        Raises:
            NotImplementedError: the method takes no softcap, or no entropy bonus.
        """
        if setup.softcap is not None and not self.softcap:
            raise NotImplementedError(f"{self.name} takes no softcap, as the benchmark calls it")
        if setup.entropy_bonus and not self.entropy:
            raise NotImplementedError(f"{self.name} differentiates no entropy here")
        return self.builder(setup)


def _build_ours(options: Mapping[str, Any], setup: Setup) -> LossFunction:
    if setup.entropy_bonus:
        return _with_entropy(options, setup)
    return _our_loss(options, setup)


def _with_entropy(options: Mapping[str, Any], setup: Setup) -> LossFunction:
    loss = _our_loss({**options, "stats": ("entropy",)}, setup)

    def with_bonus(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        out = loss(hidden, weight, targets)
        return out.loss - setup.entropy_bonus * mean_of(out.entropy, targets)

    return with_bonus


def _our_loss(options: Mapping[str, Any], setup: Setup) -> LinearCrossEntropy:
    return LinearCrossEntropy(
        backend=setup.backend,
        softcap=setup.softcap,
        group=setup.group,
        sequence_parallel=setup.place is not None and setup.place.sequence_parallel,
        **options,
    )


def _compiled(setup: Setup) -> LossFunction:
    """Returns `filtered`, compiled into one graph as in a compiled model."""
    return torch.compile(_our_loss({"gradient": "filtered"}, setup), fullgraph=True)


def _with_copy(setup: Setup) -> LossFunction:
    """Returns `screened` with a weight that is quantised once, at the first call."""
    quantized: QuantizedWeight | None = None
    screened = _our_loss({"logits": "screened"}, setup)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        nonlocal quantized
        if quantized is None:
            quantized = quantize_weight(weight, hidden, backend=setup.backend)
        return screened(hidden, weight, targets, quantized_weight=quantized)

    return loss


def _with_statistics(stats: tuple[Stat, ...], logits: str, setup: Setup) -> LossFunction:
    """Returns the loss, by full or screened logits, with statistics of each token beside it."""
    loss = _our_loss({"gradient": "filtered", "logits": logits, "stats": stats}, setup)
    return lambda *tensors: loss(*tensors).loss


def _ours(
    name: str, options: Mapping[str, Any], *, default: bool = False, entropy: bool = False
) -> Method:
    build = partial(_build_ours, options)
    return Method(name, "ours", build, "", default, ranks=True, softcap=True, entropy=entropy)


def _peer(
    name: str, builder: Callable[[Setup], LossFunction], package: str = "", **flags: bool
) -> Method:
    return Method(name, "peer", builder, package, **flags)


STATISTICS: dict[str, tuple[Stat, ...]] = {
    "entropy": ("entropy",),
    "sum_p2": ("sum_p2",),
    "correct": ("correct",),
    "entropy-correct": ("entropy", "correct"),
    "moments": ("logit_moments",),
    "statistics": ("lse", "entropy", "sum_p2", "correct", "logit_moments"),
}
# In the order in which they are measured. Peers with a compiler of their own come last: they are
# the likeliest to end a process.
_METHODS = (
    Method("dense", "dense", dense, default=True, ranks=True, softcap=True, entropy=True),
    _ours("filtered", {"gradient": "filtered"}, default=True, entropy=True),
    _ours("exact", {"gradient": "exact"}, default=True, entropy=True),
    _ours("in_forward", {"gradient": "in_forward"}, default=True),
    _ours("in_forward-exact", {"gradient": "in_forward", "filter": Filter(keep=0)}),
    _ours("exact-kept", {"gradient": "exact", "keep_logits": True, "workspace_bytes": MEMORY}),
    _ours("invariant", {"invariant": True}, entropy=True),
    # 8-bit logits where they don't matter.
    _ours(SCREENED, {"logits": "screened"}),
    _ours("screened-e4m3", {"logits": "screened", "screen": Screen(dtype="e4m3")}),
    # The backward computes the exact logits anew.
    _ours("screened-again", {"logits": "screened", "keep_logits": False}),
    _ours("screened-keep-2^-9", {"logits": "screened", "filter": Filter(keep=2.0**-9)}),
    _ours("screened-in-forward", {"logits": "screened", "gradient": "in_forward"}),
    # With an existing 8-bit copy of the weight.
    Method("screened-copy", "ours", _with_copy, softcap=True),
    *(
        Method(f"{mode}-{name}", "ours", partial(_with_statistics, stats, logits), softcap=True)
        for mode, logits in (("filtered", "full"), (SCREENED, SCREENED))
        for name, stats in STATISTICS.items()
    ),
    # Within torch.compile(fullgraph=True).
    Method("filtered-compiled", "ours", _compiled, ranks=True, softcap=True, on_cpu=False),
    _peer("torch-compile", peers.compiled_dense, softcap=True, entropy=True),
    _peer("cce", partial(peers.apple, "cce"), APPLE, ranks=True, softcap=True, exact=False),
    _peer(
        *("cce-kahan-full-c", partial(peers.apple, "cce_kahan_full_c"), APPLE),
        softcap=True,
        exact=False,
    ),
    _peer("cce-exact", partial(peers.apple, "cce_exact"), APPLE, ranks=True, softcap=True),
    _peer("flash-attn", peers.flash_attention, "flash-attn"),
    _peer("liger-8", partial(peers.liger, 8), LIGER, softcap=True),
    _peer("liger", partial(peers.liger, None), LIGER, softcap=True),
    _peer("liger-tp", peers.liger_tp, LIGER, alone=False, ranks=True),
    _peer("liger-logits", peers.liger_logits, LIGER, alone=False, ranks=True),
    # With what TRL's SFTTrainer logs beside the loss: by TRL, and by cce_dist.integrations.trl.
    _peer("trl", partial(peers.trl, None), "trl", softcap=True),
    Method("trl-ours", "ours", partial(peers.trl, "full"), "trl", softcap=True),
    Method("trl-screened", "ours", partial(peers.trl, SCREENED), "trl", softcap=True),
    _peer("fla-16bit", partial(peers.fla, False), FLA),
    _peer("fla", partial(peers.fla, True), FLA),
    _peer("torchtune-8", peers.chunked_by_autograd),
    _peer("torchtitan-8", peers.chunked_in_forward),
    _peer("unsloth", peers.unsloth, "unsloth-zoo"),
    _peer("mgmalek-8", peers.mgmalek),
    _peer("verl", peers.verl, "verl", ranks=True),
    _peer("transformer-engine", peers.transformer_engine, "transformer-engine", ranks=True),
    _peer("megatron-fused", peers.megatron_fused, MEGATRON, alone=False, ranks=True),
    _peer("megatron", peers.megatron, MEGATRON, ranks=True),
    # Needs neither a GPU nor a compiler.
    _peer("torch-chunked", peers.torch_chunked, default=True),
    _peer("liger-sm90-logits", peers.liger_sm90_logits, LIGER),
    _peer("liger-sm90", peers.liger_sm90, LIGER),
    _peer("quack", peers.quack, "quack-kernels"),
)
METHODS = {method.name: method for method in _METHODS}


def parse_backend(text: str) -> Backend:
    """Returns the backend of this name.

    Raises:
        ValueError: there is no backend of this name.
    """
    for known in get_args(Backend):
        if text == known:
            return known
    raise ValueError(f"backend must be one of {list(get_args(Backend))}, got {text!r}")


def choose_methods(
    names: Sequence[str] = (),
    peer_names: str | None = None,
    *,
    extra: Sequence[str] = (),
    on_gpu: bool = False,
    ranks: bool = False,
) -> list[Method]:
    """Returns the methods to measure, in the registry's order.

    Args:
        names: only these methods, peers included; empty: the default ones, without peers.
        peer_names: "all", "none", or names with commas. None: "none" if there are `names`; else
            "all" on a GPU, and elsewhere the default ones.
        extra: further peers, each "NAME=MODULE:FUNCTION", whose FUNCTION is a LossFunction. They
            get no softcap.
        ranks: of the methods for ranks that share the vocabulary; False: for a rank that has it.
    Raises:
        ValueError: a name is unknown or cannot run here, or `extra` is malformed.
    """
    added = [_parse_extra(text) for text in extra]
    every = [*METHODS.values(), *added]
    known = {each.name: each for each in every if (each.ranks if ranks else each.alone)}
    all_peers = [each for each in known.values() if each.origin == "peer"]
    if peer_names is None:
        wanted_peers = [each.name for each in all_peers if not names and (on_gpu or each.default)]
    elif peer_names == "all":
        wanted_peers = [each.name for each in all_peers]
    else:
        wanted_peers = [name for name in peer_names.split(",") if name and peer_names != "none"]
    default = [each.name for each in known.values() if each.default and each.origin != "peer"]
    wanted = {*(names or default), *wanted_peers, *(method.name for method in added)}
    unknown = sorted(wanted - set(known))
    if unknown:
        raise ValueError(f"methods and peers must be among {sorted(known)}, got {unknown}")
    chosen = [method for name, method in known.items() if name in wanted]
    for method in chosen:
        if not (method.on_cpu or on_gpu):
            raise ValueError(
                f"method {method.name} needs a GPU: torch.compile cannot trace the dispatch mode "
                "that counts memory on a CPU"
            )
    return chosen


def _parse_extra(text: str) -> Method:
    name, equals, target = text.partition("=")
    module, colon, function = target.partition(":")
    if not (name and equals and module and colon and function):
        raise ValueError(f"extra must be NAME=MODULE:FUNCTION, got {text!r}")
    return Method(name, "peer", lambda setup: resolve_name(target), softcap=True)


def describe_peers(names: Iterable[str]) -> dict[str, str]:
    """Returns the packages of peers' methods with their versions; empty if there are none.

    A package in a folder on Python's path has the version of the *.dist-info beside it.
    """
    packages = {METHODS[name].package for name in names if name in METHODS} - {""}
    versions = [f"{package} {version_of(package, 'unknown')}" for package in sorted(packages)]
    return {"peers": ", ".join(versions)} if versions else {}


class DeviceLostError(RuntimeError):
    """The method `name` broke the CUDA context; nothing else can run in this process."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


def describe_failure(error: BaseException) -> str:
    """Returns the exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:MAX_REASON_CHARS]


def recover(name: str, reason: str, device: torch.device) -> None:
    """Frees the memory that a failed method held.

    Raises:
        DeviceLostError: the device takes no more work.
    """
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        raise DeviceLostError(name, reason) from None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the context after `seconds`; with 0 it never does.

    The error comes between two Python instructions.
    """

    def interrupt(signal_number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    if not seconds:
        yield
        return
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def restart_without(error: DeviceLostError) -> None:
    """Starts the command again in a fresh process, since this one's CUDA context is gone."""
    print(f"the device was lost in {error}; starting again without it", file=sys.stderr)
    again = [*sys.argv[1:], "--failed", f"{error.name}={error.reason}"]
    os.execv(sys.executable, [sys.executable, "-m", "cce_dist", *again])
