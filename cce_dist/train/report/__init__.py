"""Reports of a run: its curve, held-out loss and memory, and a comparison with dense logits."""

from cce_dist.core.old_names import attributes_of

__getattr__ = attributes_of("cce_dist.train.report", "cce_dist.train.report.run")
