"""The public function: validation, reductions and weights around the four steps of `sharded`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cce_dist import agreement, validation
from cce_dist.autograd import Call, InForward, TwoPass
from cce_dist.collectives import group_rank, group_size, resolve_group
from cce_dist.dtensor import arrived, is_dtensor, local_parts
from cce_dist.local import choose_backend
from cce_dist.options import Backend, Filter, GradientMode, LogitsMode, LossOptions, Reduction, Stat
from cce_dist.partials import Wanted
from cce_dist.reduction import PickedTokens, TokenLoss, pick_tokens
from cce_dist.sharded import Plan
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class LogitMoments(NamedTuple):
    """Each token's logits z over the whole vocabulary; not differentiable.

    Fields have targets' (shifted) shape, fp32 (float64 for float64 inputs), 0 at ignored tokens.
    """

    max: Tensor
    mean: Tensor
    variance: Tensor  # population variance: divided by V


class LossOutput(NamedTuple):
    """The loss and the statistics asked for by `stats`; None where not asked for.

    Statistics have targets' (shifted) shape, 0 or False at ignored tokens.
    """

    loss: Tensor
    lse: Tensor | None = None  # natural log-sum-exp of the logits; differentiable
    entropy: Tensor | None = None  # of the softmax, nats; differentiable
    correct: Tensor | None = None  # bool: the largest logit is the target's
    tail_mass: Tensor | None = None  # probability mass whose gradient is approximated
    logit_moments: LogitMoments | None = None


def linear_cross_entropy(
    hidden: Tensor,  # [..., D] bf16 | fp16 | fp32 | float64
    weight: Tensor,  # [V_local, D] as hidden
    targets: Tensor,  # [...] int64, ids of the whole vocabulary
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    bias: Tensor | None = None,  # [V_local] any float dtype
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    shift: int = 0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # as targets
    class_weight: Tensor | None = None,  # [V], the same on every rank
    gradient: GradientMode = "filtered",
    filter: Filter = Filter(),  # noqa: B008 - frozen
    logits: LogitsMode = "full",
    grad_weight_into: Tensor | None = None,  # [V_local, D] fp32 | float64
    stats: tuple[Stat, ...] = (),
    backend: Backend = "auto",
    workspace_bytes: int = 64 * 2**20,
    keep_logits: bool = False,
    check_ranks: bool = False,
) -> Tensor | LossOutput:
    """Cross-entropy of hidden @ weight.T against targets; logits [N, V] never exist in memory.

    With z = logit_scale * softcap * tanh((E . C + bias) / softcap) (without softcap: logit_scale
    * (E . C + bias)), s = label_smoothing, w = class_weight, y the target, the loss of a token is

        token_weight * ((1 - s) w_y nll + s mean_v w_v (lse - z_v) + z_loss lse^2)

    Args:
        weight: or a DTensor placed Shard(0), whose mesh is the group; then hidden, bias and others
            may be DTensors, and so are results and gradients: docs/parallelism.md#dtensor.
        group: the ranks that share the vocabulary; None for one rank. Every rank passes all
            targets of the group and gets the same loss.
        vocab_shard: which token ids this rank's rows are; None splits evenly by rank (Megatron's
            rule). Rows of ids >= vocab_size are padding: no softmax, gradient 0.
        sequence_parallel: hidden is this rank's slice of dim 0, of the same size on every rank;
            its gradient comes back reduce-scattered. Without it hidden is the same on every
            rank and its gradient is all-reduced.
        reduction: "mean" divides by the number of tokens that are not ignored, or by the sum of
            their class weights; by 1 if that is 0, so that a batch without targets has loss 0
            and adds nothing to a sum over data-parallel ranks.
        shift: hidden[..., t, :] predicts targets[..., t + shift]; the last dim of the result is
            T - shift. token_weight goes with targets.
        gradient: "filtered" computes the columns that matter and keeps the mass of the others
            (`filter`); "exact" computes every column; "in_forward" makes the gradients beside the
            loss, which must be a scalar: backend "torch" of every column, with one matrix product
            less, "triton" filtered.
        grad_weight_into: the weight's gradient is added here, and weight.grad stays None.
        stats: any of "lse", "entropy", "correct", "tail_mass", "logit_moments". Where "entropy"
            is differentiated, the backward computes every column. "tail_mass" recomputes what
            is kept once more, and gathers [N] numbers.
        workspace_bytes: bound of the logits and their temporaries in memory at once; at least
            one tile of 128 tokens.
        keep_logits: with gradient="exact" on a GPU, what memory there is from the forward to the
            backward saves time: logits of as many columns as fit the workspace, and the weight's
            gradient, which the forward then allocates, are kept in 16 bits (fp32 for fp32
            inputs) and not computed again. A second backward over a retained graph computes them.
        check_ranks: first compare, bit by bit, what all ranks of the group must share; for
            debugging, on every rank or on none: the host waits. So does CCE_DIST_CHECK_RANKS=1.
    Returns:
        The loss in fp32 (float64 for float64 inputs): [], or targets' (shifted) shape with 0 at
        ignored tokens for reduction "none"; LossOutput if `stats` is not empty.
    Raises:
        ValueError: an argument or a combination is not supported; the message says which.
        RuntimeError: a backward through lse or entropy with gradient="in_forward".
    Collectives on `group`, bytes a rank: forward one all-gather of 8 N + 24 ("in_forward": one a
        chunk of tokens), and 4 N more for label smoothing, 4 N for entropy, 8 N for correct, 16 N
        for moments; one more of 4 N for tail_mass; four of 4 N before it where the Triton
        backend filters. Backward one all-reduce of [N, D] fp32,
        which "in_forward" makes in the forward.
        sequence_parallel: an all-gather of hidden in each, and a reduce-scatter instead of the
        all-reduce.
    Determinism: lse is bitwise equal on all ranks; results are bitwise equal from run to run.
    Differentiable once, by hidden, weight, bias, and token_weight. 16-bit products accumulate in
    fp32. Under autocast hidden and weight are cast first, as torch's linear does.
    Source: Cut Cross-Entropy, arXiv:2411.09009; docs/numerics.md has the derivations.
    """
    options = LossOptions(
        sequence_parallel=sequence_parallel,
        ignore_index=ignore_index,
        reduction=reduction,
        shift=shift,
        softcap=softcap,
        logit_scale=logit_scale,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        gradient=gradient,
        filter=filter,
        logits=logits,
        stats=stats,
        backend=backend,
        workspace_bytes=workspace_bytes,
        keep_logits=keep_logits,
        check_ranks=check_ranks,
    )
    return _compute(
        hidden,
        weight,
        targets,
        options,
        group=group,
        vocab_shard=vocab_shard,
        bias=bias,
        token_weight=token_weight,
        class_weight=class_weight,
        grad_weight_into=grad_weight_into,
    )


def _compute(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: LossOptions,
    *,
    group: ProcessGroup | DeviceMesh | None,
    vocab_shard: VocabShard | None,
    **more: Tensor | None,
) -> Tensor | LossOutput:
    """DTensors' local parts go through the plain loss, and its results come back as DTensors."""
    tensors = {"hidden": hidden, "weight": weight, "targets": targets, **more}
    if not any(map(is_dtensor, tensors.values())):
        return _compute_local(**tensors, options=options, group=group, vocab_shard=vocab_shard)
    parts = local_parts(tensors, options, group, vocab_shard)
    result = _compute_local(
        **parts.tensors, options=parts.options, group=parts.group, vocab_shard=parts.vocab_shard
    )
    return parts.wrap(result)


