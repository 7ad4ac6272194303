"""Cross-entropy of a language model whose classifier is sharded over ranks.

Logits never exist in memory: each rank computes the log-sum-exp of its own rows tile by tile, and
ranks merge by log-add-exp. Start with `linear_cross_entropy`.
"""

import sys
from typing import TYPE_CHECKING, Any

_why: Exception | None = None
try:
    from cce_dist.distillation import (
        DistillationOutput,
        TeacherLogprobs,
        linear_distillation,
        listed_distillation,
        teacher_topk,
    )
    from cce_dist.frontend.listed import TokenSupport
    from cce_dist.frontend.quantized import QuantizedWeight, StepQuantizer, quantize_weight
    from cce_dist.frontend.reduction import LogitMoments, LossOutput
    from cce_dist.largest import LargestLogits, largest_logits
    from cce_dist.logprobs import TokenLogprobs, token_logprobs
    from cce_dist.loss import LinearCrossEntropy, linear_cross_entropy
    from cce_dist.options import Filter, LossOptions, Screen
    from cce_dist.ranks.merge import all_reduce_logaddexp
    from cce_dist.vocab_shard import VocabShard
except (ImportError, OSError) as error:
    # torch was imported, so one of our own modules is at fault.
    if sys.modules.get("torch") is not None:
        raise
    # `cce-dist doctor` must start where torch cannot be imported. It reports the error, and so does
    # every name of this module.
    _why = error

if TYPE_CHECKING:
    __version__: str
else:
    # Type checkers do not see this function: with it they would accept any name.
    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _installed_version()
        if _why is None or name not in __all__:
            raise AttributeError(f"module 'cce_dist' has no attribute {name!r}")
        raise ImportError(f"cce_dist.{name} needs torch, which cannot be imported") from _why


def _installed_version() -> str:
    import importlib.metadata
    from pathlib import Path

    try:
        return importlib.metadata.version("cce-dist")
    except importlib.metadata.PackageNotFoundError as error:
        raise AttributeError(
            "cce_dist.__version__ is the installed package's, and cce-dist is not installed: "
            f"pip install {Path(__file__).parent.parent}"
        ) from error


__all__ = [
    "DistillationOutput",
    "Filter",
    "LargestLogits",
    "LinearCrossEntropy",
    "LogitMoments",
    "LossOptions",
    "LossOutput",
    "QuantizedWeight",
    "Screen",
    "StepQuantizer",
    "TeacherLogprobs",
    "TokenLogprobs",
    "TokenSupport",
    "VocabShard",
    "all_reduce_logaddexp",
    "largest_logits",
    "linear_cross_entropy",
    "linear_distillation",
    "listed_distillation",
    "quantize_weight",
    "teacher_topk",
    "token_logprobs",
]
