"""Reports of a run: curves, checks, a comparison with dense logits, the pipeline."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.train.report", "cce_dist.train.report.run")
