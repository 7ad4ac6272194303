"""Keys of a configuration that follow the number of ranks, for jobs whose ranks come and go."""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

from cce_dist.distributed import split_ranks
from cce_dist.train.errors import ConfigError

ALL = "all"


def fit_to_ranks(values: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """Replaces `parallel.tp: all` and `global_batch` by their numbers on so many ranks.

    The result has `parallel.tp` and `batch`, so later code need not know about the other forms.
    Values that are not valid in themselves stay for validation to find.

    Raises:
        ConfigError: the two keys do not fit the number of ranks, or `batch`.
    """
    values = copy.deepcopy(values)
    parallel = values.get("parallel", {})
    if not isinstance(parallel, dict):
        return values
    tp, pp = parallel.get("tp", 1), parallel.get("pp", 1)
    if isinstance(tp, str) and tp != ALL:
        raise ConfigError(f"parallel.tp must be an integer or {ALL}, got {tp!r}")
    if not _is_count(pp) or not (tp == ALL or _is_count(tp)):
        return values
    whole = values.get("global_batch")
    if tp != ALL and not _is_count(whole):
        return values
    try:
        dp, tp = split_ranks(num_ranks, tp=tp, pp=pp, prefix="parallel.")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if parallel.get("tp") == ALL:
        parallel["tp"] = tp
    if _is_count(whole):
        if "batch" in values:
            raise ConfigError(
                f"global_batch and batch exclude each other, got {whole} and {values['batch']}: "
                "leave one of them out"
            )
        if whole % dp:
            raise ConfigError(
                f"global_batch must be a multiple of the data-parallel ranks, got {whole} and {dp}"
            )
        values["batch"], values["global_batch"] = whole // dp, None
    return values


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
