"""Reports of a run: its curves, its checks, its figures beside dense logits, its pipeline."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.train.report", "cce_dist.train.report.run")
