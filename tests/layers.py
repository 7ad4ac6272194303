"""The layers of docs/design/architecture.md, as tests/test_layout.py holds them."""

from __future__ import annotations

PUBLIC = "<public names>"
ANY = None

# From the bottom up: folders and files of cce_dist. A module belongs to the longest name it begins
# with. It imports rows above its own, never its own row or one below it; what has one name here may
# import each other. After a name: the third-party packages for it.
LAYERS: tuple[dict[str, set[str] | None], ...] = (
    {"python_numbers": set()},
    {"options": set(), "vocab_shard": {"torch"}},
    {"core": {"torch"}, "distributed": {"torch", "mpi4py"}},
    {"reference": {"torch"}},
    {"ranks": {"torch", "mpi4py", "numpy"}},
    {"backends.protocol": {"torch"}, "backends.eight_bits": {"torch"}},
    {"backends.torch": {"torch"}, "backends.triton.kernels": {"triton"}},
    {"backends.triton": {"torch", "triton"}},
    {"backends": {"torch"}},
    {"algorithm": {"torch"}},
    {"frontend": {"torch"}},
    {"loss": {"torch"}},
    {"largest": {"torch"}, "logprobs": {"torch"}},
    {"rl": {"torch"}, "distillation": {"torch"}},
    {PUBLIC: set()},
    {"planner": set()},
    {"pipeline": {"torch"}},
    {"ahead": {"torch", "triton"}},
    {"integrations": ANY, "dealing": ANY},
    {"train": ANY},
    {"testing": {"torch", "triton", "numpy"}},
    {"doctor": {"torch", "triton", "numpy"}},
    {"needs": {"typer"}},
    {"bench": ANY},
    {"cli": ANY},
    {"__main__": ANY},
)
ROW = {name: row for row, names in enumerate(LAYERS) for name in names}

# Narrower than the order of the layers: all that these import of cce_dist ...
ONLY = {
    "reference": {"options", "vocab_shard"},
    "backends.triton.kernels": set(),
    "planner": {"options", "vocab_shard"},
    "integrations": {PUBLIC, "options", "backends"},
    "dealing": {"planner", "vocab_shard"},
    "train": {PUBLIC, "core", "distributed", "pipeline", "planner"},
    "megatron_patch": {PUBLIC, "pipeline", "planner"},
}
# ... and all that import these.
ONLY_IN = {"reference": {"testing", "bench"}, "testing": {"bench", "doctor"}}
TORCH_DISTRIBUTED_IN = {
    "ahead",
    "bench",
    "cli",
    "distributed",
    "doctor",
    "frontend.dtensor",
    "integrations",
    "pipeline",
    "ranks.transport",
    "testing",
    "train",
}
# Under `if TYPE_CHECKING`.
TORCH_DISTRIBUTED_TYPES_IN = {"ranks", "frontend", "loss", "logprobs", "distillation"}
