"""Benchmarks of the loss: filter, kernels' tiles, first call, 8-bit copy."""
