"""The job's configuration: its keys, its file, and its fit to the number of ranks."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.train.config", "cce_dist.train.config.schema")
