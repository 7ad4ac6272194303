"""The ranks of the training job: `cce_dist.distributed`, with the configuration's names."""

from __future__ import annotations

import os

from cce_dist.distributed import (
    JoinError,
    LaunchError,
    Ranks,
    init,
    leave,
    own_group,
    rank_from_environment,
    read_launch,
    split_ranks,
)
from cce_dist.distributed.joining import JOIN_TIMEOUT_S
from cce_dist.train.config.schema import ParallelConfig

from .errors import ConfigError, JobError

__all__ = ["Ranks", "connect", "leave", "num_ranks", "own_group", "rank_from_environment"]

# A collective fails this long after parallel.timeout_s.
COLLECTIVE_MARGIN_S = 3.0


def connect(config: ParallelConfig) -> Ranks:
    """Joins the ranks of this job, under any launcher.

    Raises:
        ConfigError: the number of ranks is no multiple of parallel.pp x parallel.tp, there are too
            few GPUs, or the launcher's variables contradict one another.
        JobError: a rank did not come, or cannot be reached.
    """
    # The heartbeat must report first: it names the rank to blame, and NCCL aborts without a name.
    timeout = config.timeout_s + COLLECTIVE_MARGIN_S
    try:
        split_ranks(num_ranks(), tp=config.tp, pp=config.pp, prefix="parallel.")
        return init(
            tp=config.tp, pp=config.pp, timeout=timeout, join_timeout=max(timeout, JOIN_TIMEOUT_S)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except JoinError as error:
        raise JobError(str(error)) from None


def num_ranks() -> int:
    """Returns the number of ranks, also before torch.distributed is initialised.

    Raises:
        ConfigError: the launcher's variables contradict one another.
    """
    try:
        return read_launch(os.environ).world_size
    except LaunchError as error:
        raise ConfigError(str(error)) from None
