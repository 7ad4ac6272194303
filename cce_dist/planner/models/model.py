"""Decoder language models as numbers: sizes, and the numbers of parameters that follow."""

from __future__ import annotations

from dataclasses import dataclass

from .linear_attention import LinearAttention


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder-only transformer.

    Args:
        classes: V of the loss, the tokenizer's size.
        rows: rows of the embedding and the head, padding included; None: classes.
        more_rows: further rows of the embedding alone.
        mlp_dim: inner size of the MLP, or of one expert.
        head_dim: dims of an attention head; None: dim / heads.
        gated: the MLP has three matrices; False: two.
        norms: number of norms of a layer.
        norm_weight, norm_bias: each norm, the final norm included, has such a vector.
        positions: number of learned positions, a vector each; 0: positions are computed.
        experts: number of experts; 0: one MLP without a router.
        experts_per_token: experts that a token goes through; 0: all.
        shared_experts: number of experts that every token goes through.
        shared_mlp_dim: inner size of a shared expert; 0: mlp_dim.
        shared_gate: a vector gates the shared experts' output.
        dense_layers, dense_mlp_dim: number of first layers that have one MLP, and its inner size.
        qk_norm: attention has a norm of queries and a norm of keys, over a head.
        qk_norm_heads: these norms have weights for each head, or are over all heads at once.
        window, window_every: tokens that attention looks back at, in all but each window_every-th
            layer (0: in every layer); a window of 0: all tokens.
        window_offset: each window_every-th layer comes so many layers earlier.
        kv_rank, query_rank: ranks of keys and values, and of queries, in multi-head latent
            attention, arXiv:2405.04434. A kv_rank of 0: other attention. A query_rank of 0: queries
            are computed from hidden.
        rope_dim, value_dim: in latent attention, dims of a head with positions, in addition to
            head_dim, and dims of a value.
        query_gate: attention has a gate of the queries' size for the values of each head.
        linear, linear_every: linear attention of all but each linear_every-th layer (0: of every
            layer); None: no layer has linear attention.
        image_layers: indices of layers with cross attention to images. Text skips them, so they
            have parameters and take no time.
        buffers: numbers in a checkpoint that are no parameters, such as causal masks.
    Raises:
        ValueError: a size is below 1, kv_heads do not divide heads, classes exceed rows, or a size
            belongs to a part that the model does not have.
    """

    classes: int
    dim: int
    layers: int
    mlp_dim: int
    heads: int
    kv_heads: int
    rows: int | None = None
    more_rows: int = 0
    head_dim: int | None = None
    gated: bool = True
    tied: bool = False
    norms: int = 2
    norm_weight: bool = True
    norm_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    positions: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    shared_mlp_dim: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_mlp_dim: int = 0
    qk_norm: bool = False
    qk_norm_heads: bool = False
    window: int = 0
    window_every: int = 0
    window_offset: int = 0
    kv_rank: int = 0
    query_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    query_gate: bool = False
    linear: LinearAttention | None = None
    linear_every: int = 0
    image_layers: tuple[int, ...] = ()
    buffers: int = 0

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

    @property
    def attention_matrices(self) -> int:
        """Number of parameters of attention's matrices."""
        if self.kv_rank:
            inner = self.heads * self.key_dim
            queries = inner * (self.query_rank or self.dim) + self.dim * self.query_rank
            each = self.heads * (self.size_of_head + self.head_value_dim)
            keys = self.dim * (self.kv_rank + self.rope_dim) + self.kv_rank * each
            return queries + keys + self.heads * self.head_value_dim * self.dim
        inner, outer = self.heads * self.size_of_head, self.kv_heads * self.size_of_head
        return (2 + self.query_gate) * self.dim * inner + 2 * self.dim * outer

    @property
    def attention_parameters(self) -> int:
        parameters = self.attention_matrices + self.dim * self.out_bias
        if self.kv_rank:
            return parameters + self.kv_rank + self.query_rank  # their norms
        inner, outer = self.heads * self.size_of_head, self.kv_heads * self.size_of_head
        normed = self.heads + self.kv_heads if self.qk_norm_heads else 2
        norms = normed * self.size_of_head * self.qk_norm
        projected = inner * (1 + self.query_gate) + 2 * outer
        return parameters + projected * self.qkv_bias + norms

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

    def attention_parameters_of(self, index: int) -> int:
        kind = self.attention_of(index)
        if kind == "linear" and self.linear:
            return self.linear.parameters(self.dim)
        # Norms of a head's queries and keys, and two gates of one number each.
        image = 2 * self.size_of_head + 2 if kind == "image" else 0
        return self.attention_parameters + image

    def mlp_of(self, mlp_dim: int) -> int:
        """Returns the parameters of an MLP of this inner size."""
        inner = 2 if self.gated else 1
        biases = (inner * mlp_dim + self.dim) * self.mlp_bias
        return (inner + 1) * self.dim * mlp_dim + biases

    @property
    def mlp_parameters(self) -> int:
        """Parameters of all experts, their router and the shared experts' gate."""
        expert = self.mlp_of(self.mlp_dim)
        if not self.experts:
            return expert
        shared = self.shared_experts * self.mlp_of(self.size_of_shared)
        return self.experts * (expert + self.dim) + shared + self.dim * self.shared_gate

    @property
    def size_of_shared(self) -> int:
        """mlp_dim of a shared expert."""
        return self.shared_mlp_dim or self.mlp_dim

    @property
    def norm_parameters(self) -> int:
        """Parameters of a norm."""
        return self.dim * (self.norm_weight + self.norm_bias)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer after the dense layers."""
        return self.parameters_of_layer(self.layers)

    def parameters_of_layer(self, index: int) -> int:
        is_dense = index < self.dense_layers
        mlp = self.mlp_of(self.dense_mlp_dim) if is_dense else self.mlp_parameters
        attention = self.attention_parameters_of(index)
        return attention + mlp + self.norms * self.norm_parameters

    @property
    def head_parameters(self) -> int:
        return self.num_rows * (self.dim + self.head_bias)

    @property
    def parameters(self) -> int:
        embedding = (self.num_rows + self.more_rows + self.positions) * self.dim
        head = self.num_rows * self.head_bias if self.tied else self.head_parameters
        layers = sum(self.parameters_of_layer(index) for index in range(self.layers))
        return embedding + head + layers + self.norm_parameters
