"""Kernels of step 1: logits of a tile, and each token's statistics."""
