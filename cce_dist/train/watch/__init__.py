"""Ranks that watch one another: heartbeats, and the rank to blame for a failure."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.train.watch", "cce_dist.train.watch.watch")
