"""Losses over a vocabulary that ranks share, each behind one signature.

(hidden [n, D], rows of weight [V / W, D], targets [N]) -> mean loss of all N tokens
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import LinearCrossEntropy, VocabShard
from cce_dist.options import TOKEN_BLOCK, Backend, GradientMode, LogitsMode
from cce_dist.ranks.gather import gather_tokens
from cce_dist.ranks.hidden_sum import reduce_grad_hidden

from .golden import LossFunction
from .inputs import IGNORE_INDEX, BenchInputs
from .machine import variant_of
from .methods import COMPILED, OURS, SCREENED
from .peers import mean_of

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """The place of this rank in a group that shares the vocabulary, and maybe the tokens."""

    group: dist.ProcessGroup
    shard: VocabShard
    sequence_parallel: bool = False

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rows(self) -> slice:
        """Returns this rank's rows of the vocabulary."""
        return slice(self.shard.start, self.shard.stop)


class _AllTokens(torch.autograd.Function):
    """The input of a column-parallel product, which is the hidden states of all tokens.

    Its gradient is summed over the ranks in its own dtype, as in Megatron's layer.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return (
            gather_tokens(hidden, place.group)
            if place.sequence_parallel
            else hidden.view_as(hidden)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad, place = grads[0].contiguous(), ctx.place
        scatter, dtype = place.sequence_parallel, grad.dtype
        return reduce_grad_hidden(grad, place.group, scatter=scatter, dtype=dtype), None


def _logits(hidden: Tensor, weight: Tensor, place: Place) -> Tensor:
    """Returns this rank's columns of the logits [N, V / W], in the inputs' dtype."""
    return _AllTokens.apply(hidden, place) @ weight.T


def ours(mode: GradientMode, logits: LogitsMode, backend: Backend, place: Place) -> LossFunction:
    loss = LinearCrossEntropy(
        gradient=mode,
        logits=logits,
        backend=backend,
        group=place.group,
        sequence_parallel=place.sequence_parallel,
    )
    return loss  # pyright: ignore[reportReturnType]


def compiled_over_ranks(backend: Backend, place: Place) -> LossFunction:
    return torch.compile(ours("filtered", "full", backend, place), fullgraph=True)


class _DenseNll(torch.autograd.Function):
    """-log p of each target from a rank's columns of the logits.

    The gradient overwrites the logits.

    Collectives: all-reduces of [N] (maximum) and of [2, N] (sum of exponentials, target logit).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, place: Place) -> Tensor:
        wide = logits.float() if logits.dtype != torch.float64 else logits.clone()
        top = wide.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=place.group)
        wide -= top[:, None]
        local = targets - place.rows.start
        mine = (local >= 0) & (local < wide.shape[1])
        local = local.clamp(0, wide.shape[1] - 1)
        logit = wide.gather(1, local[:, None])[:, 0].masked_fill(~mine, 0)
        sums = torch.stack([wide.exp_().sum(-1), logit])
        dist.all_reduce(sums, group=place.group)
        wide /= sums[0][:, None]
        ctx.save_for_backward(wide, local, mine)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        p, local, mine = ctx.saved_tensors
        p[torch.arange(len(p), device=p.device), local] -= mine.to(p.dtype)
        return p.mul_(grads[0][:, None]).to(ctx.dtype), None, None


def dense(place: Place) -> LossFunction:
    """Returns the dense recipe over ranks: logits in the inputs' dtype, softmax in fp32."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        nll = _DenseNll.apply(_logits(hidden, weight, place), targets, place)
        return mean_of(nll, targets)  # pyright: ignore[reportArgumentType]

    return loss


def apple(impl: str, place: Place) -> LossFunction:
    """Returns Apple's Cut Cross-Entropy, vocab-parallel."""
    module = importlib.import_module("cut_cross_entropy")
    options = importlib.import_module("cut_cross_entropy.vocab_parallel").VocabParallelOptions
    split = options(place.rows.start, place.rows.stop, place.group)
    return functools.partial(
        module.linear_cross_entropy,
        ignore_index=IGNORE_INDEX,
        impl=impl,
        vocab_parallel_options=split,
    )


def verl(place: Place) -> LossFunction:
    """Returns verl's Triton kernel.

    The kernel does not sum the hidden gradient over ranks; this loss does.
    """
    function = importlib.import_module(
        "verl.utils.kernel.linear_cross_entropy"
    ).linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        hidden = _AllTokens.apply(hidden, place)  # pyright: ignore
        log_p, _ = function(hidden, weight, targets.clamp(min=0), 1.0, "none", place.group)
        return mean_of(-log_p, targets)

    return loss


