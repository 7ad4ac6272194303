"""The training job: the inputs of a plan other than the model and the hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Literal

from cce_dist.planner.models.model import Model
from cce_dist.planner.orders.schedules import CHUNKS, NAMES

LOSSES = ("dense", "native", "chunked", "exact", "filtered", "none")
OURS = ("exact", "filtered")
OVER = ("last", "pp", "pp-tp")
ATTENTIONS = ("auto", "flash", "cudnn", "unfused")
# Megatron's default of --make-vocab-size-divisible-by.
MEGATRON_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class Software:
    """A framework's memory and traffic, in bytes; docs/design/planner.md derives the numbers."""

    framework: Literal["torch", "megatron"] = "megatron"  # whose order "interleaved" follows
    # Bytes of a token and dim of the MLP, between forward and backward, and through HBM in the
    # forward: of a gated MLP, and of one of two matrices.
    gated_kept: float = 6
    plain_kept: float = 4
    gated_traffic: float = 6
    plain_traffic: float = 4
    # Queries, keys and values are one tensor, which lives as long as its values.
    joint_qkv: bool = True
    rope_traffic: float = 4  # of a token and dim of queries and keys
    accumulate: float = 0  # of a parameter, to add a gradient; without reading and writing the sum
    step: float = 42  # of a parameter, to clip and step with fp32 states; with 16-bit ones half
    # Of a logit of the unfused loss: through HBM in forward and backward, without the products; at
    # the peak.
    dense_traffic: tuple[float, float] = (38, 14)
    dense_peak: float = 6
    transient_gradient: bool = False  # a gradient is computed in 16 bits before it is added
    hidden: float = 0.5  # share of a tensor-parallel collective that a backward's product hides
    receives_apart: bool = False  # each microbatch receives into its own buffers, from the start
    attention: Literal["cudnn", "flash"] = "cudnn"  # kernels of a job with attention="auto"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, str) and not 0 <= number < math.inf:
                    raise ValueError(f"{name} must be >= 0 and finite, got {number!r}")
        if self.hidden > 1:
            raise ValueError(f"hidden must be a share, <= 1, got {self.hidden!r}")


