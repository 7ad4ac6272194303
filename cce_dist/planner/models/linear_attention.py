"""Linear attention by the gated delta rule, arXiv:2412.06464: parameters, FLOPs and bytes.

Each head of values has a state of [key_dim, value_dim] numbers, changed by a token's key and value.
Kernels take the tokens in chunks: scores within a chunk, the state between chunks. A causal
convolution of each channel comes first, a gated norm of each head last.
"""

from __future__ import annotations

from dataclasses import dataclass

# Tokens of a chunk, in transformers and in flash-linear-attention.
CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Sizes of linear attention.

    Raises:
        ValueError: a size is below 1, or key_heads do not divide value_heads.
    """

    key_heads: int  # number of heads of queries, and of keys
    value_heads: int
    key_dim: int  # dims of a head
    value_dim: int
    kernel: int  # tokens that the convolution sees

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} of linear attention must be >= 1, got {value}")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"key_heads of linear attention must divide value_heads, {self.value_heads}, got "
                f"{self.key_heads}"
            )

    @property
    def values(self) -> int:
        """Numbers of a token's values, over all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of a token's queries, keys and values, the convolution's input."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def columns(self) -> int:
        """Columns of the product with a token's hidden state: channels, a gate of the values, and
        two numbers for each head of values."""
        return self.channels + self.values + 2 * self.value_heads

    def parameters(self, dim: int) -> int:
        """Returns the parameters: matrices, convolution, the heads' norm, and for each head of
        values a decay and its bias."""
        matrices = dim * (self.columns + self.values)
        return matrices + self.kernel * self.channels + 2 * self.value_heads + self.value_dim

    @property
    def flops(self) -> float:
        """FLOPs of a token's convolution and delta rule, forward; scores count in full."""
        scores = CHUNK * (4 * self.key_dim + 2 * self.value_dim)
        # Two triangular systems of a chunk's size: for new values and for decayed keys.
        solved = CHUNK * (self.key_dim + self.value_dim)
        state = 6 * self.key_dim * self.value_dim
        return 2.0 * self.kernel * self.channels + self.value_heads * (scores + solved + state)

    @property
    def kept(self) -> float:
        """Bytes of a token from forward to backward.

        In 16 bits: channels before and after the convolution, the gate, values before and after the
        norm, and a row of a chunk's system for each head of values. In fp32: decay and strength of
        each head.
        """
        numbers = 2 * self.channels + 3 * self.values + CHUNK * self.value_heads
        return 2.0 * numbers + 8.0 * self.value_heads

    @property
    def traffic(self) -> float:
        """Bytes of a token through HBM, forward: the kept numbers are written, and read once."""
        return 2 * self.kept
