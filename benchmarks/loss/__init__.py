"""Benchmarks of the loss: filter, first call, 8-bit copy."""
