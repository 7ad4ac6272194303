"""Benchmarks of the loss: filter, first call."""
