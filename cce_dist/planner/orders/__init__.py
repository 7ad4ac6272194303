"""Orders of work in a pipeline, and when its tasks end."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.planner.orders", "cce_dist.planner.orders.vocab_1f1b")
