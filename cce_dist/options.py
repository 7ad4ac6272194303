"""Options of the loss and of its filter: frozen dataclasses, no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal, get_args

from cce_dist.python_numbers import constant, python_number, use_python_numbers

Reduction = Literal["mean", "sum", "none"]
GradientMode = Literal["filtered", "exact", "in_forward"]
LogitsMode = Literal["full", "screened"]
EightBitDtype = Literal["auto", "int8", "e4m3"]
Backend = Literal["auto", "triton", "torch"]
Stat = Literal["lse", "entropy", "correct", "tail_mass", "logit_moments", "screened", "sum_p2"]

# In 16 bits "auto" keeps a column of a block from this mass on. In fp32 and float64 the limit is
# AUTO_KEEP_SHARE of the uniform mass 128 / V: the dropped mass is then at most the dtype's rounding
# unit per token, on average over a block. Measured: docs/design/filter.md#the-default-filter.
AUTO_KEEP = {"bfloat16": 2.0**-10.5, "float16": 2.0**-14}
# The same if similar tokens stand side by side (backend "triton"): a column then matters to fewer
# blocks, and a block's dropped columns are alike. With fewer than FULL_ORDER tokens the limit is
# lower in proportion.
AUTO_KEEP_ORDERED = {"bfloat16": 2.0**-9.5, "float16": 2.0**-13.5}
FULL_ORDER = 1024
AUTO_KEEP_SHARE = {"float32": 2.0**-24, "float64": 2.0**-53}
# Below this vocabulary "auto" keeps every column: there is no tail worth skipping.
AUTO_KEEP_FROM_VOCAB = 4096

# A column of mass m below `keep` is drawn with probability of about m / (DRAW_FACTOR * keep). In
# forward KL a drawn column takes longer, as the teacher's logit is computed too, and the hidden
# gradient errs half as much as that of dense 16-bit logits: fewer are drawn. In reverse KL it errs
# more, as each element has the log ratio of the models.
DRAW_FACTOR, DRAW_FACTOR_OF_FORWARD_KL = 1.5, 2.0

# A column has one score for each block of this many tokens; the kernels' token tile has this size.
TOKEN_BLOCK = 128

# The default workspace. Each chunk of columns adds to the whole hidden gradient, and the addition
# costs more with more tokens: chunks then need more columns.
LEAST_WORKSPACE_BYTES = 64 * 2**20
WORKSPACE_BYTES_PER_TOKEN = 2**13
SCREENED_BYTES_PER_TOKEN = 17 * 2**10

_NUMBERS = (
    "ignore_index",
    "shift",
    "softcap",
    "logit_scale",
    "label_smoothing",
    "z_loss",
    "workspace_bytes",
)

# Bounds of a factor of the logits, in size: fp32 must hold it, its inverse and its parts.
LEAST_FACTOR, LARGEST_FACTOR = 1e-30, 1e30


def require_stats(stats: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(stats, tuple):
        raise ValueError(f'stats must be a tuple such as ("{allowed[0]}",), got {stats!r}')
    for stat in stats:
        require_choice("every entry of stats", stat, allowed)


def require_choice(name: str, got: object, choices: tuple[str, ...]) -> None:
    if not isinstance(got, str) or got not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {allowed}, got {got!r}")


def require_finite(name: str, got: object, *, minimum: float | None = None) -> float:
    """Returns a finite number as a Python number, or refuses it."""
    number = python_number(name, got)
    # math.isfinite raises for an int that is larger than any float.
    if number is None or not abs(number) <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number, got {got!r}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {got!r}")
    return number


def require_factor(name: str, got: float) -> None:
    """Checks that logits in fp32 can be multiplied and divided by a finite number."""
    if not LEAST_FACTOR <= abs(got) <= LARGEST_FACTOR:
        raise ValueError(
            f"{name} must lie between {LEAST_FACTOR:.0e} and {LARGEST_FACTOR:.0e} in size, since "
            f"logits are fp32, got {got!r}"
        )


def require_bool(name: str, got: object) -> None:
    if not isinstance(got, bool):
        raise ValueError(f"{name} must be True or False, got {got!r}")


def default_workspace_bytes(num_tokens: int) -> int:
    return max(LEAST_WORKSPACE_BYTES, WORKSPACE_BYTES_PER_TOKEN * num_tokens)


@dataclass(frozen=True)
class Filter:
    """The rule by which a block of 128 tokens keeps columns of the logits in the backward.

    A block keeps a column if the column's probability mass, summed over the block's tokens, is at
    least `keep`, or if the column is the target of a token in the block. The product of their two
    marginals replaces a block's dropped columns (`tail`), so that their mass reaches the gradient.

    Args:
        keep: mass in [0, 128] from which a column is kept (in proportion less in a last block of
            fewer tokens); 0 keeps every column. "auto" follows dtype, vocabulary, backend and
            number of tokens: see `threshold`.
        tail: replace dropped columns by the product of their marginals. False drops them, as
            Apple's Cut Cross-Entropy does, and starves rare tokens of gradient.
        draw: some dropped columns, drawn in proportion to their mass, stand for all of them in the
            hidden gradient (with `tail` and `keep`), which is then right on average, and far
            closer. False: the marginals alone stand for them, with an error that has a bound.
        eps: keep a column if any single token's probability reaches `eps`, in place of
            `keep`: the criterion of Cut Cross-Entropy (arXiv:2411.09009, section 4.3).
    Raises:
        ValueError: a value is out of range, or both `keep` and `eps` are given.
    """

    keep: float | Literal["auto"] = "auto"
    tail: bool = True
    eps: float | None = None
    draw: bool = True

    def __post_init__(self) -> None:
        use_python_numbers(self, "keep", "eps")
        if not (isinstance(self.keep, str) and self.keep == "auto"):
            require_finite("Filter.keep", self.keep, minimum=0)
            if self.keep > TOKEN_BLOCK:
                raise ValueError(
                    f'Filter.keep must be "auto" or a mass in [0, {TOKEN_BLOCK}]: a block has '
                    f"{TOKEN_BLOCK} tokens of mass 1, got {self.keep!r}"
                )
        for name in ("tail", "draw"):
            require_bool(f"Filter.{name}", getattr(self, name))
        if self.eps is not None:
            require_finite("Filter.eps", self.eps, minimum=0)
            if self.eps > 1:
                raise ValueError(f"Filter.eps must be a probability in [0, 1], got {self.eps!r}")
            if self.keep != "auto":
                raise ValueError(
                    f"Filter.keep and Filter.eps exclude each other, got keep={self.keep!r} and "
                    f"eps={self.eps!r}: leave one of them out"
                )

    def threshold(
        self, dtype_name: str, vocab_size: int, *, ordered_tokens: int | None = None
    ) -> float:
        """Returns the score from which a column is kept, for hidden's dtype; 0: every column.

        Args: ordered_tokens: the number of tokens, if similar tokens stand side by side.
        """
        if self.eps is not None:
            return self.eps
        if self.keep != "auto":
            return float(self.keep)
        if vocab_size < AUTO_KEEP_FROM_VOCAB:
            return 0.0
        if dtype_name in AUTO_KEEP and ordered_tokens is not None:
            return AUTO_KEEP_ORDERED[dtype_name] * min(1.0, ordered_tokens / FULL_ORDER)
        if dtype_name in AUTO_KEEP:
            return AUTO_KEEP[dtype_name]
        return AUTO_KEEP_SHARE[dtype_name] * TOKEN_BLOCK / vocab_size


@dataclass(frozen=True)
class Screen:
    """Options of logits="screened": the 8-bit dtype, and limits beyond which logits are full.

    A call that keeps more columns than `max_kept`, or whose estimated error is larger than
    `max_error`, computes full logits; so does a call of few tokens, without a kept copy of the
    weight: docs/guide/modes.md#when-a-call-is-computed-in-full. stats=("screened",) says which.

    Args:
        dtype: the dtype of the 8-bit copies: "int8", "e4m3", or "auto" for the better of the two on
            the device: e4m3 on compute capability 10 and 11, int8 elsewhere.
        max_kept: the largest share, in [0, 1], of kept pairs among all pairs of a column and a
            block of 128 tokens. Kept pairs are computed exactly.
        max_error: nats, a bound of the estimated rms error of a token's log-sum-exp. The estimate
            takes all columns that are not kept to err alike:
            docs/design/screened.md#when-screening-is-refused.
    Raises:
        ValueError: a value is out of range.
    """

    dtype: EightBitDtype = "auto"
    max_kept: float = 0.125
    max_error: float = 2.0**-7

    def __post_init__(self) -> None:
        use_python_numbers(self, "max_kept", "max_error")
        require_choice("Screen.dtype", self.dtype, get_args(EightBitDtype))
        require_finite("Screen.max_kept", self.max_kept, minimum=0)
        if self.max_kept > 1:
            raise ValueError(f"Screen.max_kept must be a share in [0, 1], got {self.max_kept!r}")
        require_finite("Screen.max_error", self.max_error, minimum=0)

    @property
    def values(self) -> tuple[str, float, float]:
        """Returns the fields. The numbers of an argument's default are symbols to torch.compile
        with dynamic=True, which knows no comparison of dataclasses of symbols."""
        return self.dtype, constant(self.max_kept), constant(self.max_error)


@dataclass(frozen=True)
class LossOptions:
    """The options of `linear_cross_entropy` but for tensors, group, vocab_shard and 8-bit copies.

    `cce_dist.loss.linear_cross_entropy` documents each option and says how they act together.

    Args:
        softcap: bound of the logits, by softcap * tanh(logits / softcap).
        logit_scale: factor of the logits, after softcap.
        label_smoothing: share of the target's weight that all columns get alike.
        z_loss: factor of the squared log-sum-exp in a token's loss.
        gradient: which columns the gradients compute, and when.
        logits: screened computes in 8 bits, and the columns that matter once more exactly.
        backend: what computes; auto is triton on a GPU.
        workspace_bytes: bound of the logits and their temporaries in memory at once.
        invariant: no result of a token follows from other tokens, or from the number of ranks.
    Raises:
        ValueError: a value is out of range, or two options exclude each other.
    """

    sequence_parallel: bool = False
    ignore_index: int = -100
    reduction: Reduction = "mean"
    shift: int = 0
    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    gradient: GradientMode = "filtered"
    filter: Filter = field(default_factory=Filter)
    logits: LogitsMode = "full"
    screen: Screen = field(default_factory=Screen)
    stats: tuple[Stat, ...] = ()
    backend: Backend = "auto"
    workspace_bytes: int | None = None
    keep_logits: bool | None = None
    check_ranks: bool = False
    invariant: bool = False

    def __post_init__(self) -> None:
        use_python_numbers(self, *_NUMBERS)
        require_choice("reduction", self.reduction, get_args(Reduction))
        require_choice("gradient", self.gradient, get_args(GradientMode))
        require_choice("logits", self.logits, get_args(LogitsMode))
        require_choice("backend", self.backend, get_args(Backend))
        require_stats(self.stats, get_args(Stat))
        if not isinstance(self.filter, Filter):
            raise ValueError(f"filter must be a cce_dist.Filter, got {self.filter!r}")
        if not isinstance(self.screen, Screen):
            raise ValueError(f"screen must be a cce_dist.Screen, got {self.screen!r}")
        for name in ("shift", "ignore_index", "workspace_bytes"):
            value, also = getattr(self, name), " or None" if name == "workspace_bytes" else ""
            if also and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an int{also}, got {value!r}")
        if not -(2**63) <= self.ignore_index < 2**63:
            raise ValueError(f"ignore_index must fit int64, as targets do, got {self.ignore_index}")
        for name in ("sequence_parallel", "check_ranks", "invariant"):
            require_bool(name, getattr(self, name))
        if self.keep_logits is not None and not isinstance(self.keep_logits, bool):
            raise ValueError(f"keep_logits must be True, False or None, got {self.keep_logits!r}")
        require_finite("shift", self.shift, minimum=0)
        if self.workspace_bytes is not None:
            require_finite("workspace_bytes", self.workspace_bytes, minimum=2**16)
        require_finite("logit_scale", self.logit_scale)
        if self.logit_scale == 0:
            raise ValueError("logit_scale must not be 0: every logit would be 0")
        require_factor("logit_scale", self.logit_scale)
        require_finite("z_loss", self.z_loss, minimum=0)
        if self.z_loss > LARGEST_FACTOR:
            raise ValueError(f"z_loss must be <= {LARGEST_FACTOR:.0e}, got {self.z_loss!r}")
        require_finite("label_smoothing", self.label_smoothing, minimum=0)
        if self.label_smoothing > 1:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {self.label_smoothing!r}")
        if self.softcap is not None:
            require_finite("softcap", self.softcap)
            if self.softcap <= 0:
                raise ValueError(f"softcap must be None or > 0, got {self.softcap!r}")
            require_factor("softcap", self.softcap)
        self._refuse_combinations()

    def _refuse_combinations(self) -> None:
        if self.invariant:
            self._refuse_variant()
        if self.logits == "screened":
            self._refuse_unscreened()
        elif self.screen.values != Screen().values:
            raise ValueError(
                f'screen={self.screen!r} has no effect with logits="full"; use '
                'logits="screened", or leave screen out'
            )
        if self.gradient == "exact" and self.filter != Filter():
            raise ValueError(
                f"filter={self.filter!r} has no effect with gradient={self.gradient!r}, which "
                'keeps every column; use gradient="filtered", or leave filter out'
            )
        if self.keep_logits and self.gradient != "exact" and self.logits != "screened":
            raise ValueError(
                f"keep_logits=True has no effect with gradient={self.gradient!r}, which computes "
                'few logits again or none; use gradient="exact" or logits="screened", or leave '
                "keep_logits out"
            )
        if self.gradient == "in_forward" and self.reduction == "none":
            raise ValueError(
                'gradient="in_forward" computes the gradients before the upstream gradient is '
                'known, so the loss must be a scalar, got reduction="none": use '
                'gradient="filtered" or "exact"'
            )
        has_filter = self.gradient == "filtered" or self.filter != Filter()
        if has_filter and self._reaches_every_column and self.filter.keep != 0:
            raise ValueError(
                f"softcap={self.softcap!r} with label_smoothing={self.label_smoothing!r} gives "
                "every column its own gradient, so that no filter can leave columns out; use "
                'gradient="exact", or "in_forward" without a filter'
            )

    def _refuse_variant(self) -> None:
        """Refuses options with which a token's results follow from other tokens, or from ranks."""
        wrong = {
            "gradient": self.gradient == "in_forward",
            "logits": self.logits != "full",
            "filter": self.filter != Filter(),
            "keep_logits": self.keep_logits is True,
            "label_smoothing": self.label_smoothing != 0,
            "stats": "tail_mass" in self.stats or "screened" in self.stats,
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(
                    "invariant=True computes every column in one order, whatever the other tokens "
                    "and the number of ranks are, and cannot do so with "
                    f"{name}={getattr(self, name)!r}; leave one of them out"
                )

    def _refuse_unscreened(self) -> None:
        """Refuses options that 8-bit logits cannot serve."""
        if self._reaches_every_column:
            raise ValueError(
                'logits="screened" needs a filter, and '
                f"softcap={self.softcap!r} with label_smoothing={self.label_smoothing!r} gives "
                "every column its own gradient, so that no filter can leave columns out; use "
                'logits="full" with gradient="exact"'
            )
        if not self.filters:
            mode = f"gradient={self.gradient!r}"
            if self.gradient != "exact":
                mode = f"filter={self.filter!r}"
            raise ValueError(
                'logits="screened" needs a filter that leaves columns out, and '
                f'{mode} keeps every column; use gradient="filtered" and a filter whose keep is '
                'above 0, or logits="full"'
            )

    def workspace_for(self, num_tokens: int) -> int:
        """Returns the bytes of the workspace of a call on `num_tokens` tokens."""
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        return default_workspace_bytes(num_tokens)

    @property
    def _reaches_every_column(self) -> bool:
        """Tells whether each column has its own gradient: softcap'(z) / V of the mean logit."""
        return self.softcap is not None and self.label_smoothing > 0

    @property
    def draws(self) -> bool:
        """Tells whether dropped columns are drawn: by mass, so not with the criterion `eps`."""
        return self.filter.draw and self.filter.tail and self.filter.eps is None

    @property
    def filters(self) -> bool:
        """Tells whether the gradients may leave columns out."""
        if self.gradient == "exact" or self.invariant or self._reaches_every_column:
            return False
        return self.filter.keep != 0 and self.filter.eps != 0
