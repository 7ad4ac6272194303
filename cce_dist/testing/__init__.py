"""Inputs, the tolerance rule and running ranks: for tests, and for the doctor."""

from cce_dist.testing.cases import Case, dense_outputs, golden_outputs, join_ranks, run_case
from cce_dist.testing.forks import fork_context
from cce_dist.testing.inputs import (
    Inputs,
    each_choice,
    gaussian_inputs,
    large_logit_inputs,
    pairwise,
    sample_targets,
    zipf_inputs,
)
from cce_dist.testing.interpreter import speed_up_interpreter
from cce_dist.testing.places import (
    CPU_PLACES,
    DTYPES,
    PLACES,
    TORCH_CPU,
    TORCH_CUDA,
    TRITON_CPU,
    TRITON_CUDA,
    TRITON_PLACES,
    Place,
    grid,
)
from cce_dist.testing.ranks import CollectiveCounter, RankError, RankPool, nccl_pool, shared_pool
from cce_dist.testing.tolerance import band, check_close64, check_gate, check_outputs, check_promise
