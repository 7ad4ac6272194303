"""Keys of a configuration that depend on the number of ranks, for jobs whose ranks come and go."""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

from cce_dist.distributed import split_ranks
from cce_dist.train.errors import ConfigError

ALL = "all"


def fit_to_ranks(values: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """Replaces `parallel.tp: all` by a number and `global_batch` by `batch`.

    Later code knows neither `all` nor `global_batch`. Invalid values stay as they are: validation
    reports them.

    Raises:
        ConfigError: a key does not fit the number of ranks, or both global_batch and batch are
            given.
    """
    values = copy.deepcopy(values)
    parallel, global_batch = values.get("parallel", {}), values.get("global_batch")
    if not isinstance(parallel, dict):
        return values
    tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
    if isinstance(tp, str) and tp != ALL:
        raise ConfigError(f"parallel.tp must be an integer >= 1 or {ALL}, got {tp!r}")
    if not _is_count(pp) or not (tp == ALL or (_is_count(tp) and _is_count(global_batch))):
        return values
    try:
        dp, tp = split_ranks(num_ranks, tp=tp, pp=pp, prefix="parallel.")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    values["parallel"] = {**parallel, "tp": tp}
    if not _is_count(global_batch):
        return values
    if "batch" in values:
        raise ConfigError(
            f"global_batch and batch exclude each other, got global_batch={global_batch} and "
            f"batch={values['batch']}: leave one of them out"
        )
    batch, rest = divmod(global_batch, dp)
    if rest:
        multiples = f"{batch * dp} or {(batch + 1) * dp}" if batch else str(dp)
        raise ConfigError(
            f"global_batch must be a multiple of the number of data-parallel ranks, {dp}, got "
            f"{global_batch}: use {multiples}"
        )
    return {**values, "batch": batch, "global_batch": None}


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
