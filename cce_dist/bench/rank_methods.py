"""Places of ranks that share the vocabulary, the dense recipe there, and what a filter keeps there.

A loss over ranks has the signature of a loss of one rank:
(hidden [n, D], rows of weight [V / W, D], targets [N]) -> mean loss of all N tokens
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import VocabShard
from cce_dist.options import TOKEN_BLOCK, Backend
from cce_dist.ranks.gather import gather_tokens
from cce_dist.ranks.hidden_sum import reduce_grad_hidden

from .golden import LossFunction, dense_loss, mean_of
from .inputs import BenchInputs
from .machine import variant_of

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


@dataclass(frozen=True)
class Setup:
    """Settings that a benchmark builds all of its methods with.

    Args:
        backend: of our methods.
        softcap: of the logits; None: no softcap. Only for a rank with the whole vocabulary.
        entropy_bonus: of the mean entropy, subtracted from the loss. Only for such a rank, too.
        place: of this rank among ranks that share the vocabulary; None: this rank has all of it.
    """

    backend: Backend = "auto"
    softcap: float | None = None
    entropy_bonus: float = 0.0
    place: Place | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.place is None else self.place.group


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


def all_tokens(hidden: Tensor, place: Place | None) -> Tensor:
    """Returns the hidden states [N, D] of all tokens, whose gradient is summed over the ranks."""
    return hidden if place is None else _AllTokens.apply(hidden, place)


def logits_of(hidden: Tensor, weight: Tensor, place: Place | None) -> Tensor:
    """Returns this rank's columns of the logits [N, V / W], in the inputs' dtype."""
    return all_tokens(hidden, place) @ weight.T


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


def dense(setup: Setup) -> LossFunction:
    """Returns the dense recipe: logits in the inputs' dtype, softcap and softmax in fp32."""
    place = setup.place
    if place is None:
        return functools.partial(
            dense_loss, softcap=setup.softcap, entropy_bonus=setup.entropy_bonus
        )

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        nll = _DenseNll.apply(logits_of(hidden, weight, place), targets, place)
        return mean_of(nll, targets)  # pyright: ignore[reportArgumentType]

    return loss


def kept_share(function: LossFunction, inputs: BenchInputs, *, exchanges: bool) -> float | None:
    """Returns the share of pairs of this rank's columns and token blocks that `function` keeps.

    None: the loss has no filter of the Triton backend. All ranks of the group must call this, after
    a call of `function` that has compiled its kernels.

    Args:
        exchanges: False: measure as if ranks did not exchange their bounds of each token's lse.
    """
    variant = variant_of(function, inputs, "forward")
    exchanging = nullcontext() if exchanges else _without_exchanges()
    with marks_seen() as seen, exchanging, variant.prepared() as call:
        call()
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
