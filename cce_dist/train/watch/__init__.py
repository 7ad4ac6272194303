"""Ranks that watch one another: heartbeats, and which rank a failure is put down to."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.train.watch", "cce_dist.train.watch.watch")
