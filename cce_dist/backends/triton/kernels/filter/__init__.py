"""Kernels that list the kept columns and sum the others by group."""
