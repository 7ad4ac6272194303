"""Kernels of step 3: the logits' gradient, and its products."""