def liger(place: Place) -> LossFunction:
    """Returns Liger's tensor-parallel loss, for an install without its native kernels."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module.LigerFusedLinearScaledCrossEntropyTPFunction

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return mean_of(function.apply(hidden, weight, targets, place.group), targets)

    return loss


def liger_logits(place: Place) -> LossFunction:
    """Returns Liger's vocab-parallel kernel on a rank's logits."""
    module = importlib.import_module("liger_kernel.transformers.vocab_parallel_cross_entropy")
    cross_entropy = module.LigerVocabParallelCrossEntropy(
        ignore_index=IGNORE_INDEX, reduction="none"
    )

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = _logits(hidden, weight, place)[:, None]
        return mean_of(cross_entropy(logits, targets[:, None], place.group).flatten(), targets)

    return loss


def megatron(fused: bool, place: Place) -> LossFunction:
    """Returns one of Megatron-core's native losses on a rank's logits."""
    if fused:
        module = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
        function = module.fused_vocab_parallel_cross_entropy
    else:
        module = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")
        function = functools.partial(module.vocab_parallel_cross_entropy, label_smoothing=0.0)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = _logits(hidden, weight, place)[:, None]
        nll = function(logits, targets.clamp(min=0)[:, None], tp_group=place.group)
        return mean_of(nll.flatten(), targets)

    return loss


def transformer_engine(place: Place) -> LossFunction:
    module = importlib.import_module("transformer_engine.pytorch.cross_entropy")
    function = module.parallel_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = _logits(hidden, weight, place)[None]
        nll = function(logits, targets[None], 0.0, False, place.group, IGNORE_INDEX)
        return mean_of(nll.flatten(), targets)

    return loss


@dataclass(frozen=True)
class RankMethod:
    """A loss over ranks by name; `build` makes the loss of one place, and may import a peer."""

    name: str
    is_ours: bool
    build: Callable[[Place], LossFunction]


PEERS: dict[str, Callable[[Place], LossFunction]] = {
    "cce": functools.partial(apple, "cce"),
    "cce-exact": functools.partial(apple, "cce_exact"),
    "verl": verl,
    "liger-tp": liger,
    "liger-logits": liger_logits,
    "megatron-fused": functools.partial(megatron, True),
    "megatron": functools.partial(megatron, False),
    "transformer-engine": transformer_engine,
}


def choose_rank_methods(
    names: Sequence[str], peers: str, *, backend: Backend = "auto"
) -> list[RankMethod]:
    """Returns the methods to measure, ours first.

    Args:
        names: only these methods, peers included; empty: the dense recipe and ours.
        peers: "all", "none", or names with commas.
    Raises:
        ValueError: a name is unknown.
    """
    known = {
        mode: RankMethod(mode, True, functools.partial(ours, mode, "full", backend))
        for mode in OURS
    }
    in_8_bits = functools.partial(ours, "filtered", "screened", backend)
    known[SCREENED] = RankMethod(SCREENED, True, in_8_bits)
    for_all = functools.partial(compiled_over_ranks, backend)
    known[COMPILED] = RankMethod(COMPILED, True, for_all)
    known["dense"] = RankMethod("dense", False, dense)
    known |= {name: RankMethod(name, False, build) for name, build in PEERS.items()}
    asked = list(PEERS) if peers == "all" else [] if peers == "none" else peers.split(",")
    wanted = {*(names or (*OURS, "dense")), *asked}
    unknown = sorted(wanted - set(known))
    if unknown:
        raise ValueError(f"methods and peers must be among {sorted(known)}, got {unknown}")
    return [method for name, method in known.items() if name in wanted]


def kept_share(function: LossFunction, inputs: BenchInputs, *, exchanges: bool) -> float | None:
    """Returns the share of pairs of this rank's columns and token blocks that `function` keeps.

    None: the loss has no filter of the Triton backend. All ranks of the group must call this, after
    a call of `function` that has compiled its kernels.

    Args:
        exchanges: False: measure as if ranks did not exchange their bounds of each token's lse.
    """
    variant = variant_of(function, inputs, "forward")
    with marks_seen() as seen, nullcontext() if exchanges else _without_exchanges():
        variant.run(variant.prepare())
    variant.finish()
    if not seen:
        return None
    num_blocks = -(-len(inputs.targets) // TOKEN_BLOCK)
    return sum(bits_set(marks.kept) / (len(marks.kept) * num_blocks) for marks in seen) / len(seen)


def bits_set(words: torch.Tensor) -> int:
    """Returns the number of bits that are set in [V, words] int64."""
    lanes = torch.arange(64, device=words.device)
    return sum(int(((chunk[..., None] >> lanes) & 1).sum()) for chunk in words.split(2**15))


@contextmanager
def marks_seen() -> Iterator[list[Any]]:
    """Yields a list that gets the marks of every forward of the Triton backend in the context."""
    seen: list[Any] = []
    if importlib.util.find_spec("triton") is None:
        # Without Triton there are no kernels that could mark columns.
        yield seen
        return
    module = importlib.import_module("cce_dist.backends.triton.stats")
    with patch.object(module, "marks_of", _collecting(module.marks_of, seen)):
        yield seen


def _collecting(function: Callable[P, T], results: list[T]) -> Callable[P, T]:
    """Returns a function that calls `function` and appends each of its results to `results`."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        result = function(*args, **kwargs)
        results.append(result)
        return result

    return call


@contextmanager
def _without_exchanges() -> Iterator[None]:
    # Ranks with columns read EXCHANGES in one module, ranks with an empty shard in the other.
    stats = importlib.import_module("cce_dist.backends.triton.stats")
    empty_shard = importlib.import_module("cce_dist.backends.empty_shard")
    with patch.object(stats, "EXCHANGES", ()), patch.object(empty_shard, "EXCHANGES", ()):
        yield
