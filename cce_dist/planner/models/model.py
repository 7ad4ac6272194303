"""Decoder language models as numbers: sizes, and the numbers of parameters that follow."""

from __future__ import annotations

from dataclasses import dataclass

from .linear_attention import LinearAttention


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer.

    Raises:
        ValueError: a size is below 1, kv_heads do not divide heads, classes exceed rows, or a size
            belongs to a part that the model does not have.
    """

    classes: int  # V of the loss, the tokenizer's size
    dim: int
    layers: int
    mlp_dim: int  # inner size of the MLP, or of one expert
    heads: int
    kv_heads: int
    rows: int | None = None  # of the embedding and the head, padding included; None: classes
    more_rows: int = 0  # further rows of the embedding alone
    head_dim: int | None = None  # None: dim / heads
    gated: bool = True  # the MLP has three matrices; False: two
    tied: bool = False
    norms: int = 2  # of a layer
    norm_weight: bool = True  # each norm, the final one included, has it
    norm_bias: bool = False  # as norm_weight
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's output
    mlp_bias: bool = False
    head_bias: bool = False
    positions: int = 0  # number of learned positions, a vector each; 0: positions are computed
    experts: int = 0  # 0: one MLP without a router
    experts_per_token: int = 0  # 0: all
    shared_experts: int = 0  # that every token goes through
    shared_mlp_dim: int = 0  # inner size of one; 0: mlp_dim
    shared_gate: bool = False  # a vector gates the shared experts' output
    dense_layers: int = 0  # the first layers, which have one MLP
    dense_mlp_dim: int = 0  # its inner size
    qk_norm: bool = False  # attention has a norm of queries and a norm of keys, over a head
    qk_norm_heads: bool = False  # they have weights for each head, or are over all heads at once
    # Tokens that attention looks back at, in all but each window_every-th layer (0: in every
    # layer); a window of 0: all tokens. Those layers come window_offset layers earlier.
    window: int = 0
    window_every: int = 0
    window_offset: int = 0
    # Ranks of keys and values, and of queries, in multi-head latent attention, arXiv:2405.04434. A
    # kv_rank of 0: other attention. A query_rank of 0: queries are computed from hidden.
    kv_rank: int = 0
    query_rank: int = 0
    rope_dim: int = 0  # in latent attention, a head's dims with positions, in addition to head_dim
    value_dim: int = 0  # in latent attention, dims of a value
    query_gate: bool = False  # attention has a gate of the queries' size for each head's values
    # Linear attention of all but each linear_every-th layer (0: of every layer); None: of no layer.
    linear: LinearAttention | None = None
    linear_every: int = 0
    # Layers with cross attention to images: text skips them, they have parameters but take no time.
    image_layers: tuple[int, ...] = ()
    buffers: int = 0  # numbers in a checkpoint that are no parameters, such as causal masks

    def __post_init__(self) -> None:
        for name in ("classes", "dim", "layers", "mlp_dim", "heads", "kv_heads"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, {self.heads}, got {self.kv_heads}")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"heads must divide dim, {self.dim}, got {self.heads}: set head_dim")
        if self.num_rows < self.classes:
            raise ValueError(f"rows must be >= classes, {self.classes}, got {self.rows}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token must be <= experts, {self.experts}, got "
                f"{self.experts_per_token}"
            )
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(
                f"dense_layers must be within 0 and layers, {self.layers}, got {self.dense_layers}"
            )
        if self.dense_layers and self.dense_mlp_dim < 1:
            raise ValueError(f"dense_mlp_dim must be >= 1, got {self.dense_mlp_dim}")
        if (self.shared_mlp_dim or self.shared_gate) and self.shared_experts < 1:
            raise ValueError(
                "shared_experts must be >= 1 with shared_mlp_dim or shared_gate, got "
                f"{self.shared_experts}"
            )
        if self.more_rows and self.tied:
            raise ValueError(f"more_rows must be 0 in a tied model, got {self.more_rows}")
        if self.qk_norm_heads and not self.qk_norm:
            raise ValueError("qk_norm must be True with qk_norm_heads, got False")

    @property
    def num_rows(self) -> int:
        return self.classes if self.rows is None else self.rows

    @property
    def size_of_head(self) -> int:
        """head_dim, or its default."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def key_dim(self) -> int:
        """Dims of a head's query and key."""
        return self.size_of_head + self.rope_dim

    @property
    def head_value_dim(self) -> int:
        """Dims of a head's value."""
        return self.value_dim or self.size_of_head

    def attention_parameters(self, index: int) -> int:
        kind, size = self.attention_of(index), self.size_of_head
        if kind == "linear" and self.linear:
            return self.linear.parameters(self.dim)
        # Norms of a head's queries and keys, and two gates of one number each.
        further = self.dim * self.out_bias + (2 * size + 2 if kind == "image" else 0)
        if self.kv_rank:
            inner, outer = self.heads * self.key_dim, self.heads * self.head_value_dim
            queries = inner * (self.query_rank or self.dim) + self.dim * self.query_rank
            keys = self.dim * (self.kv_rank + self.rope_dim)
            values = self.kv_rank * (self.heads * size + outer)
            norms = self.kv_rank + self.query_rank
            return queries + keys + values + outer * self.dim + norms + further
        inner, outer = self.heads * size, self.kv_heads * size
        normed = self.heads + self.kv_heads if self.qk_norm_heads else 2
        projected = inner * (1 + self.query_gate) + 2 * outer
        matrices = self.dim * (projected + inner)
        return matrices + projected * self.qkv_bias + normed * size * self.qk_norm + further

    def attention_of(self, index: int) -> str:
        """Returns "full", "window", "linear" or "image": the attention of the `index`-th layer."""
        if index in self.image_layers:
            return "image"
        for name, has, every, offset in (
            ("linear", self.linear, self.linear_every, 0),
            ("window", self.window, self.window_every, self.window_offset),
        ):
            if has and not (every and (index + 1 + offset) % every == 0):
                return name
        return "full"

    def mlp_of(self, mlp_dim: int) -> int:
        """Returns the parameters of an MLP of this inner size."""
        inner = 2 if self.gated else 1
        biases = (inner * mlp_dim + self.dim) * self.mlp_bias
        return (inner + 1) * self.dim * mlp_dim + biases

    @property
    def size_of_shared(self) -> int:
        """mlp_dim of a shared expert."""
        return self.shared_mlp_dim or self.mlp_dim

    @property
    def norm_parameters(self) -> int:
        """Parameters of a norm."""
        return self.dim * (self.norm_weight + self.norm_bias)

    def parameters_of_layer(self, index: int) -> int:
        mlp = self.mlp_of(self.dense_mlp_dim if index < self.dense_layers else self.mlp_dim)
        if self.experts and index >= self.dense_layers:
            # All experts, their router and the shared experts' gate.
            shared = self.shared_experts * self.mlp_of(self.size_of_shared)
            mlp = self.experts * (mlp + self.dim) + shared + self.dim * self.shared_gate
        return self.attention_parameters(index) + mlp + self.norms * self.norm_parameters

    @property
    def head_parameters(self) -> int:
        return self.num_rows * (self.dim + self.head_bias)

    @property
    def parameters(self) -> int:
        embedding = (self.num_rows + self.more_rows + self.positions) * self.dim
        head = self.num_rows * self.head_bias if self.tied else self.head_parameters
        layers = sum(self.parameters_of_layer(index) for index in range(self.layers))
        return embedding + head + layers + self.norm_parameters
