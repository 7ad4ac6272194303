"""Logits of token ids that a caller lists: a support, or candidates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.algorithm.once import without_autocast
from cce_dist.algorithm.pairs import PairLogits, call_of_pairs, largest_over_ranks
from cce_dist.algorithm.plan import plan_of
from cce_dist.core.segments import spread_segments
from cce_dist.core.tracing import is_fake, is_traced, unseen_by_checkpointing
from cce_dist.core.types import Pairs, accumulate_dtype
from cce_dist.frontend import validation
from cce_dist.frontend.dtensor import is_dtensor
from cce_dist.frontend.inputs import Inputs
from cce_dist.frontend.prepare import Entered, enter, validate
from cce_dist.options import LossOptions
from cce_dist.ranks.gather import require
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group


class TokenSupport(NamedTuple):
    """The token ids that a sampler allowed at each token: a CSR of N rows, the tokens of targets
    in flattened order. A repeated id of a token counts once.

    Of a mask `allowed` [N, V]: offsets = pad(allowed.sum(1).cumsum(0), (1, 0)), and
    ids = allowed.nonzero()[:, 1]. Of K ids a token, [N, K]: offsets = arange(N + 1) * K, and
    ids = ids.reshape(-1). Every rank passes all of them.
    """

    offsets: Tensor  # [N + 1] int64: token i has ids[offsets[i] : offsets[i + 1]]
    ids: Tensor  # [P] int64 in [0, vocab_size), in any order


@dataclass(frozen=True)
class Listed:
    """One call: its tokens, and a function that computes logits of pairs."""

    shape: torch.Size  # targets'
    rows: Tensor  # [N] int64: each token's row of hidden; -1: it does not count
    targets: Tensor  # [N] int64, 0 at tokens that do not count
    vocab_size: int
    options: LossOptions
    is_wide: bool  # inputs are fp32
    scale: Tensor | None  # [N] 1 / temperature
    products: Callable[[Pairs], Tensor]  # hidden . weight + bias, [P]
    # k, rows of hidden [n] -> the k largest logits over all ranks, without the tokens' scale, and
    # their ids, [n, k]
    largest: Callable[[int, Tensor], tuple[Tensor, Tensor]]
    wrap: Callable[[Tensor], Tensor]  # a result as the caller's other results: a DTensor or plain

    @property
    def counts(self) -> Tensor:
        return self.rows >= 0

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns the ids of the k largest logits and the logits, [N, k], of tokens that count. The
        host waits for their number."""
        counting = self.counts.nonzero()[:, 0]
        values, ids = self.largest(k, self.rows[counting])
        if self.scale is not None:
            values = values * self.scale.detach()[counting, None]
        shape = (len(self.rows), k)
        return (
            ids.new_zeros(shape).index_copy_(0, counting, ids),
            values.new_zeros(shape).index_copy_(0, counting, values),
        )

    def logits(self, ids: Tensor, offsets: Tensor, token_of: Tensor, order: Tensor) -> Tensor:
        """Computes the logits of pairs, [P], differentiable by hidden, weight, bias, temperature.

        Args:
            ids: [P] in [0, vocab_size). offsets, token_of: the tokens of the pairs, as in
                `reduce_segments`. order: [P], the pairs sorted by id, stably.
        """
        z = self.products(Pairs(self.rows[token_of], ids, offsets, order))
        softcap = self.options.softcap
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        if self.options.logit_scale != 1:
            z = z * self.options.logit_scale
        if self.scale is None:
            return z
        # A bias of -inf would make the scale's gradient NaN: 0 times -inf.
        is_out = z == -torch.inf
        scaled = z.masked_fill(is_out, 0) * spread_segments(self.scale, offsets, token_of)
        return scaled.masked_fill(is_out, -torch.inf)

    def result(self, values: Tensor) -> Tensor:
        """Brings values [N, ...] to targets' (shifted) shape, 0 at tokens that do not count."""
        counts = self.counts.view(-1, *(1 for _ in values.shape[1:]))
        values = values.masked_fill(~counts, 0).view((*self.shape, *values.shape[1:]))
        return self.wrap(self.shifted(values))

    def shifted(self, values: Tensor) -> Tensor:
        """Drops the positions of [*shape, ...] that no hidden state predicts."""
        shift, dim = self.options.shift, len(self.shape) - 1
        if not shift:
            return values
        length = self.shape[dim]
        return values.narrow(dim, min(shift, length), max(length - shift, 0))