def _compute_local(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: LossOptions,
    *,
    group: ProcessGroup | DeviceMesh | None,
    vocab_shard: VocabShard | None,
    bias: Tensor | None,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    grad_weight_into: Tensor | None,
) -> Tensor | LossOutput:
    """Validate, compute per-token vectors, reduce."""
    hidden, weight = _autocast(arrived(hidden), arrived(weight))
    process_group = resolve_group(group)
    # Before any check that one rank alone may fail, while the others wait for it.
    if agreement.is_wanted(options):
        weights = {"token_weight": token_weight, "class_weight": class_weight}
        agreement.check_ranks(process_group, hidden, weight, targets, options, bias, weights)
    validation.check_hidden_and_weight(hidden, weight)
    rank, world_size = group_rank(process_group), group_size(process_group)
    shape = validation.check_targets(targets, hidden, options, world_size)
    shard = validation.check_shard(vocab_shard, weight, rank, world_size)
    validation.check_vector("bias", bias, [weight.shape[0]], "V_local, from weight", hidden)
    validation.check_weights(token_weight, class_weight, shape, shard, hidden, options)
    validation.check_grad_weight_into(grad_weight_into, weight, weight.requires_grad)

    backend = choose_backend(options, hidden, targets.numel(), shard.num_classes)
    picked = pick_tokens(targets, options, count_on_device=backend.counts_on_device)
    validation.check_target_range(picked.targets, shard.vocab_size, options.ignore_index)
    terms = TokenLoss.of(picked, options, shape, token_weight, class_weight, hidden)
    call = Call(
        plan=Plan(
            options=options,
            shard=shard,
            group=process_group,
            backend=backend,
            wanted=_wanted(options),
            threshold=options.filter.threshold(
                str(hidden.dtype).removeprefix("torch."),
                shard.vocab_size,
                ordered_tokens=targets.numel() if backend.orders_tokens else None,
            ),
        ),
        rows=None if picked.rows is None else _narrow(picked.rows, targets.numel()),
        local_targets=_narrow(_local_targets(picked, shard), shard.vocab_size),
        count=picked.count,
        device_type=hidden.device.type,
        class_weight=_slice_of(class_weight, shard),
        grad_weight_into=grad_weight_into,
        tail_mass="tail_mass" in options.stats,
        record=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (hidden, weight, bias)),
    )
    with torch.autocast(hidden.device.type, enabled=False):
        flat = hidden.reshape(-1, hidden.shape[-1])
        if options.gradient == "in_forward" and call.record:
            loss, lse, entropy, *plain = InForward.apply(flat, weight, bias, call, terms.total)
        else:
            nll, lse, smooth, entropy, *plain = TwoPass.apply(flat, weight, bias, call)
            loss = terms.per_token(nll, lse, smooth, slice(None))
            if options.reduction == "none":
                loss = picked.spread(loss, shape, options.shift)
            else:
                loss = loss.sum()
        if not options.stats:
            return loss
        return _output(loss, lse, entropy, plain, picked, shape, shard, options)