SOFTWARE = {
    # Megatron with its fused kernels, gradient accumulation fusion and a fused Adam.
    "megatron": Software(),
    # Megatron-core alone: no TransformerEngine, no apex, fusions off, torch's Adam.
    "megatron-local": Software(
        gated_kept=10,
        gated_traffic=14,
        rope_traffic=24,
        accumulate=4,
        step=100,
        transient_gradient=True,
        attention="flash",
    ),
    # Modules in eager torch with separate queries, keys and values, F.cross_entropy of fp32 logits,
    # torch's fused AdamW.
    "torch": Software(
        framework="torch",
        gated_kept=8,
        gated_traffic=10,
        joint_qkv=False,
        rope_traffic=20,
        accumulate=2,
        step=40,
        dense_traffic=(18, 24),
        dense_peak=12,
        transient_gradient=True,
        hidden=0,
        receives_apart=True,
        attention="flash",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job.

    Raises:
        ValueError: a number is out of range, a word is unknown, or options exclude each other. The
            message has the nearest number that works, if there is one.
    """

    sequence: int = 4096  # tokens of a sequence
    microbatch: int = 1  # sequences of a microbatch, on each data-parallel rank
    microbatches: int = 1  # of a step, on each data-parallel rank
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline ranks
    chunks: int = 1  # stages of a pipeline rank
    cp: int = 1  # context-parallel ranks
    dp: int = 1  # data-parallel ranks
    ep: int = 1  # ranks, of the dp * cp, that share the experts
    sequence_parallel: bool = False
    distributed_optimizer: bool = False  # its states are sharded over the dp * cp ranks
    # The last backward overlaps the sum of gradients, and the first forward the gather of the
    # distributed optimizer's weights.
    overlap_data: bool = False
    overlap_tensor: bool = False  # products overlap tensor-parallel communication
    gradients: str = "fp32"  # "fp32" or "bf16", the dtype in which gradients are accumulated
    # "mixed", bf16 weights with fp32 copies and moments; "bf16", 16 bits for all; "fp32", fp32 for
    # all, with products in bf16 under autocast.
    precision: str = "mixed"
    recompute: str = "none"  # "none"; "selective", attention's scores; "full", whole layers
    # "flash", FlashAttention 2; "cudnn"; "unfused", which computes all scores and keeps their
    # softmax; "auto", the software's.
    attention: str = "auto"
    dropout: bool = False  # of scores, and of the outputs of attention and MLP; its masks are kept
    # "dense" (unfused), "native" (fused after the logits), "chunked", "none"; ours: "exact" and
    # "filtered".
    loss: str = "dense"
    # The ranks that share the vocabulary: "last", the last stage's tensor-parallel ranks; "pp", the
    # pipeline's ranks; "pp-tp", all tensor- and pipeline-parallel ranks.
    vocab_over: str = "last"
    schedule: str = "auto"  # a name of planner/orders/schedules.py, or "auto"
    kept_columns: int = 6000  # for which `filtered` computes the gradients of a block of 128 tokens
    software: Software = field(default_factory=Software)

    def __post_init__(self) -> None:
        numbers = ("sequence", "microbatch", "microbatches", "kept_columns")
        for name in (*numbers, "tp", "pp", "chunks", "cp", "dp", "ep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        for name, allowed in (
            ("gradients", ("fp32", "bf16")),
            ("precision", ("mixed", "bf16", "fp32")),
            ("recompute", ("none", "selective", "full")),
            ("attention", ATTENTIONS),
            ("loss", LOSSES),
            ("vocab_over", OVER),
            ("schedule", ("auto", *NAMES)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.sequence % (2 * self.cp) and self.cp > 1:
            raise ValueError(
                f"sequence must be a multiple of 2 * cp, {2 * self.cp}, got {self.sequence}; the "
                f"nearest is {_nearest(self.sequence, 2 * self.cp)}"
            )
        if (self.dp * self.cp) % self.ep:
            raise ValueError(
                f"ep must divide dp * cp, {self.dp * self.cp}, got {self.ep}; the nearest is "
                f"{_nearest_of(_divisors(self.dp * self.cp), self.ep)}"
            )
        if self.is_over_ranks and self.loss not in OURS:
            raise ValueError(
                f"loss must be one of {OURS} with vocab_over {self.vocab_over!r}, got {self.loss!r}"
            )
        if self.overlap_tensor and self.tp > 1 and not self.sequence_parallel:
            raise ValueError("sequence_parallel must be true with overlap_tensor, got false")
        self._check_schedule()

    def _check_schedule(self) -> None:
        name = self.schedule_name
        if name == "vocab" and not self.is_over_ranks:
            raise ValueError(
                "vocab_over must be 'pp' or 'pp-tp' under schedule 'vocab', got "
                f"{self.vocab_over!r}"
            )
        least, most = CHUNKS.get(name, (1, 1))
        if not least <= self.chunks <= most:
            hint = "; 'interleaved' has 2 or more, 'zbv' has 2" if name not in CHUNKS else ""
            raise ValueError(
                f"chunks must be {least}{'' if most == least else ' or more'} under schedule "
                f"{name!r}, got {self.chunks}{hint}"
            )

    @property
    def is_over_ranks(self) -> bool:
        return self.vocab_over != "last"

    @property
    def is_served(self) -> bool:
        """True if the head is over pipeline ranks, and the schedule does not order its phases."""
        return self.is_over_ranks and self.schedule_name != "vocab"

    @property
    def is_patched(self) -> bool:
        """True if megatron_patch plans the order, and not `ScheduleVocab1F1B`."""
        return self.schedule_name == "vocab" and self.software.framework == "megatron"

    @property
    def attention_kernels(self) -> str:
        """The kernels of attention: "flash", "cudnn" or "unfused"."""
        return self.software.attention if self.attention == "auto" else self.attention

    @property
    def schedule_name(self) -> str:
        if self.schedule != "auto":
            return self.schedule
        if self.is_over_ranks:
            return "vocab"
        return "interleaved" if self.chunks > 1 else "1f1b"

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank."""
        return self.sequence * self.microbatch // self.cp

    @property
    def sequence_ranks(self) -> int:
        """The number of ranks that share the tokens between layers."""
        return self.tp if self.sequence_parallel else 1

    @property
    def head_ranks(self) -> int:
        """The number of ranks that share the vocabulary."""
        return {"last": self.tp, "pp": self.pp, "pp-tp": self.pp * self.tp}[self.vocab_over]

    def rows_divisible_by(self, rows: int) -> int:
        """Returns Megatron's --make-vocab-size-divisible-by for a vocabulary of `rows` rows.

        It is the default, or the least with which all ranks of a pipeline have equally many rows.
        """
        step = MEGATRON_ROWS * self.tp
        if self.is_over_ranks and -(-rows // step) * step % self.head_ranks:
            return lcm(MEGATRON_ROWS, self.pp)
        return MEGATRON_ROWS

    def padded_rows(self, rows: int) -> int:
        """Returns the number of rows of the embedding and the head, padding included.

        Megatron pads to a multiple of `rows_divisible_by` * tp, torch to a multiple of the number
        of ranks that share the rows.
        """
        step = self.head_ranks
        if self.software.framework == "megatron":
            step = self.rows_divisible_by(rows) * self.tp
        return -(-rows // step) * step

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a parameter's gradient."""
        dtype = self.gradients if self.precision == "mixed" else self.precision
        return {"bf16": 2.0, "fp32": 4.0}[dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of a parameter, autocast's 16-bit copy included."""
        return 6.0 if self.precision == "fp32" else 2.0

    @property
    def hidden_bytes(self) -> float:
        """Bytes of a number of the hidden states between layers."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def state_bytes(self) -> float:
        """Bytes of a parameter's optimizer state: two moments, and a bf16 weight's fp32 copy."""
        return {"mixed": 12.0, "bf16": 4.0, "fp32": 8.0}[self.precision]

    @property
    def step_traffic(self) -> float:
        """Bytes that clipping and the optimizer move for a parameter."""
        return self.software.step * (0.5 if self.precision == "bf16" else 1.0)

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def check_model(self, model: Model) -> None:
        """Checks that the job can divide the model over its ranks.

        Raises:
            ValueError: it cannot; the message has the nearest number that works.
        """
        self._check_tp(model)
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            shared = gcd(model.experts, self.dp * self.cp)
            nearest = _nearest_of(_divisors(shared), self.ep) if model.experts else 1
            raise ValueError(
                f"ep must divide the model's {model.experts} experts, got {self.ep}; the nearest "
                f"is {nearest}"
            )
        if 0 < model.positions < self.sequence:
            raise ValueError(
                f"sequence must be <= the model's {model.positions} learned positions, got "
                f"{self.sequence}"
            )
        # The embedding and the head may each have a stage without layers.
        most = model.layers + 2
        if self.stages > most:
            largest = f"the largest pp with these chunks is {most // self.chunks}"
            if self.chunks > most:
                largest = f"even pp 1 can have no more than {most} chunks"
            raise ValueError(
                f"pp * chunks must be <= {most}, the model's {model.layers} layers and two stages "
                f"for the embedding and the head alone, got {self.pp} * {self.chunks} = "
                f"{self.stages}; {largest}"
            )
        if self.sequence_parallel and self.tokens % self.tp:
            raise ValueError(
                f"tokens of a microbatch must be a multiple of tp, {self.tp}, under sequence "
                f"parallelism, got {self.tokens}; the nearest is {_nearest(self.tokens, self.tp)}"
            )

    def _check_tp(self, model: Model) -> None:
        tp, keys = self.tp, f"{model.kv_heads} heads of keys and values"
        # The nearest tp for which all of these rules hold.
        works = _divisors(gcd(model.heads, model.mlp_dim))
        works = [each for each in works if _is_shared(model.kv_heads, each)]
        rules = [
            (model.heads % tp == 0, f"the model's {model.heads} heads", works),
            (model.mlp_dim % tp == 0, f"the model's mlp_dim, {model.mlp_dim}", works),
            (_is_shared(model.kv_heads, tp), f"the model's {keys} or be a multiple of them", works),
        ]
        if model.linear:
            heads = gcd(model.linear.key_heads, model.linear.value_heads)
            what = f"the {heads} heads of keys of the model's linear attention"
            rules.append((heads % tp == 0, what, _divisors(heads)))
        for holds, what, works in rules:
            if not holds:
                nearest = _nearest_of(works, tp)
                raise ValueError(f"tp must divide {what}, got {tp}; the nearest is {nearest}")
        if model.linear and self.cp > 1:
            raise ValueError(
                "cp must be 1 with linear attention, whose state between ranks is not modelled, "
                f"got {self.cp}"
            )


def _nearest(value: int, step: int) -> int:
    return max(1, round(value / step)) * step


def _is_shared(heads: int, tp: int) -> bool:
    """Returns True if each rank has equally many heads, or each head is on equally many ranks."""
    return heads % tp == 0 or tp % heads == 0


def _divisors(of: int) -> list[int]:
    return [each for each in range(1, of + 1) if of % each == 0]


def _nearest_of(numbers: Iterable[int], value: int) -> int:
    return min(numbers, key=lambda each: (abs(each - value), each))