def list_tokens(
    inputs: Inputs,
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
) -> Listed:
    """Validates the arguments of `token_logprobs` but for the lists of ids.

    Raises:
        ValueError: an argument is not supported; the message says which.
    """
    targets, temperature = local_of(inputs.targets), local_of(inputs.temperature)
    entered = enter(inputs, options, group, vocab_shard)
    products, largest, vocab_size = _functions(entered)
    counts = targets != options.ignore_index
    if options.shift:
        counts = counts.clone()
        counts[..., : options.shift] = False
    shape, parts = targets.shape, entered.parts
    rows = _rows(targets, options.shift, 0 if parts is None else parts.token_dim)
    targets, counts = targets.reshape(-1), counts.reshape(-1)
    targets = targets.where(counts, 0)
    validation.check_target_range(targets, vocab_size, options.ignore_index)
    scale = None
    if temperature is not None:
        dtype = accumulate_dtype(entered.inputs.hidden.dtype)
        scale = temperature.to(dtype).reshape(-1).where(counts, 1).reciprocal()
        validation.check_scale(scale.detach(), options.logit_scale)
    return Listed(
        shape=shape,
        rows=rows.where(counts, -1),
        targets=targets,
        vocab_size=vocab_size,
        options=options,
        is_wide=entered.inputs.hidden.dtype == torch.float32,
        scale=scale,
        products=products,
        largest=largest,
        wrap=_itself if parts is None else replace(parts, token_dim=0, shift=0).wrap,
    )


def _itself(value: Any) -> Any:
    return value


def local_of(value: Any) -> Any:
    return value.to_local() if is_dtensor(value) else value


def _rows(targets: Tensor, shift: int, token_dim: int) -> Tensor:
    """Returns the row of hidden that predicts each token, [N]; an arbitrary row for a token that no
    hidden state predicts. Args: token_dim: the dim of hidden that was moved to the front."""
    place = torch.arange(targets.numel(), device=targets.device)
    if token_dim:
        moved = place.view(targets.shape).movedim(token_dim, 0).shape
        place = place.view(moved).movedim(0, token_dim).reshape(-1)
    return place.roll(shift) if shift else place


def _functions(
    entered: Entered,
) -> tuple[Callable[[Pairs], Tensor], Callable[[int, Tensor], tuple[Tensor, Tensor]], int]:
    """Returns the functions `Listed.products` and `Listed.largest`, and vocab_size."""
    inputs, options, group, vocab_shard, _ = entered
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    if is_traced() or is_fake(hidden):
        from cce_dist.frontend.compiled_pairs import functions

        return functions(inputs, options, group, vocab_shard)
    ranks, shard, shape = validate(inputs, options, group, vocab_shard)
    call = call_of_pairs(plan_of(hidden, shape.numel(), options, ranks, shard), weight)
    flat = hidden.reshape(-1, hidden.shape[-1])

    def products(pairs: Pairs) -> Tensor:
        with without_autocast(hidden.device.type), unseen_by_checkpointing():
            return PairLogits.apply(
                flat, weight, bias, pairs.rows, pairs.ids, pairs.offsets, pairs.order, call
            )  # pyright: ignore[reportReturnType]

    def largest(k: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), without_autocast(hidden.device.type), unseen_by_checkpointing():
            return largest_over_ranks(flat, rows, call.head(weight, bias), call.plan, k)

    return products, largest, shard.vocab_size


def check_support(support: TokenSupport, listed: Listed) -> None:
    """Checks a support's types, shapes and offsets."""
    offsets, ids = support.offsets, support.ids
    for name, value in (("offsets", offsets), ("ids", ids)):
        _check_ids(f"support.{name}", value, listed)
        if value.dim() != 1:
            raise ValueError(f"support.{name} must have one dim, got {list(value.shape)}")
    tokens, pairs = listed.shape.numel(), ids.shape[0]
    if offsets.shape[0] != tokens + 1:
        raise ValueError(
            f"support.offsets must have shape [N + 1] with N={tokens}, the tokens of targets, got "
            f"{list(offsets.shape)}"
        )
    rule = "support.offsets must rise from 0 to the number of ids"
    rises = (offsets[0] == 0) & (offsets[-1] == pairs) & (offsets.diff() >= 0).all()
    require(rises, lambda: f"{rule}, {pairs}, got {_shown(offsets)}", rule)


