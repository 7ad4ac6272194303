"""The decoder, its head and loss, and their shards."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.train.model", "cce_dist.train.model.decoder")
