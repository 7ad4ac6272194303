"""Training over pipelines: layouts, stages, steps."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.train.pipeline", "cce_dist.train.pipeline.step")