def is_everything(support: TokenSupport, listed: Listed) -> bool:
    """Tells whether a support lists the whole vocabulary at every token: then the loss's own
    kernels compute its softmax. Any other support must have its ids in [0, vocab_size).

    On a GPU the host does not wait, nor does a compiled graph: N V ids are taken for everything,
    and an assertion fails unless each token has every id.
    """
    tokens, width = listed.shape.numel(), listed.vocab_size
    offsets, ids = support
    if not tokens or ids.shape[0] != tokens * width:
        check_range("support.ids", ids, width)
        return False
    waits = ids.device.type == "cpu" and not is_fake(ids) and not is_traced()
    if waits:
        check_range("support.ids", ids, width)
    even = (offsets == torch.arange(tokens + 1, device=offsets.device) * width).all()
    inside = ((ids >= 0) & (ids < width)).all()
    of_token = ids.clamp(0, width - 1).view(tokens, width)
    has = torch.zeros(tokens, width, dtype=torch.bool, device=ids.device)
    complete = even & inside & has.scatter(1, of_token, True).all()
    if waits:
        return bool(complete)
    torch._assert_async(complete, "a support of N V ids must list each id once at each token")
    return True


def check_candidates(candidates: Tensor, listed: Listed, name: str = "candidates") -> Tensor:
    """Checks candidates [..., K]; returns them as [N, K], 0 at tokens that do not count."""
    _check_ids(name, candidates, listed)
    if candidates.dim() != len(listed.shape) + 1 or candidates.shape[:-1] != listed.shape:
        raise ValueError(
            f"{name} must have targets' shape {list(listed.shape)} and a last dim K, got "
            f"{list(candidates.shape)}"
        )
    flat = candidates.reshape(listed.shape.numel(), candidates.shape[-1])
    flat = flat.where(listed.counts[:, None], 0)
    check_range(name, flat, listed.vocab_size)
    return flat


def _check_ids(name: str, value: object, listed: Listed) -> None:
    tensor = validation.require_tensor(name, value)
    if is_dtensor(tensor):
        raise ValueError(f"{name} must be a plain tensor, the same on every rank, got a DTensor")
    if tensor.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {tensor.dtype}")
    if tensor.device != listed.rows.device:
        raise ValueError(
            f"{name} must be on targets' device {listed.rows.device}, got {tensor.device}"
        )


def check_range(name: str, ids: Tensor, vocab_size: int) -> None:
    if ids.numel() == 0:
        return
    low, high = torch.aminmax(ids)
    rule = f"{name} must lie in [0, vocab_size={vocab_size})"
    inside = (low >= 0) & (high < vocab_size)
    require(inside, lambda: f"{rule}, got values from {int(low)} to {int(high)}", rule)


def _shown(offsets: Tensor) -> str:
    values = offsets.tolist()
    return str(values if len(values) <= 8 else [*values[:4], "...", *values[-3:]])


def tokens_of(offsets: Tensor, pairs: int) -> Tensor:
    """Returns the token of each pair, [P]. The host does not wait."""
    tokens = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return tokens.repeat_interleave(offsets.diff(), output_size=pairs)


def candidate_logprobs(
    listed: Listed,
    candidates: Tensor,  # [N, K]
    lse: Tensor,  # [...] of the loss, and each target's
    nll: Tensor,
    brought: Callable[[Tensor], Tensor],  # brings values [N, K] to [..., K]
) -> Tensor:
    """Computes the log-probabilities of candidates, [..., K], differentiable by logits and lse."""
    if not listed.is_wide:
        return brought(_candidate_logits(listed, candidates)) - lse[..., None]
    with_target = torch.cat([listed.targets[:, None], candidates], 1)
    logits = brought(_candidate_logits(listed, with_target))
    return beside_target(logits[..., 1:], logits[..., :1].detach(), lse, nll)


def beside_target(logits: Tensor, of_target: Tensor, lse: Tensor, nll: Tensor) -> Tensor:
    """Computes logits - lse, [..., K], of fp32 inputs. Args: of_target: [..., 1] the target's
    logit, by the products that have made `logits`."""
    # Of logits near 300 the forward's products, these and lse in fp32 differ by 1e-5 each. nll has
    # none of these roundings, and counts where the target has most of the mass.
    near = (logits - of_target) - (nll.detach() + (lse - lse.detach()))[..., None]
    return torch.where((nll < math.log(2))[..., None], near, logits - lse[..., None])


def _candidate_logits(listed: Listed, candidates: Tensor) -> Tensor:
    """Computes the logits of candidates [N, K]: [N, K]."""
    tokens, width = candidates.shape
    offsets = torch.arange(tokens + 1, device=candidates.device) * width
    ids, token_of = candidates.reshape(-1), tokens_of(offsets, tokens * width)
    order = torch.sort(ids, stable=True).indices
    return listed.logits(ids, offsets, token_of, order).view(tokens, width)