def _autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast hidden and weight in its dtype; float64 is left alone, as autocast does."""
    if not isinstance(hidden, Tensor) or not isinstance(weight, Tensor):
        return hidden, weight
    if not torch.is_autocast_enabled(hidden.device.type) or hidden.dtype == torch.float64:
        return hidden, weight
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype)


def _wanted(options: LossOptions) -> Wanted:
    return Wanted(
        smooth_logit=options.label_smoothing > 0,
        entropy="entropy" in options.stats,
        correct="correct" in options.stats,
        moments="logit_moments" in options.stats,
    )


def _local_targets(picked: PickedTokens, shard: VocabShard) -> Tensor:
    # A shard that is the whole vocabulary holds every target: those are checked.
    whole = shard.num_classes == shard.vocab_size
    local = picked.targets if whole else shard.local_targets(picked.targets)
    counts = picked.counts
    return local if counts is None else local.masked_fill(~counts, -1)


def _narrow(indices: Tensor, size: int) -> Tensor:
    """int64 -> int32 where that holds `size`."""
    return indices.int() if size < 2**31 else indices


def _slice_of(class_weight: Tensor | None, shard: VocabShard) -> Tensor | None:
    if class_weight is None:
        return None
    return class_weight[shard.start : shard.start + shard.num_classes]


def _output(
    loss: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    plain: list[Tensor | None],
    picked: PickedTokens,
    shape: torch.Size,
    shard: VocabShard,
    options: LossOptions,
) -> LossOutput:
    def spread(values: Tensor | None) -> Tensor | None:
        return None if values is None else picked.spread(values, shape, options.shift)

    max_logit, is_argmax, mean, m2, tail = plain
    moments = correct = None
    if max_logit is not None and mean is not None and m2 is not None:
        spread_moments = (spread(x) for x in (max_logit, mean, m2 / shard.vocab_size))
        moments = LogitMoments(*spread_moments)  # pyright: ignore[reportArgumentType]
    if is_argmax is not None:
        correct = spread(is_argmax.bool())
    return LossOutput(
        loss=loss,
        lse=spread(lse) if "lse" in options.stats else None,
        entropy=spread(entropy),
        correct=correct,
        tail_mass=spread(tail),
        logit_moments=moments,
    )


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options bound; holds no weight and no state.

    Args: every keyword of `linear_cross_entropy` that is not a tensor.
    Raises:
        ValueError: an option is out of range, or two exclude each other.
    """

    def __init__(
        self,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        vocab_shard: VocabShard | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        known = LossOptions.__dataclass_fields__
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(
                f"LinearCrossEntropy takes the options {sorted(known)}, got {unknown}: tensors "
                "are passed to forward"
            )
        self.group = group
        self.vocab_shard = vocab_shard
        self.options = LossOptions(**options)  # pyright: ignore[reportArgumentType]

    def forward(
        self,
        hidden: Tensor,  # [..., D]
        weight: Tensor,  # [V_local, D]
        targets: Tensor,  # [...] int64
        *,
        bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        class_weight: Tensor | None = None,
        grad_weight_into: Tensor | None = None,
    ) -> Tensor | LossOutput:
        """See `linear_cross_entropy`."""
        return _compute(
            hidden,
            weight,
            targets,
            self.options,
            group=self.group,
            vocab_shard=self.vocab_shard,
            bias=bias,
            token_weight=token_weight,
            class_weight=class_weight,
            grad_weight_into=grad_weight_into,
        )

    def extra_repr(self) -> str:
        return f"{self.options}"
