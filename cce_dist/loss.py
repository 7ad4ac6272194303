"""The public loss, as a function and as a module."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cce_dist.core.tracing import is_fake, is_traced, unseen_by_checkpointing
from cce_dist.frontend.eager import compute
from cce_dist.frontend.inputs import Inputs, options_of
from cce_dist.frontend.prepare import enter
from cce_dist.frontend.quantized import QuantizedWeight, StepQuantizer
from cce_dist.frontend.reduction import LossOutput
from cce_dist.frontend.validation import require_vocab_shard
from cce_dist.options import (
    Backend,
    Filter,
    GradientMode,
    LogitsMode,
    LossOptions,
    Reduction,
    Screen,
    Stat,
)
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group


def linear_cross_entropy(
    hidden: Tensor,  # [..., D] bf16 | fp16 | fp32 | float64
    weight: Tensor,  # [V_local, D] hidden's dtype
    targets: Tensor,  # [...] int64, ids of the whole vocabulary
    *,
    group: Group | DeviceMesh | None = None,
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
    token_weight: Tensor | None = None,  # targets' shape
    class_weight: Tensor | None = None,  # [V], the same on every rank
    gradient: GradientMode = "filtered",
    filter: Filter = Filter(),  # noqa: B008 - frozen
    logits: LogitsMode = "full",
    screen: Screen = Screen(),  # noqa: B008 - frozen
    quantized_weight: QuantizedWeight | StepQuantizer | None = None,
    grad_weight_into: Tensor | None = None,  # [V_local, D] fp32 | float64
    stats: tuple[Stat, ...] = (),
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
    keep_logits: bool | None = None,
    check_ranks: bool = False,
    invariant: bool = False,
) -> Tensor | LossOutput:
    """Cross-entropy of hidden @ weight.T against targets; logits [N, V] never exist in memory.

    With z = logit_scale * softcap * tanh((E . C + bias) / softcap) (without softcap: logit_scale
    * (E . C + bias)), s = label_smoothing, w = class_weight, y the target, the loss of a token is

        token_weight * ((1 - s) w_y nll + s mean_v w_v (lse - z_v) + z_loss lse^2)

    Args:
        weight: this rank's rows; or a DTensor placed Shard(0), whose mesh gives the group. Then
            hidden, bias and others may be DTensors, and so are results and gradients:
            docs/guide/parallelism.md#dtensor.
        group: the ranks that share the vocabulary; None for one rank. Every rank passes all
            targets of the group and gets the same loss. Over MPI pass an MPIGroup:
            docs/guide/ranks.md#the-loss-over-mpi.
        vocab_shard: the token ids of this rank's rows; None splits evenly by rank (Megatron's
            rule). Rows of ids >= vocab_size are padding: no softmax, gradient 0. A whole head on
            each of W ranks would count W times; the call refuses it where the merge shows it.
        sequence_parallel: hidden is this rank's slice of dim 0, of the same size on every rank;
            its gradient is reduce-scattered. Without it hidden is the same on every rank, and its
            gradient is all-reduced.
        reduction: "mean" divides by the number of tokens that are not ignored, or by the sum of
            their class weights. If that is 0 it divides by 1: a batch without targets has loss 0
            and adds nothing to a sum over data-parallel ranks.
        shift: hidden[..., t, :] predicts targets[..., t + shift]; the last dim of the result is
            max(T - shift, 0). token_weight is shifted with targets.
        gradient: "filtered" computes the columns that matter and keeps the mass of the others
            (`filter`). "exact" computes every column. "in_forward" computes the gradients in the
            forward, and needs a scalar loss. With filter=Filter(keep=0), and on backend "torch"
            with full logits, it computes every column in three products where "exact" takes four,
            in a quarter of the memory of all logits; else it filters.
        logits: "screened" computes all logits in 8 bits, then the logits of columns that the filter
            keeps once more exactly, for the loss too: docs/design/screened.md. It needs
            16-bit hidden and gradient="filtered" or "in_forward". Backend "torch" has it as a
            reference, slower than full logits.
        screen: the 8-bit dtype, and the limits beyond which a call computes full logits instead.
        quantized_weight: `quantize_weight(weight)` or a `StepQuantizer`; without it each call
            quantises the weight, and on a GPU a call of few tokens computes full logits:
            docs/guide/modes.md#when-a-call-is-computed-in-full.
        grad_weight_into: a tensor to which the weight's gradient is added. weight.grad then stays
            None, and DDP does not reduce the gradient.
        stats: any of "lse", "entropy", "correct", "tail_mass", "logit_moments", "screened" and
            "sum_p2"; "lse" and "entropy" are differentiable. "tail_mass" takes an all-gather of
            [N], and with backend "torch" one more pass over kept columns. "screened": whether every
            rank screened its logits. "sum_p2": the log of the sum of squared probabilities.
        workspace_bytes: bound of the logits and their temporaries in memory at once; at least
            64 KiB. None: 64 MiB, and 8 KiB more for each token beyond 8,192, so that the time of a
            token stays the same. With logits="screened" 17 KiB a token if that is more, but at most
            the size of the weight's 8-bit copy, which is freed first. Backend "triton" with
            "in_forward" of every column: the logits of a fifth of the tokens, if that is more.
        keep_logits: on a GPU, keep logits from the forward to the backward, which saves time. With
            gradient="exact" they stay in 16 bits (fp32 for fp32 inputs), as many as fit the
            workspace and the weight's gradient, which the forward then allocates; None: False. With
            logits="screened" as many exact logits as fit the workspace stay; None: True where the
            kernels compute. Use False if many forwards come before their backwards: each would
            hold a workspace. A second backward over a retained graph computes the logits again.
        check_ranks: first check, bit by bit, that all ranks of the group have the same arguments,
            and different rows of weight. It is for debugging: the host waits. Set it on every rank
            or on none. CCE_DIST_CHECK_RANKS=1 does the same.
        invariant: a token's outputs, and its row of the hidden gradient for the same upstream
            gradient, have the same bits in every batch, in any order of tokens, and on 1, 2, 4 and
            8 ranks with shards of one size. Every column has its gradient, as with "exact".
            docs/guide/modes.md#invariant.
    Returns:
        The loss in fp32 (float64 for float64 inputs): []; for reduction "none" targets' (shifted)
        shape, with 0 at ignored tokens. A LossOutput if `stats` is not empty.
    Raises:
        ValueError: an argument or a combination is not supported; the message says which.
        RuntimeError: a backward through lse or entropy with gradient="in_forward".
    Collectives on `group`, bytes a rank (float64: twice as many):
        Forward: one all-gather of 8 N + 32, and 4 N more for label smoothing, 4 N for entropy, 4 N
        for sum_p2, 8 N for correct, 16 N for moments, 4 N for fp32 inputs ("in_forward" of every
        column: one a chunk of tokens, after one of 8 bytes). tail_mass adds one of 4 N. Before them
        come four of 4 N if backend "triton" filters, one if "torch" screens, and on the CPU one of
        40 bytes for the sizes.
        Backward: one all-reduce of [N, D] fp32; or for 16-bit hidden, if W divides N, a
        reduce-scatter, and an all-gather of the sum in 16 bits. With "in_forward" these are in the
        forward.
        sequence_parallel: an all-gather of hidden in forward and backward, and no all-gather of the
        sum. Their order in time: docs/guide/parallelism.md#collectives.
    Determinism: lse is bitwise equal on all ranks; results are bitwise equal from run to run.
    The loss is differentiable once, by hidden, weight, bias and token_weight: the derivative of a
    gradient made with create_graph=True is a RuntimeError. 16-bit products accumulate in fp32.
    Under autocast hidden and weight are cast first, as in torch's linear.
    Source: Cut Cross-Entropy, arXiv:2411.09009; docs/design/loss.md has the derivations.
    """
    options = options_of(
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
        screen=screen,
        stats=stats,
        backend=backend,
        workspace_bytes=workspace_bytes,
        keep_logits=keep_logits,
        check_ranks=check_ranks,
        invariant=invariant,
    )
    inputs = Inputs(hidden, weight, targets, bias, token_weight, class_weight, grad_weight_into)
    return compute_loss(inputs, options, group, vocab_shard, quantized_weight)


def compute_loss(
    inputs: Inputs,
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
    quantized_weight: QuantizedWeight | StepQuantizer | None = None,
) -> Tensor | LossOutput:
    """Computes the loss eagerly, or traces it; results are DTensors where inputs are."""
    known = (QuantizedWeight, StepQuantizer)
    if quantized_weight is not None and not isinstance(quantized_weight, known):
        rule = "a QuantizedWeight, which quantize_weight returns, or a StepQuantizer"
        raise ValueError(f"quantized_weight must be {rule}, got {type(quantized_weight)}")
    inputs, options, group, vocab_shard, parts = enter(inputs, options, group, vocab_shard)
    if is_traced():
        # The module imports the compiler, which a tracing caller has imported already.
        from cce_dist.frontend.compiled import compute as trace

        result = trace(inputs, options, group, vocab_shard, quantized_weight)
    else:
        compute_here = compute
        if is_fake(inputs.hidden):
            from cce_dist.frontend.compiled import compute as compute_here
        with unseen_by_checkpointing():
            result = compute_here(inputs, options, group, vocab_shard, quantized_weight)
    return result if parts is None else parts.wrap(result)


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` with its options bound; holds no weight and no state.

    Args: `group`, `vocab_shard`, and the fields of `LossOptions`. `forward` takes everything else.
    Raises:
        ValueError: an option is out of range, or two exclude each other.
    """

    def __init__(
        self,
        *,
        group: Group | DeviceMesh | None = None,
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
        if vocab_shard is not None:
            require_vocab_shard(vocab_shard)
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
        quantized_weight: QuantizedWeight | StepQuantizer | None = None,
    ) -> Tensor | LossOutput:
        """Computes `linear_cross_entropy` with the module's options."""
        inputs = Inputs(hidden, weight, targets, bias, token_weight, class_weight, grad_weight_into)
        return compute_loss(inputs, self.options, self.group, self.vocab_shard, quantized_weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the module with the same group: a process group cannot be copied."""
        memo[id(self.group)] = self.group
        module = memo[id(self)] = self.__class__.__new__(self.__class__)
        module.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return module

    def extra_repr(self) -> str:
        return f"{self.options}"
