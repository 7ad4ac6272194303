"""Kernels that pick, sort, pack and merge tokens."""
