"""Kernels of screened logits: rows in 8 bits, their error, exact columns."""
