"""Cross-entropy of a language model whose classifier is sharded over ranks.

Logits never exist in memory: each rank computes the log-sum-exp of its own rows tile by tile, and
ranks merge by log-add-exp. Start with `linear_cross_entropy`.
"""

import sys
from typing import Any

try:
    from cce_dist.collectives import all_reduce_logaddexp
    from cce_dist.compute import LogitMoments, LossOutput
    from cce_dist.largest import LargestLogits, largest_logits
    from cce_dist.logprobs import TokenLogprobs, token_logprobs
    from cce_dist.loss import LinearCrossEntropy, linear_cross_entropy
    from cce_dist.options import Filter, LossOptions, Screen
    from cce_dist.quantized import QuantizedWeight, StepQuantizer, quantize_weight
    from cce_dist.vocab_shard import VocabShard
except (ImportError, OSError) as error:
    # Of our own files, not torch's.
    if sys.modules.get("torch") is not None:
        raise
    # `cce-dist doctor` has to start where torch does not: it says why, as does every name here.
    _why = error

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'cce_dist' has no attribute {name!r}")
        raise ImportError(f"cce_dist.{name} needs torch, which cannot be imported") from _why


__all__ = [
    "Filter",
    "LargestLogits",
    "LinearCrossEntropy",
    "LogitMoments",
    "LossOptions",
    "LossOutput",
    "QuantizedWeight",
    "Screen",
    "StepQuantizer",
    "TokenLogprobs",
    "VocabShard",
    "all_reduce_logaddexp",
    "largest_logits",
    "linear_cross_entropy",
    "quantize_weight",
    "token_logprobs",
]
